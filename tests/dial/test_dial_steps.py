"""What `grmoe dial` measures, times and chooses, step by step, on meters and gates that were made up.

One file, because all steps share the same made-up meter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grmoe.dial import calibration
from grmoe.dial import meter as meter_module
from grmoe.dial import search as search_module
from grmoe.dial import speed as speed_module
from grmoe.dial.calibration import _alpha_rows, _cap, _check, _Describer, _points_to_time
from grmoe.dial.gates import Gates
from grmoe.dial.meter import Family, Meter, Point
from grmoe.dial.search import (
    Option,
    Sensitivity,
    _bases,
    _prices,
    _top_ks,
    between,
    combine,
    expected,
    search,
)
from grmoe.dial.setting import Setting, mass, top_k
from grmoe.dial.speed import Speed, _speed, time_points
from grmoe.dial.target import REFINEMENTS, Target, choose, refine
from grmoe.probe.gates import AffineGate
from grmoe.probe.losses import Measurement
from grmoe.probe.timing import Times
from grmoe.probe.windows import Text


def measured(experts: float, loss: float) -> Measurement:
    return Measurement(
        losses_W=torch.full((8,), loss, dtype=torch.float64),
        layer_experts=(experts,),
        entropy=1.0,
        effective_experts_entropy=2.0,
        effective_experts_inverse=2.0,
    )


def point(experts: float, loss: float, family: Family = "uniform", setting: Setting | None = None) -> Point:
    return Point(setting or mass((experts, loss), 0.5, 4), family, measured(experts, loss))


class SmoothMeter(Meter):
    """Experts grow with τ and fall with α; the loss is 4 − experts. Every measurement is noted."""

    def __init__(self, layers: int, trained: Setting | None = None) -> None:
        self.points: dict[Setting, Point] = {}
        self.asked: list[tuple[Setting, Family]] = []
        self.model = self.text = None  # type: ignore[assignment]
        self.trained = self.measure(trained or mass((1.0,) * layers, 0.987, 4), "trained")

    def measure(self, setting: Setting, family: Family) -> Point:
        self.asked.append((setting, family))
        if setting not in self.points:
            share = setting.tau if setting.tau is not None else (setting.cap - 1) / 3
            alpha = math.prod(setting.alphas) ** (1 / len(setting.alphas))
            experts = 1 + 3 * share / (1 + 0.01 * alpha)
            self.points[setting] = point(experts, 4 - experts, family, setting)
        return self.points[setting]


class NotingGates:
    """Answers every question with another number, and keeps the questions."""

    def __init__(self, *_: Any) -> None:
        self.tau_asked: list[tuple[tuple[float, ...], float]] = []
        self.alpha_asked: list[tuple[int, float, float]] = []

    def tau_for(self, alphas: Any, experts: float) -> float:
        self.tau_asked.append((tuple(alphas), experts))
        return (experts - 1) / 4 + 0.01 * alphas[0]

    def alpha_for(self, layer: int, tau: float, experts: float) -> float:
        self.alpha_asked.append((layer, tau, experts))
        return 10 + len(self.alpha_asked)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> NotingGates:
    kept = NotingGates()
    monkeypatch.setattr(search_module, "Gates", lambda *_: kept)
    return kept


# ------------------------------------------------------------------------------------------------- the search


def test_the_grid_has_five_counts_between_one_and_the_cap(gates: NotingGates) -> None:
    meter = SmoothMeter(1)
    assert search(meter, 4) == []  # with one layer there is nothing to set layer by layer
    aims = [1.24, 1.75, 2.35, 2.95, 3.55]
    grid, more = gates.tau_asked[:20], gates.tau_asked[20:]
    assert [a for a, _ in grid] == [(alpha,) for alpha in (0.5, 1.0, 2.0, 5.0) for _ in range(5)]
    assert [e for _, e in grid] == pytest.approx(aims * 4)
    # Five more at the trained α, between those: the curve of budgets is made of them.
    assert [a for a, _ in more] == [(1.0,)] * 5
    assert [e for _, e in more] == pytest.approx([1.09, 1.48, 2.05, 2.65, 3.25])
    families = [p.family for p in meter.points.values()]
    assert [families.count(f) for f in ("trained", "top-k", "uniform", "per layer")] == [1, 4, 25, 0]
    assert gates.alpha_asked == []


def test_the_trained_alpha_and_the_target_join_the_grid(gates: NotingGates) -> None:
    meter = SmoothMeter(1, trained=top_k((3.0,), 4))
    search(meter, 4, experts=1.5)
    assert {a for a, _ in gates.tau_asked} == {(0.5,), (1.0,), (2.0,), (5.0,), (3.0,)}
    assert [e for _, e in gates.tau_asked if e == 1.5] == [1.5] * 5
    assert len(gates.tau_asked) == 5 * 6 + 5
    top = [s for s, family in meter.asked if family == "top-k"]
    assert top == [top_k((3.0,), k) for k in (1, 2, 3, 4)]
    # A target that no mass setting between the ends can aim at is left out.
    gates.tau_asked.clear()
    for outside in (1.0, 4.0, 5.0):
        search(SmoothMeter(1), 4, experts=outside)
    assert len(gates.tau_asked) == 3 * (4 * 5 + 5)


@pytest.mark.parametrize("layers", [2, 7])
def test_the_number_announced_is_the_number_measured(
    layers: int, gates: NotingGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly so where no setting comes twice: here the combinations are new."""
    new = iter(range(100, 10_000))
    monkeypatch.setattr(
        search_module, "combine", lambda _, count: [(float(next(new)),) * layers for _ in range(count)]
    )
    meter = SmoothMeter(layers)
    found = search(meter, 4, experts=2.2)
    assert len(meter.points) == expected(layers, 4)
    assert len(found) == 2
    assert len(gates.alpha_asked) == 2 * layers * 4
    families = [p.family for p in meter.points.values()]
    assert families.count("per layer") == 2 * (4 * layers + 8)


