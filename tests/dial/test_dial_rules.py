"""Two rules beside τ and α: top-k with a k per layer, and experts chosen by gate × norm."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import NotingGates, SmoothMeter, measured

from grmoe.dial import Plan, Target, apply, calibration, current, level, mass, save, top_k
from grmoe.dial.curve import build_curve, chosen_budget
from grmoe.dial.gates import Gates
from grmoe.dial.meter import Family, Meter, Point
from grmoe.dial.norms import expert_norms
from grmoe.dial.rules import expected_rules, lowered, search_rules
from grmoe.dial.search import Sensitivity, cutter, halfway
from grmoe.dial.setting import Setting, k_per_layer
from grmoe.dial.speed import Speed
from grmoe.dial.target import choose, family, meets
from grmoe.probe.losses import measure
from grmoe.probe.routing import layer_inputs, moe_layers, recorded
from grmoe.probe.windows import Text, read_windows
from grmoe.routing import check_curve, routers
from grmoe.runs.open import LoadedModel, open_model

Searched = tuple[Meter, list[Sensitivity]]
NORMS = ((0.2, 1.0, 3.0, 0.5), (1.0, 1.5, 0.1, 2.0))


# ---------------------------------------------------------------------------------------------------- the settings


def test_a_k_per_layer_in_a_model(loaded: LoadedModel, text: Text) -> None:
    model = loaded.model
    before = measure(model, text)
    apply(model, k_per_layer((1.0, 1.0), (1, 2)))
    assert [(r.cap, r.selection.max_experts(4)) for r in routers(model)] == [(1, 2), (2, 2)]
    found = measure(model, text)
    assert found.layer_experts == (1.0, 2.0)
    apply(model, current(model.config))
    assert (model.config.budget, model.config.budget_curve) == (None, None)
    assert torch.equal(measure(model, text).losses_W, before.losses_W)
    for router, k in zip(routers(model), (1, 2), strict=True):
        router.cap = k
    assert torch.equal(measure(model, text).losses_W, found.losses_W)


def test_gate_times_norm_in_a_model(loaded: LoadedModel, text: Text) -> None:
    model = loaded.model
    before = measure(model, text)
    apply(model, top_k((1.0, 1.0), 1, NORMS))
    ids_WS = text.some(64).inputs_WS
    with torch.no_grad(), recorded(model) as seen:
        model.model(input_ids=ids_WS, use_cache=False)
    for routing, norms in zip(seen, NORMS, strict=True):
        wanted = (routing.probs * torch.tensor(norms)).argmax(-1)
        assert torch.equal(routing.selected.int().argmax(-1), wanted)
        assert not torch.equal(wanted, routing.probs.argmax(-1))
        kept = torch.where(routing.selected, routing.probs, 0.0)
        assert torch.equal(routing.weights, kept)  # weights stay those of the gate
    assert measure(model, text).experts_per_token == 1.0
    apply(model, k_per_layer((1.0, 1.0), (1, 2)))  # by the gate again
    assert not model.config.biased
    apply(model, top_k((1.0, 1.0), 2))
    assert torch.equal(measure(model, text).losses_W, before.losses_W)


def test_a_wrong_rule_changes_nothing(loaded: LoadedModel) -> None:
    config = loaded.model.config
    wrong = {
        Setting(
            (1.0, 1.0), "topk", None, 2, caps=(1, 2, 2)
        ): r"budget_curve\[0\].cap must be one number or 2",
        Setting((1.0, 1.0), "topk", None, 9, caps=(1, 9)): "must be at most 4 experts, got 9",
        top_k((1.0, 1.0), 1, NORMS[:1]): r"budget_curve\[0\].bias must be 2 lists of 4 numbers",
    }
    before = config.to_dict()
    for setting, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            apply(loaded.model, setting)
        assert config.to_dict() == before


def test_settings_say_their_rule() -> None:
    assert str(k_per_layer((1.0, 1.0), (1, 2))) == "α 1, top-[1, 2]"
    assert k_per_layer((1.0, 1.0), (2, 2)) == top_k((1.0, 1.0), 2)
    assert str(mass((1.0, 1.0), 0.3, 2, NORMS)) == "α 1, mass 0.3, cap 2, by gate × norm"
    assert str(top_k((1.0, 1.0), 1, NORMS)) == "α 1, top-1, by gate × norm"
    assert k_per_layer((1.0, 1.0), (1, 2)).fields["cap"] == [1, 2]
    assert set(top_k((1.0, 1.0), 1).fields) == {"alpha", "selection", "selection_tau", "num_experts_per_tok"}


def test_only_settings_of_one_rule_are_joined() -> None:
    ranked, plain = mass((1.0, 1.0), 0.4, 2, NORMS), mass((1.0, 1.0), 0.4, 2)
    middle = halfway(ranked, top_k((1.0, 1.0), 2, NORMS))
    assert middle == mass((1.0, 1.0), 0.7, 2, NORMS)
    assert family(middle) == "gate × norm"
    assert halfway(plain, top_k((4.0, 1.0), 1)) == mass((2.0, 1.0), 0.2, 2)  # top-1 is τ 0, whatever the gate
    assert halfway(ranked, plain) is None
    assert halfway(plain, k_per_layer((1.0, 1.0), (1, 2))) is None
    assert (family(plain), family(mass((1.0, 2.0), 0.4, 2))) == ("uniform", "per layer")


# ------------------------------------------------------------------------------------------------------ the search


@pytest.mark.parametrize("seed", range(3))
def test_the_way_down_is_the_best_for_its_number_of_experts(seed: int) -> None:
    """Against all combinations by brute force, with losses that add up and convex in every layer."""
    generator = torch.Generator().manual_seed(seed)
    levels = [8, 4, 1]
    steps = torch.rand(4, 2, generator=generator).sort(-1).values.tolist()  # loss per expert, rising
    losses = [[0.0, 4 * a, 4 * a + 3 * b] for a, b in steps]
    chain = lowered(levels, losses)
    assert len(chain) == 8
    assert chain[-1] == (1, 1, 1, 1)
    costs = {
        tuple(levels[p] for p in places): sum(losses[i][p] for i, p in enumerate(places))
        for places in itertools.product(range(3), repeat=4)
    }
    for above, below in itertools.pairwise([(8,) * 4, *chain]):
        assert sum(a != b for a, b in zip(above, below, strict=True)) == 1
        assert all(a >= b for a, b in zip(above, below, strict=True))
        assert all(cost >= costs[below] - 1e-12 for caps, cost in costs.items() if sum(caps) <= sum(below))


def test_a_layer_that_gains_nothing_from_half_is_lowered_at_once() -> None:
    assert lowered([4, 2, 1], [[0.0, 0.5, 0.3]]) == [(1,)]


class LayerMeter(SmoothMeter):
    """Every expert that layer i lacks costs a loss of i + 1."""

    def measure(self, setting: Setting, family: Family) -> Point:
        self.asked.append((setting, family))
        if setting not in self.points:
            caps = setting.caps or (setting.cap,) * len(setting.alphas)
            lost = sum((i + 1) * (4 - k) for i, k in enumerate(caps))
            self.points[setting] = Point(setting, family, measured(sum(caps) / len(caps), float(lost)))
        return self.points[setting]


def test_layers_are_lowered_in_the_order_of_what_they_lose() -> None:
    meter = LayerMeter(3, trained=top_k((1.0,) * 3, 4))
    meter.measure(top_k((1.0,) * 3, 1), "top-k")
    search_rules(meter, NORMS, 4, cutter(meter, NotingGates(), 4, NORMS))  # type: ignore[arg-type]
    found = [s.caps for s, name in meter.asked if name == "k per layer"]
    assert found[:6] == [(2, 4, 4), (1, 4, 4), (4, 2, 4), (4, 1, 4), (4, 4, 2), (4, 4, 1)]
    assert found[6:] == [(1, 2, 4), (1, 1, 4), (1, 1, 2)]
    ranked = [s for s, name in meter.asked if name == "gate × norm"]
    assert ranked[:2] == [top_k((1.0,) * 3, k, NORMS) for k in (1, 4)]
    assert [(s.norms, s.cap) for s in ranked[2:]] == [(NORMS, 4)] * 4
    assert len(found) + len(ranked) <= expected_rules(3, 4) == 6 + 4 + 6


def test_what_is_measured_of_both_rules(searched: Searched) -> None:
    points = list(searched[0].points.values())
    static = [p for p in points if p.family == "k per layer"]
    assert {p.setting.caps for p in static} == {(1, 2), (2, 1)}
    assert all(p.measured.layer_experts == tuple(map(float, p.setting.caps or ())) for p in static)
    ranked = sorted((p for p in points if p.family == "gate × norm"), key=lambda p: p.experts_per_token)
    assert [p.experts_per_token for p in ranked] == pytest.approx([1.0, 1.08, 1.25, 1.5, 1.75, 2.0], abs=0.1)
    (norms,) = {p.setting.norms for p in ranked}
    assert norms is not None
    assert [len(layer) for layer in norms] == [4, 4]


def test_norms_against_a_loop(loaded: LoadedModel, text: Text) -> None:
    found = expert_norms(loaded.model, text)
    inputs = layer_inputs(loaded.model, text.inputs_WS)
    for layer, x_TD, norms in zip(moe_layers(loaded.model), inputs, found, strict=True):
        sums = [0.0] * 4
        for x_D in x_TD.detach():
            for e in range(4):
                gate, up = (layer.experts.up[e].detach() @ x_D).chunk(2)
                y_D = layer.experts.down_proj[e].detach() @ (torch.nn.functional.silu(gate) * up)
                sums[e] += float(y_D.norm())
        means = [s / len(x_TD) for s in sums]
        assert norms == pytest.approx([m / (sum(means) / 4) for m in means], rel=1e-3)
        assert max(norms) / min(norms) > 1.05


def test_predicted_experts_by_gate_times_norm(loaded: LoadedModel, text: Text) -> None:
    gates = Gates(loaded.model, text, 3).times(NORMS)
    for layer, norms in enumerate(NORMS):
        plain = Gates(loaded.model, text, 3).layers[layer].probs(2.0)
        count = 0
        for row in (plain * torch.tensor(norms)).tolist():
            held, used = 0.0, 0
            for share in sorted((r / sum(row) for r in row), reverse=True):
                if used < 3 and (used == 0 or held < 0.7):
                    held, used = held + share, used + 1
            count += used
        assert gates.experts(layer, 2.0, 0.7) == pytest.approx(count / len(plain), abs=2 / len(plain))


# ------------------------------------------------------------------------------------------------------- the curve


def caps_point(caps: tuple[int, ...], loss: float) -> Point:
    return Point(k_per_layer((1.0,) * len(caps), caps), "k per layer", measured(sum(caps) / len(caps), loss))


def test_a_curve_of_k_per_layer_only_adds_experts_on_the_way_up() -> None:
    trained = Point(top_k((1.0,) * 3, 4), "trained", measured(4.0, 1.0))
    chosen = caps_point((1, 2, 4), 1.5)
    others = [(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 2), (4, 1, 4), (1, 4, 4), (4, 4, 2), (2, 4, 4)]
    ranked = Point(top_k((1.0,) * 3, 1, (NORMS[0],) * 3), "gate × norm", measured(1.0, 0.1))
    points = [trained, chosen, ranked, *(caps_point(caps, 2.0 + sum(caps) / 100) for caps in others)]
    curve = build_curve(points, trained, chosen, 4, 4)
    check_curve(curve, 3, 4)
    assert [p["cap"] for p in curve] == [1, [1, 1, 2], [1, 2, 2], [1, 2, 4], [1, 4, 4], [2, 4, 4], 4]
    assert {p["tau"] for p in curve} == {1.0}
    assert chosen_budget(curve, chosen) == round(7 / 3, 4)


def test_a_curve_of_gate_times_norm_has_no_other_rule_below_the_full_budget() -> None:
    def ranked(setting: Setting, experts: float) -> Point:
        return Point(setting, "gate × norm", measured(experts, 3.0 - experts))

    alphas = (1.0, 1.0)
    own = [ranked(top_k(alphas, k, NORMS), float(k)) for k in (1, 2)]
    chosen = ranked(mass(alphas, 0.5, 2, NORMS), 1.5)
    plain = Point(mass(alphas, 0.4, 2), "uniform", measured(1.3, 1.0))
    for loss, biased in ((1.1, True), (0.5, False)):  # the trained setting ends the curve where it is better
        trained = Point(top_k(alphas, 2), "trained", measured(2.0, loss))
        curve = build_curve([trained, plain, chosen, *own, caps_point((1, 2), 0.1)], trained, chosen, 2, 4)
        assert [(p["experts_per_token"], p["tau"], p["loss"]) for p in curve] == [
            (1.0, 0.225, 2.0), (1.5, 0.5, 1.5), (2.0, 1.0, min(1.0, loss)),
        ]  # fmt: skip
        assert ["bias" in p for p in curve] == [True, True, biased]
    # And the other way round.
    curve = build_curve([trained, plain, chosen, *own], trained, plain, 2, 4)
    assert [p["experts_per_token"] for p in curve] == [1.3, 2.0]


@pytest.mark.parametrize("rule", ["k per layer", "gate × norm"])
def test_a_model_of_a_rule_keeps_its_word(
    rule: Family, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen, written, loaded: the curve of that rule, and the measured loss at each of its points."""

    def timed(_: Any, __: Any, points: Iterable[Point], trained: Point, *___: Any) -> dict[Point, Speed]:
        return {p: Speed(1.0, (1.0, 1.0), 1.0, (1.0, 1.0)) for p in [trained, *points]}

    def pick(target: Target, points: Iterable[Point], *_: Any) -> Point:
        return min((p for p in points if p.family == rule), key=lambda p: abs(p.experts_per_token - 1.5))

    monkeypatch.setattr(calibration, "time_points", timed)
    monkeypatch.setattr(calibration, "choose", pick)
    monkeypatch.setattr(level, "MAX_COST", 1.0)
    result = calibration.run(Plan(model=run, target=Target("perplexity", 1.0), tokens=512))
    save(result, tmp_path, write=True)
    loaded = open_model(tmp_path / "model")
    model, chosen = loaded.model, result.body.chosen
    assert model.config.biased  # even loads
    assert ("rank" in chosen.setting) == (rule == "gate × norm")
    assert current(model.config) == top_k((1.0, 1.0), 2)  # the trained setting stays
    text = read_windows(None, open_model(run), 32, 512)
    assert measure(model, text).loss == chosen.loss
    assert model.config.budget_range == (1.0, 2.0)
    for point in model.config.budget_curve:
        model.set_budget(point["experts_per_token"])
        found = measure(model, text)
        assert found.loss == pytest.approx(point["loss"], abs=1e-6)
        assert found.experts_per_token == pytest.approx(point["experts_per_token"], abs=6e-5)
    model.set_budget(None)
    assert measure(model, text).loss == result.body.trained.loss
    card = (tmp_path / "model" / "README.md").read_text()
    assert "by the gate and a bias" in card


