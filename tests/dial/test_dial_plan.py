"""Targets, and the stages of a calibration, on a meter that was made up."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up import SmoothMeter, a_check, measured, point

from grmoe.dial import calibration
from grmoe.dial import meter as meter_module
from grmoe.dial.calibration import _alpha_rows, _cap, _check, _Describer, _points_to_time
from grmoe.dial.meter import Family, Point
from grmoe.dial.search import (
    Sensitivity,
    expected,
)
from grmoe.dial.setting import Setting, mass, top_k
from grmoe.dial.speed import Speed
from grmoe.dial.target import REFINEMENTS, Target, choose, refine
from grmoe.probe.windows import Text


def test_a_target_keeps_a_plain_number() -> None:
    for kind in ("experts", "perplexity", "throughput"):
        target = Target(kind, torch.tensor(1.5))  # type: ignore[arg-type]
        assert type(target.value) is float
        assert target.value == 1.5
    assert Target("experts", 1).value == 1.0
    assert str(Target("perplexity", 0.02, 1)) == "perplexity at most 2 % above the trained setting"
    assert str(Target("perplexity", 0.01, 2.5)) == (
        "perplexity at most 1 % above the trained setting (0.4 % on the calibration text, a margin for other text)"
    )
    for margin in (0.99, math.inf, math.nan, -3):
        with pytest.raises(ValueError, match="margin"):
            Target("perplexity", 0.01, margin)


@pytest.mark.parametrize("target", [Target("experts", 2.0), Target("perplexity", 1.0, 1)], ids=str)
def test_refining_measures_new_settings_ever_nearer_to_the_target(target: Target) -> None:
    meter = SmoothMeter(2)
    meter.measure(mass((1.0, 1.0), 0.1, 4), "uniform")
    # Trained: 3.93 experts. exp(3.93 − experts) ≤ 2 gives at least 3.24 experts.
    limit = 2.0 if target.kind == "experts" else meter.trained.experts_per_token - math.log(2)
    before, meter.asked = list(meter.points), []
    refine(target, meter, 4)
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
    refine(Target("experts", 2.0), meter, 4)
    assert {family for _, family in meter.asked} == {"per layer"}
    alone = SmoothMeter(2, trained=top_k((1.0, 1.0), 1))
    alone.asked = []
    refine(Target("experts", 2.0), alone, 4)  # nothing lies beyond
    refine(Target("throughput", 2.0), meter, 4)  # speeds are not known yet
    assert alone.asked == []
    assert len(meter.asked) == 6


@pytest.mark.parametrize("cap", [2, 4, 6])
def test_refining_stays_at_the_cap_of_the_search(cap: int) -> None:
    """A mass between two top-k has the larger of their caps. On a curve it would stand apart: budgets beside it would
    compute up to a fifth fewer experts than they say. With --cap below the trained number it would be above the cap."""
    meter = SmoothMeter(2, trained=top_k((1.0, 1.0), 4))
    for k in (1, 2, 3, cap):
        meter.measure(top_k((1.0, 1.0), k), "top-k")
    meter.asked = []
    for wanted in (1.5, 2.5):
        refine(Target("experts", wanted), meter, cap)
    assert {setting.cap for setting, _ in meter.asked} == {cap}  # from top-1 to all that the search allows


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
    assert [_cap(asked, config) for asked in (None, 2, 4)] == [3, 2, 4]
    one = SimpleNamespace(num_experts=4, num_experts_per_tok=1)
    assert _cap(2, one) == 2  # type: ignore[arg-type]
    for asked in (None, 1):
        with pytest.raises(ValueError, match="cap must be at least 2, got 1"):
            _cap(asked, one)  # type: ignore[arg-type]
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
        found, base = _check(SimpleNamespace(config=None), target, trained, chosen, text, said.append)  # type: ignore[arg-type]
        assert base is there[trained.setting]
        assert found.missed_by == (None if missed is None else pytest.approx(missed))
        assert (found.text, found.tokens, found.experts_per_token) == ("other", 128, 1.6)
        assert found.increase.value == pytest.approx(grown)
        assert found.perplexity_trained == pytest.approx(math.exp(2.0))
        assert found.perplexity == pytest.approx(math.exp(2.3))
    assert said == ["trained", "one α per layer"] * 3


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
    config = SimpleNamespace(
        moe_layers=[0, 1], num_experts=4, gate_experts=4, num_experts_per_tok=4, router="grassmann"
    )
    budgets: list[float | None] = []
    model = SimpleNamespace(config=config, set_budget=budgets.append)
    opened = {
        "m": SimpleNamespace(model=model, path=Path("a"), step=1),
        "b": SimpleNamespace(path=Path("b"), step=1),
    }
    texts = [Text(name, torch.zeros(8, 17, dtype=torch.long)) for name in ("own", "a", "b")]

    def fake_search(meter: SmoothMeter, _: Any, cap: int, experts: float | None) -> list[Sensitivity]:
        searched.append((cap, experts))
        for tau in (0.1, 0.4, 0.7):
            meter.measure(mass((1.0, 1.0), tau, 4), "uniform")
        return []

    def fake_times(
        _: Any, __: Any, points: list[Point], trained: Point, rounds: int, ___: Any
    ) -> dict[Point, Speed]:
        assert rounds == 9
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
        "measure_budgets": lambda name, loaded, trained, *_, **__: [(name, loaded.path.name, str(trained)[:4])],
        "read_texts": lambda sources, *_: texts[: len(sources)],
        "Meter": lambda *_: meter, "search": fake_search, "time_points": fake_times, "certify": lambda *_: [],
        "apply": lambda _, setting: applied.append(setting), "Steps": NotingSteps,
        "use_curve": lambda _, curve, budget: used.append((curve, budget)),
        "Levels": lambda *_: SimpleNamespace(measure=lambda _, p: p, within=lambda *given: given[-1]),
        "Gates": lambda *_: None,
        "straighten": lambda curve, *_: curve,
        "_check": lambda m, t, trained, chosen, text, step, book: (a_check(text.name), f"base {text.name}"),
        "Saved": lambda folder: SimpleNamespace(found=0, book=lambda *_: None),
    }  # fmt: skip
    monkeypatch.setattr(calibration, "ROUNDS", 9)
    for name, stub in stubs.items():
        monkeypatch.setattr(calibration, name, stub)
    plan = calibration.Plan(model="m", target=target, checks=("a", "b"), beside=("b",))
    body = calibration.run(plan).body
    assert searched == [(4, 2.0 if target.kind == "experts" else None)]
    # 6 refinements, 12 points of the curve, timing in passes of 9 rounds and a warm-up, two measurements per check; the
    # budgets 4, 3, 2 and 1 of two models and on two checked texts, and the other model as trained.
    passes = 2 if target.kind == "throughput" else 1
    assert totals == [expected(2, 4) + 6 + 12 + 10 * passes + 2 * 2 + 4 * 4 + 1]
    assert [(c.text, c.budgets) for c in body.checks] == [
        ("a", [("a", "a", "base")]),
        ("b", [("a", "a", "base")]),
    ]
    assert (body.calibration.text, body.calibration.tokens, body.calibration.windows) == ("own", 128, 8)
    # The trained setting stays; the chosen one is a budget.
    assert [str(setting) for setting in applied] == [body.trained.name]
    assert used == [(None, None), (body.curve, None)]
    assert budgets == [body.budget]
    assert body.budgets == [("a", "a", "Meas"), ("b", "b", "None")]
    assert body.budget == round(body.chosen.experts_per_token, 4)
    refined = 6 if target.kind != "throughput" else 0
    assert (
        len(body.points) == 1 + 3 + refined + 3
    )  # trained, grid, refinements, rows of the α table beside the chosen one
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