def test_single_layers_are_aimed_from_few_experts_to_nearly_all(gates: NotingGates) -> None:
    meter = SmoothMeter(3)
    for sensitivity in search(meter, 4):
        tau = sensitivity.base.setting.tau
        asked = [(layer, experts) for layer, t, experts in gates.alpha_asked if t == tau]
        assert [layer for layer, _ in asked] == [0] * 4 + [1] * 4 + [2] * 4
        assert [experts for _, experts in asked] == pytest.approx([1.3, 2.2, 3.1, 3.85] * 3)
        # Changes are of the sum over layers, relative to the base.
        for i, options in enumerate(sensitivity.layers):
            assert len(options) == 5
            for option in options[1:]:
                alphas = list(sensitivity.base.setting.alphas)
                alphas[i] = option.alpha
                there = meter.points[mass(tuple(alphas), tau or 0, 4)]
                more = there.experts_per_token - sensitivity.base.experts_per_token
                assert option.experts == pytest.approx(3 * more)
                assert option.loss == pytest.approx(-more)


def test_at_most_eight_top_ks() -> None:
    assert [_top_ks(cap) for cap in (2, 3, 8)] == [[1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert _top_ks(16) == [1, 2, 4, 6, 8, 10, 12, 14, 16]
    assert expected(2, 7) + 1 == expected(2, 8) == expected(2, 9) == expected(2, 64)


def test_two_experts_are_enough_to_choose_from_and_the_first_layer_names_the_alpha(
    gates: NotingGates,
) -> None:
    search(SmoothMeter(2, trained=top_k((3.0, 7.0), 2)), 2)
    assert {a for a, _ in gates.tau_asked} == {(3.0, 7.0), *((a, a) for a in (0.5, 1.0, 2.0, 5.0, 3.0))}
    assert [a for a, _ in gates.tau_asked].count((3.0, 7.0)) == 10  # the whole curve, because layers differ


def test_bases_are_spread_evenly_along_the_uniform_frontier() -> None:
    meter = SmoothMeter(2)

    def bases(count: int, experts: float | None = None) -> list[float]:
        points = [point(1 + i, 10.0 - i) for i in range(count)]
        points += [point(1.5, 99.0), point(0.5, 0.1, "per layer"), point(0.6, 0.1, "top-k")]
        meter.points = {p.setting: p for p in points}
        return [p.experts_per_token for p in _bases(meter, experts)]

    assert bases(8) == [3, 7]
    assert bases(4) == [2, 4]
    assert bases(2) == [1, 2]
    assert bases(1) == [1]
    assert bases(8, experts=5.2) == [5, 6]
    assert bases(8, experts=1.0) == [1, 2]


def random_layers(seed: int) -> list[list[Option]]:
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(4):
        cost, loss = torch.randn(2, 4, generator=generator).tolist()
        layers.append([Option(1.0, 0.0, 0.0)] + [Option(2.0 + i, cost[i], loss[i]) for i in range(4)])
    return layers


@pytest.mark.parametrize("seed", range(4))
def test_every_best_combination_is_found(seed: int) -> None:
    """At any price of an expert: the prices tried leave none out. From few experts to many, or the other way."""
    layers = random_layers(seed)
    base = point(2.0, 1.0, setting=mass((1.0,) * 4, 0.5, 4))
    found = combine(Sensitivity(base, layers), 1000)
    best = {
        tuple(min(options, key=lambda o: o.loss + price * o.experts).alpha for options in layers)
        for price in torch.cat([torch.linspace(1e-3, 5, 2000), torch.logspace(0.7, 4, 200)]).double().tolist()
    }
    assert best - {base.setting.alphas} <= set(found)
    assert base.setting.alphas not in found
    experts = [
        sum(next(o.experts for o in layer if o.alpha == a) for a, layer in zip(alphas, layers, strict=True))
        for alphas in found
    ]
    assert experts == sorted(experts, reverse=True)
    few = combine(Sensitivity(base, layers), 3)
    places = [found.index(alphas) for alphas in few]
    assert places[0] == 0
    gaps = [b - a for a, b in zip(places, [*places[1:], len(found)], strict=True)]
    assert max(gaps) - min(gaps) <= 1
    assert combine(Sensitivity(base, layers), len(found)) == found


def test_the_base_itself_is_not_measured_again() -> None:
    options = [Option(1.0, 0.0, 0.0), Option(2.0, -1.0, 3.0), Option(3.0, 1.0, -0.5)]
    base = point(2.0, 1.0, setting=mass((1.0, 1.0), 0.5, 4))
    # A price of an expert below 0.5 buys more in both layers, one above 3 fewer. Between them the base is best.
    assert combine(Sensitivity(base, [options] * 2), 9) == [(3.0, 3.0), (2.0, 2.0)]


def test_prices_lie_between_the_turns() -> None:
    layers = [[Option(1.0, 0.0, 0.0), Option(2.0, -1.0, 3.0), Option(3.0, 1.0, 1.0)]]
    # The third gives way to the second at 1, the first at 3. The third is never better than the first.
    assert _prices(layers) == [0.5, 2.0, 7.0]
    assert _prices([[Option(1.0, 0.0, 0.0)]]) == [1.0]


def test_the_way_between_is_geometric_in_alpha_and_linear_in_tau() -> None:
    a, b = mass((1.0, 16.0), 0.4, 2), mass((16.0, 1.0), 0.8, 2)
    assert between(a, b, 0.25) == mass((2.0, 8.0), 0.5, 2)
    # Top-1 joins any cap, because one expert reaches τ = 0.1 with two experts or more to share.
    assert between(top_k((1.0, 16.0), 1), a, 0.5) == mass((1.0, 16.0), 0.25, 2)
    dense = Setting((1.0, 16.0), "dense", None, 2)
    assert between(dense, a, 0.5) == mass((1.0, 16.0), 0.7, 2)
    assert between(a, mass((0.0, 1.0), 0.8, 2), 0.5) is None  # no geometric mean with zero
    assert between(mass((1.0, 0.0), 0.8, 2), a, 0.5) is None
    assert between(a, mass((1.0, 16.0), 0.4, 3), 0.5) is None


# -------------------------------------------------------------------------------------------------- the gates


def made_up_gates(cap: int) -> Gates:
    generator = torch.Generator().manual_seed(0)
    gates = object.__new__(Gates)
    gates.cap = cap
    a, b = torch.randn(2, 2, 300, 6, generator=generator, dtype=torch.float64)
    gates.layers = [AffineGate(0.1 * a[i], b[i]) for i in range(2)]
    return gates


@pytest.mark.parametrize("cap", [2, 4, 6])
def test_predicted_experts_against_a_loop(cap: int) -> None:
    gates = made_up_gates(cap)
    for layer, alpha, tau in ((0, 1.0, 0.5), (1, 3.0, 0.9), (0, 0.2, 0.95)):
        count = 0
        gate = gates.layers[layer]
        for row in torch.softmax(gate.a_TN + alpha * gate.b_TN, -1).tolist():
            held, used = 0.0, 0
            for p in sorted(row, reverse=True):
                if used < cap and (used == 0 or held < tau):
                    held, used = held + p, used + 1
            count += used
        assert gates.experts(layer, alpha, tau) == pytest.approx(count / 300, abs=1e-12)


def test_the_bisections_end_at_the_edge() -> None:
    gates = made_up_gates(4)

    def mean(tau: float) -> float:
        return (gates.experts(0, 1.0, tau) + gates.experts(1, 2.0, tau)) / 2

    for aim in (1.3, 2.5, 3.6):
        tau = gates.tau_for((1.0, 2.0), aim)
        assert mean(tau) >= aim > mean(tau - 1e-8)
        alpha = gates.alpha_for(1, 0.8, aim)
        assert gates.experts(1, alpha, 0.8) <= aim < gates.experts(1, alpha * (1 - 1e-6), 0.8)
    assert gates.tau_for((1.0, 2.0), 9.0) == pytest.approx(1.0)  # out of reach: all there are
    assert gates.alpha_for(0, 1e-9, 1.0) == pytest.approx(0.01)  # the ends of the range of α
    assert gates.alpha_for(0, 1.0, 0.5) == pytest.approx(100)


# -------------------------------------------------------------------------------------------------- the meter


def test_a_meter_measures_each_setting_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    applied: list[Setting] = []
    start = top_k((1.0, 1.0), 2)
    monkeypatch.setattr(meter_module, "apply", lambda model, setting: applied.append(setting))
    monkeypatch.setattr(meter_module, "current", lambda config: start)
    monkeypatch.setattr(meter_module, "measure", lambda model, text: measured(1.5, 2.5))
    meter = Meter(SimpleNamespace(config=None), None, said.append)  # type: ignore[arg-type]
    assert meter.layers == 2
    assert meter.measure(start, "top-k") is meter.trained  # with the family it had first
    other = mass((1.0, 2.0), 0.5, 2)
    first = meter.measure(other, "per layer")
    assert meter.measure(other, "uniform") is first
    assert (first.family, first.experts_per_token, first.loss) == ("per layer", 1.5, 2.5)
    assert applied == [start, other]
    assert said == ["trained", "per layer"]

    def fail(model: object, text: object) -> Measurement:
        raise ValueError("the loss is NaN")

    monkeypatch.setattr(meter_module, "measure", fail)
    with pytest.raises(ValueError, match=r"the loss is NaN \(α 7, top-2\)"):
        meter.measure(top_k((7.0, 7.0), 2), "top-k")
    assert len(meter.points) == 2


# --------------------------------------------------------------------------------------------------- the speed


def test_speed_is_tokens_over_the_median_time() -> None:
    own, trained = Times([[2.0], [4.0], [10.0]]), Times([[6.0], [4.0], [40.0]])
    speed = _speed(own, trained, 500)
    assert speed.tokens_per_second == pytest.approx(500 / 4.0 * 1000)
    # The middle 80 % of 2, 4, 10 ms: 2.4 to 8.8.
    assert speed.interval == pytest.approx((500 / 8.8 * 1e3, 500 / 2.4 * 1e3))
    # Ratios by round are 3, 1 and 4. The ratio of medians would be 1.5.
    assert speed.relative == pytest.approx(3.0)
    assert speed.relative_interval == pytest.approx((1.4, 3.8))
    turns = _speed(Times([[1.0, 2.0, 9.0]]), Times([[8.0, 3.0, 4.0]]), 10)
    assert turns.relative == pytest.approx(2.0)  # medians within a round


def test_settings_take_turns_and_each_is_timed_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, fast, slow = (point(e, 1.0, setting=top_k((1.0,), k)) for e, k in ((2, 2), (1, 1), (3, 3)))
    applied: list[int] = []
    warmed: list[int] = []
    turns: list[tuple[int, int]] = []
    batches: list[tuple[int, ...]] = []
    said: list[str] = []

    class Model:
        device = torch.device("cpu")
        resets = 0

        def __call__(self, input_ids: torch.Tensor, **options: Any) -> None:
            batches.append(tuple(input_ids.shape))
            assert options == {"use_cache": False, "logits_to_keep": 1}

        def reset_routing_metrics(self) -> None:
            self.resets += 1

    class FakeTimer:
        host_ms = None

        def __init__(self, device: torch.device) -> None: ...

        def turn(self, run: Callable[[], object]) -> list[float]:
            run()
            turns.append((applied[-1], len(said)))
            return [float(applied[-1])]

    def warm(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
        warmed.append(applied[-1])
        return run

    monkeypatch.setattr(speed_module, "apply", lambda model, setting: applied.append(setting.cap))
    monkeypatch.setattr(speed_module, "Timer", FakeTimer)
    monkeypatch.setattr(speed_module, "warmed_up", warm)
    model: Any = Model()
    text = Text("t", torch.zeros(100, 33, dtype=torch.long))
    found = time_points(model, text, [fast, trained, slow, fast], trained, rounds=3, step=said.append)
    assert warmed == [2, 1, 3]  # the trained setting first, each of them once
    assert turns == [(k, round) for round in (1, 2, 3) for k in (2, 1, 3)]
    assert said == ["speed"] * 4
    assert set(batches) == {(32, 32)}  # 1024 tokens
    assert model.resets == 1
    assert {p.setting.cap: s.relative for p, s in found.items()} == {2: 1.0, 1: 2.0, 3: pytest.approx(2 / 3)}
    assert found[fast].tokens_per_second == pytest.approx(1024 / 1.0 * 1e3)


# ------------------------------------------------------------------------------------------------- the targets


def test_a_target_keeps_a_plain_number() -> None:
    for kind in ("experts", "perplexity", "throughput"):
        target = Target(kind, torch.tensor(1.5))  # type: ignore[arg-type]
        assert type(target.value) is float
        assert target.value == 1.5
    assert Target("experts", 1).value == 1.0
    assert str(Target("perplexity", 0.02)) == "perplexity at most 2 % above the trained setting"


@pytest.mark.parametrize("target", [Target("experts", 2.0), Target("perplexity", 1.0)], ids=str)
def test_refining_measures_new_settings_ever_nearer_to_the_target(target: Target) -> None:
    meter = SmoothMeter(2)
    meter.measure(mass((1.0, 1.0), 0.1, 4), "uniform")
    # Trained: 3.93 experts. exp(3.93 − experts) ≤ 2 gives at least 3.24 experts.
    limit = 2.0 if target.kind == "experts" else meter.trained.experts_per_token - math.log(2)
    before, meter.asked = list(meter.points), []
    refine(target, meter)
    settings = [setting for setting, _ in meter.asked]
    assert len(settings) == len(set(settings)) == REFINEMENTS == 6
    assert not set(settings) & set(before)
    assert {family for _, family in meter.asked} == {"uniform"}
    chosen = choose(target, meter.points.values(), meter.trained, lambda _: None)
    # Six halvings of an interval of 2.6 experts; rounding to four digits costs little.
    assert abs(chosen.experts_per_token - limit) <= 2.7 / 2**6
    assert (chosen.experts_per_token <= limit) == (target.kind == "experts")


def test_refining_says_whether_layers_differ_and_stops_where_nothing_is_left() -> None:
    meter = SmoothMeter(2)
    meter.measure(mass((8.0, 1.0), 0.1, 4), "per layer")
    meter.asked = []
    refine(Target("experts", 2.0), meter)
    assert {family for _, family in meter.asked} == {"per layer"}
    alone = SmoothMeter(2, trained=top_k((1.0, 1.0), 1))
    alone.asked = []
    refine(Target("experts", 2.0), alone)  # nothing lies beyond
    refine(Target("throughput", 2.0), meter)  # speeds are not known yet
    assert alone.asked == []
    assert len(meter.asked) == 6


# --------------------------------------------------------------------------------------------- the calibration


def dominated(p: Point, others: list[Point]) -> bool:
    """Whether another point is no worse in both and better in one."""
    return any(
        q.experts_per_token <= p.experts_per_token
        and q.loss <= p.loss
        and (q.experts_per_token, q.loss) != (p.experts_per_token, p.loss)
        for q in others
    )


def test_flags_are_the_frontiers_recomputed() -> None:
    generator = torch.Generator().manual_seed(1)
    kinds: tuple[Family, ...] = ("uniform", "per layer", "top-k")
    numbers = torch.rand(60, 2, generator=generator, dtype=torch.float64).tolist()
    trained = point(1.9, 0.5, "trained")
    points = [trained, *(point(1 + e, l, kinds[i % 3]) for i, (e, l) in enumerate(numbers))]
    speeds = {points[3]: Speed(1.0, (1.0, 1.0), 1.0, (1.0, 1.0))}
    describe = _Describer(points, trained, speeds)
    uniform = [p for p in points if p.family in ("uniform", "trained")]
    dial = [p for p in points if p.family != "top-k"]
    for p in points:
        fields = describe(p)
        assert fields["on_frontier"] == (p in dial and not dominated(p, dial))
        assert fields["on_uniform_frontier"] == (p in uniform and not dominated(p, uniform))
        assert fields["speed"] is speeds.get(p)
        assert fields["name"] == str(p.setting)
        assert fields["setting"] == p.setting.fields
        assert fields["increase"].value == pytest.approx(math.expm1(p.loss - 0.5))
        assert (fields["experts_per_token"], fields["loss"]) == (p.experts_per_token, p.loss)


def test_a_long_frontier_is_thinned_evenly_with_both_ends_and_every_top_k() -> None:
    trained = point(2.0, 0.9, "trained", top_k((1.0,), 2))
    tops = [point(1.0 + i, 2.0 - i, "top-k", top_k((1.0,), 1 + i)) for i in range(2)]
    for count in (3, 14, 15, 16, 40):
        best = [point(1 + i / 100, 5.0 - i / 100) for i in range(count)]
        timed = _points_to_time([*tops, trained, *best], trained)
        frontier = [p for p in timed if p in best or p is trained][
            :-1
        ]  # then top-k, the trained setting first
        assert timed[len(frontier) :] == [trained, *tops]
        every = [*best, trained]
        assert len(frontier) == min(len(every), 16)
        assert (frontier[0], frontier[-1]) == (best[0], trained)
        places = [every.index(p) for p in frontier]
        gaps = {b - a for a, b in itertools.pairwise(places)}
        assert max(gaps) - min(gaps) <= 1


def test_the_cap_is_as_asked_or_as_trained() -> None:
    config: Any = SimpleNamespace(num_experts=4, num_experts_per_tok=3)
    assert [_cap(asked, config) for asked in (None, 1, 4)] == [3, 1, 4]
    assert _cap(None, SimpleNamespace(num_experts=4, num_experts_per_tok=None)) == 2  # type: ignore[arg-type]
    assert _cap(None, SimpleNamespace(num_experts=4, num_experts_per_tok=9)) == 4  # type: ignore[arg-type]
    for wrong in (0, 5):
        with pytest.raises(ValueError, match=f"cap must be from 1 to 4, the number of experts, got {wrong}"):
            _cap(wrong, config)


def test_the_alpha_table_has_the_chosen_tau() -> None:
    meter = SmoothMeter(2)
    for setting, tau in (
        (mass((3.0, 4.0), 0.6, 2), 0.6),
        (top_k((1.0, 1.0), 2), 0.9),
        (Setting((1.0, 1.0), "threshold", 0.3, 2), 0.9),
    ):
        rows = _alpha_rows(meter, point(1.5, 1.0, setting=setting), 3)
        assert {a: p.setting for a, p in rows.items()} == {
            a: mass((a, a), tau, 3) for a in (0.5, 1.0, 2.0, 5.0)
        }
        assert {p.family for p in rows.values()} == {"uniform"}


def test_a_check_measures_both_settings_on_the_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, chosen = point(2.0, 1.0, "trained"), point(1.4, 1.1, "per layer")
    there = {trained.setting: measured(2.0, 2.0), chosen.setting: measured(1.6, 2.3)}
    applied = [chosen.setting]
    for module in (calibration, meter_module):
        monkeypatch.setattr(module, "apply", lambda model, setting: applied.append(setting))
    monkeypatch.setattr(meter_module, "current", lambda config: applied[-1])
    monkeypatch.setattr(meter_module, "measure", lambda model, text: there[applied[-1]])
    text = Text("other", torch.zeros(8, 17, dtype=torch.long))
    said: list[str] = []
    grown = math.expm1(0.3)
    for target, missed in (
        (Target("experts", 1.5), 1.6 - 1.5),
        (Target("perplexity", 0.2), grown - 0.2),
        (Target("throughput", 1.2), None),
    ):
        found = _check(SimpleNamespace(config=None), target, trained, chosen, text, said.append)  # type: ignore[arg-type]
        assert found.missed_by == (None if missed is None else pytest.approx(missed))
        assert (found.text, found.tokens, found.experts_per_token) == ("other", 128, 1.6)
        assert found.increase.value == pytest.approx(grown)
        assert found.perplexity_trained == pytest.approx(math.exp(2.0))
        assert found.perplexity == pytest.approx(math.exp(2.3))
    assert said == ["trained", "per layer"] * 3


@pytest.mark.parametrize(
    "target", [Target("experts", 2.0), Target("perplexity", 1.0), Target("throughput", 1.5)], ids=str
)
def test_a_run_searches_refines_times_and_chooses(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage is made up, so that it is clear what each one is given."""
    meter = SmoothMeter(2)
    timed: list[list[Point]] = []
    totals: list[int] = []
    applied: list[Setting] = []
    used: list[tuple[Any, float | None]] = []
    searched: list[tuple[int, float | None]] = []
    config = SimpleNamespace(moe_layers=[0, 1], num_experts=4, num_experts_per_tok=3, router="grassmann")
    budgets: list[float | None] = []
    model = SimpleNamespace(config=config, set_budget=budgets.append)
    opened = {"m": SimpleNamespace(model=model, path=Path("a")), "b": SimpleNamespace(path=Path("b"))}
    texts = [Text(name, torch.zeros(8, 17, dtype=torch.long)) for name in ("own", "a", "b")]

    def fake_search(meter: SmoothMeter, cap: int, experts: float | None) -> list[Sensitivity]:
        searched.append((cap, experts))
        for tau in (0.1, 0.4, 0.7):
            meter.measure(mass((1.0, 1.0), tau, 4), "uniform")
        return []

    def fake_times(_: Any, __: Any, points: list[Point], trained: Point, step: Any) -> dict[Point, Speed]:
        timed.append(list(points))
        return {
            p: Speed(float(len(timed)), (1, 1), 4 / p.experts_per_token, (1, 1)) for p in [trained, *points]
        }

    class NotingSteps:
        def __init__(self, progress: Any, total: int) -> None:
            totals.append(total)

        def __call__(self, stage: str) -> None: ...

    stubs: dict[str, Any] = {
        "open_model": lambda path, *_, **__: opened[path],
        "check_tokens": lambda *_: None,
        "measure_budgets": lambda name, loaded, trained, *_, **__: [(name, loaded.path.name, trained is None)],
        "read_texts": lambda sources, *_: texts[: len(sources)],
        "Meter": lambda *_: meter, "search": fake_search, "time_points": fake_times, "certify": lambda *_: [],
        "apply": lambda _, setting: applied.append(setting), "Steps": NotingSteps,
        "use_curve": lambda _, curve, budget: used.append((curve, budget)),
        "_check": lambda m, t, trained, chosen, text, step: text.name,
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(calibration, name, stub)
    plan = calibration.Plan(model="m", target=target, checks=("a", "b"), beside=("b",))
    body = calibration.run(plan).body
    assert searched == [(3, 2.0 if target.kind == "experts" else None)]
    # 6 refinements, timing in passes of 9 rounds and a warm-up, two measurements per check; the budgets 3, 2.25, 1.5
    # and 1 of two models, and the other one as trained.
    passes = 2 if target.kind == "throughput" else 1
    assert totals == [expected(2, 3) + 6 + 10 * passes + 2 * 2 + 2 * 4 + 1]
    assert body.checks == ["a", "b"]
    assert (body.calibration.text, body.calibration.tokens, body.calibration.windows) == ("own", 128, 8)
    # The trained setting stays; the chosen one is a budget.
    assert [str(setting) for setting in applied] == [body.trained.name]
    assert used == [(None, None), (body.curve, None)]
    assert budgets == [body.budget]
    assert body.budgets == [("a", "a", False), ("b", "b", True)]
    assert body.budget == round(body.chosen.experts_per_token, 4)
    refined = 6 if target.kind != "throughput" else 0
    assert len(body.points) == 1 + 3 + refined + 4  # trained, grid, refinements, rows of the α table
    counts = [p.experts_per_token for p in body.points]
    assert counts == sorted(counts)
    if target.kind == "throughput":
        # Timed before the choice, and the rows of the table afterwards.
        assert len(timed) == 2
        assert [str(p.setting) for p in timed[1]] == [body.chosen.name, *(row.name for row in body.table)]
        assert body.chosen.experts_per_token <= 4 / 1.5
        assert body.chosen.speed is not None
        assert body.chosen.speed.tokens_per_second == 1.0
    else:
        assert len(timed) == 1
        assert len(timed[0]) == 4 + refined + 1 + 4
    assert {row.speed.tokens_per_second for row in body.table if row.speed} == {float(len(timed))}
    assert all(row.speed for row in body.table)

    def refuse(_: object) -> None:
        raise ValueError("no dial")

    monkeypatch.setattr(calibration, "check_router", refuse)
    with pytest.raises(ValueError, match="no dial"):
        calibration.run(plan)