def test_gate_times_norm_wins_only_beyond_noise() -> None:
    def at(experts: float, loss: float, norms: Any = None) -> Point:
        return Point(mass((1.0, 1.0), experts / 4, 2, norms), "uniform", measured(experts, loss))

    trained, plain = at(2.0, 1.0), at(1.5, 1.1)
    noise_W = torch.tensor([0.2, -0.2] * 4, dtype=torch.float64)

    def spread(experts: float, loss: float, spread_W: torch.Tensor) -> Any:
        return replace(measured(experts, loss), losses_W=loss + spread_W)

    ranked = Point(mass((1.0, 1.0), 0.4, 2, NORMS), "gate × norm", spread(1.5, 1.09, noise_W))
    clear = at(1.5, 1.09, NORMS)
    few, fewer = at(1.48, 1.1, NORMS), at(1.46, 1.1, NORMS)
    for target, candidate, wins in (
        (Target("experts", 1.6), ranked, False),
        (Target("experts", 1.6), clear, True),
        (Target("perplexity", 0.2, 1), few, False),
        (Target("perplexity", 0.2, 1), fewer, True),
    ):
        chosen = choose(target, [trained, plain, candidate], trained, lambda _: None)
        assert chosen is (candidate if wins else plain)
    # With as few experts the simple rule is beyond the target. Unless it is clearly above, that may be noise.
    limit = Target("perplexity", 0.27, 1)
    lucky = Point(lucky_setting := mass((1.0, 1.0), 0.35, 2, NORMS), "gate × norm", spread(1.4, 1.1, noise_W))
    simple = replace(lucky_setting, norms=None)
    near = Point(simple, "uniform", spread(1.4, 1.2, -noise_W))
    far = Point(simple, "uniform", spread(1.4, 1.5, -noise_W))
    assert meets(limit, lucky, trained, lambda _: None)
    for rival, winner in ((None, lucky), (far, lucky), (near, plain)):
        points = [trained, plain, lucky] if rival is None else [trained, plain, lucky, rival]
        assert rival is None or not meets(limit, rival, trained, lambda _: None)
        assert choose(limit, points, trained, lambda _: None) is winner
    assert (
        choose(Target("experts", 1.6), [trained, ranked], trained, lambda _: None) is ranked
    )  # nothing else
