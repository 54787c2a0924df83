"""The figure and the tables of `grmoe dial`, on results that were made up: every number is where it belongs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grmoe.dial import figure, tables
from grmoe.dial.beside import BudgetRow
from grmoe.dial.certify import LayerCertificate
from grmoe.dial.frontier import Gain
from grmoe.dial.meter import Family
from grmoe.dial.results import AlphaRow, Calibration, DialResults, PointResult, Result
from grmoe.dial.speed import Speed
from grmoe.dial.target import Target
from grmoe.pictures import COLORS, INK, readable_range
from grmoe.probe.losses import Increase


def shown(experts: float, perplexity: float, family: Family = "uniform", **changes: Any) -> PointResult:
    """A point that was timed: 1000·perplexity tokens/s, give or take 100."""
    fields: dict[str, Any] = {
        "family": family, "name": f"{family} {experts:g}", "loss": 1.0, "perplexity": perplexity,
        "setting": {"selection": "topk" if family == "top-k" else "mass", "selection_tau": 0.5},
        "increase": Increase(0.0, 0.0, 0.0), "experts_per_token": experts, "layer_experts": (experts,), "entropy": 1.0,
        "effective_experts_entropy": 2.0, "effective_experts_inverse": 1.5, "load_cv": 0.1, "min_load": 0.9,
        "speed": Speed(1e3 * perplexity, (1e3 * perplexity - 100, 1e3 * perplexity + 100), 2.0, (1.5, 2.5)),
        "on_frontier": False, "on_uniform_frontier": False,
    }  # fmt: skip
    return PointResult(**fields | changes)


UNIFORM = [
    shown(1.2, 20.0, on_uniform_frontier=True),
    shown(1.6, 14.0, on_uniform_frontier=True, speed=None),
    shown(1.9, 10.0, on_uniform_frontier=True, on_frontier=True),
]
PER_LAYER = [
    shown(1.1, 23.0, "per layer", on_frontier=True),
    shown(1.5, 12.0, "per layer", on_frontier=True),
    shown(1.7, 15.0, "per layer"),
]
TOP_K = [shown(1.0, 40.0, "top-k"), shown(2.0, 9.5, "trained", setting={"selection": "topk"})]
RULES = [
    shown(1.5, 13.0, "k per layer", on_rule_frontier=True, best=True, setting={"selection": "topk"}),
    shown(1.5, 17.0, "k per layer", setting={"selection": "topk"}),
    shown(1.3, 18.0, "gate × norm", on_rule_frontier=True),
]
POINTS = sorted([*UNIFORM, *PER_LAYER, *TOP_K, *RULES], key=lambda p: p.experts_per_token)
SETTING = {"selection": "mass", "selection_tau": 0.37, "num_experts_per_tok": 2}


def alpha_row(alpha: float, **changes: Any) -> AlphaRow:
    return AlphaRow(alpha=alpha, **vars(shown(1.4, 11.0, setting=SETTING)) | changes)


def certificate(**changes: Any) -> LayerCertificate:
    fields: dict[str, Any] = {
        "layer": 3, "tokens": 1234, "experts_per_token": 1.5, "dropped_mean": 0.125, "dropped_max": 0.25,
        "entropy_lower": 0.5, "entropy": 1.0, "entropy_upper": 1.25, "output": 7.0, "exact": 0.1, "bound": 400.0,
        "holds": True, "looseness": 4000.0,
    }  # fmt: skip
    return LayerCertificate(**fields | changes)


def body(**changes: Any) -> DialResults:
    fields: dict[str, Any] = {
        "target": Target("experts", 1.5), "asked": "at most 1.5 experts per token",
        "calibration": Calibration("folder/held.txt", 4096, 128), "trained": TOP_K[1], "chosen": PER_LAYER[1],
        "points": POINTS, "table": [alpha_row(0.5), alpha_row(5.0, setting={}, speed=None)], "per_layer_gains": [],
        "sensitivities": [], "certificates": [certificate()], "checks": [],
    }  # fmt: skip
    return DialResults(**fields | changes)


def result(**changes: Any) -> Result:
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    return Result(loaded=SimpleNamespace(model=model), body=body(**changes))  # type: ignore[arg-type]


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, Any]:
    """Both panels, as they were drawn."""
    kept: list[Any] = []
    real = figure.panels

    @contextmanager
    def keep(path: Path, count: int) -> Iterator[Any]:
        with real(path, count) as panels:
            kept.extend(panels)
            yield panels

    monkeypatch.setattr(figure, "panels", keep)
    path = figure.draw(result(), tmp_path / "pareto.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    return kept[0], kept[1]


def curve(line: Any) -> tuple[list[float], list[float]]:
    return list(line.get_xdata()), list(line.get_ydata())


def pairs(points: list[PointResult]) -> tuple[list[float], list[float]]:
    return [p.experts_per_token for p in points], [p.perplexity for p in points]


def test_the_left_panel_has_every_point_and_three_families(axes: tuple[Any, Any]) -> None:
    left, _ = axes
    assert left.get_title() == "Perplexity against experts per token (lines: frontiers)"
    assert (left.get_xlabel(), left.get_ylabel()) == ("experts per token", "perplexity, calibration text")
    uniform, per_layer, *families, ring, _arrow = left.lines
    *families, k_per_layer, by_norm = families
    assert [curve(k_per_layer), curve(by_norm)] == [pairs(RULES[:1]), pairs(RULES[2:])]
    assert [line.get_linewidth() > 0 for line in (k_per_layer, by_norm)] == [False, True]
    assert [line.get_color() for line in (k_per_layer, by_norm)] == list(COLORS[3:5])
    assert [curve(uniform), curve(per_layer)] == [pairs(UNIFORM), pairs(PER_LAYER)]
    assert {uniform.get_marker(), per_layer.get_marker()} == {"."}
    assert [curve(line) for line in families] == [
        pairs(UNIFORM), pairs([PER_LAYER[0], PER_LAYER[1], UNIFORM[2]]), pairs(TOP_K),
    ]  # fmt: skip
    assert [line.get_label() for line in families] == ["one α for all", "one α per layer allowed", "top-k"]
    assert [line.get_color() for line in families] == list(COLORS[:3])
    assert [uniform.get_color(), per_layer.get_color()] == list(COLORS[:2])
    assert [line.get_linewidth() > 0 for line in families] == [True, True, False]  # nothing between two k
    assert {line.get_drawstyle() for line in families} == {"steps-post"}
    assert curve(ring) == ([1.5], [12.0])
    assert (ring.get_markerfacecolor(), ring.get_markeredgecolor()) == ("none", INK)
    names = [text.get_text() for text in left.get_legend().get_texts()]
    rules = ["k per layer", "gate × norm"]
    assert names == ["one α for all", "one α per layer allowed", "top-k", *rules, "chosen"]
    assert not left.get_legend().get_frame_on()


def test_the_right_panel_has_the_points_that_were_timed_with_their_intervals(axes: tuple[Any, Any]) -> None:
    _, right = axes
    assert right.get_title() == "The same against measured prefill, CPU, eager (bars: middle 80 %)"
    assert right.get_xlabel() == "tokens/s"
    *lines, ring, _arrow = right.lines
    timed = [UNIFORM[0], UNIFORM[2], PER_LAYER[0], PER_LAYER[1], UNIFORM[2], *TOP_K, RULES[0], RULES[2]]
    wanted = []
    for p in timed:
        speed, y = 1e3 * p.perplexity, p.perplexity
        wanted += [([speed - 100, speed + 100], [y, y]), ([speed], [y])]
    assert [curve(line) for line in lines] == wanted
    assert [line.get_color() for line in lines] == [
        COLORS[i] for i in (0, 0, 1, 1, 1, 2, 2, 3, 4) for _ in range(2)
    ]
    assert curve(ring) == ([12e3], [12.0])


def test_without_speeds_there_is_one_panel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []
    real = figure.panels

    def note(path: Path, count: int) -> Any:
        asked.append(count)
        return real(path, count)

    monkeypatch.setattr(figure, "panels", note)
    untimed = [replace(p, speed=None) for p in POINTS]
    figure.draw(result(points=untimed, chosen=replace(PER_LAYER[1], speed=None)), tmp_path / "pareto.png")
    assert asked == [1]
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_without_speeds_tables_have_no_columns_for_them() -> None:
    untimed = [replace(p, speed=None, best=True) for p in POINTS]
    chosen, trained = (replace(p, speed=None, best=True) for p in (PER_LAYER[1], TOP_K[1]))
    rows = [alpha_row(0.5, speed=None), alpha_row(5.0, speed=None)]
    found = result(points=untimed, chosen=chosen, trained=trained, table=rows)
    lines = list(tables.show(found))
    frontiers, alphas, _ = lines[-3:]
    assert isinstance(frontiers, tables.Table)
    assert isinstance(alphas, tables.Table)
    # All that no other beats, and the chosen one with its arrow: none is left out for want of a speed.
    names = [p.name for points in tables._worth_showing(found.body).values() for p in points]
    assert sorted(names) == sorted(p.name for p in set_of_drawn(untimed))
    first = next(row for row in frontiers.rows if "←" in row[0])
    assert first[1:] == ("per layer 1.5", "1.500", "12.000", "+0.00 %", "*")
    assert alphas.rows[0] == ("as trained", "2.00", "1.50", "2.000", "9.500")
    for part in lines:
        text = part if isinstance(part, str) else part.markdown()
        assert "speed" not in text
        assert "tokens/s" not in text


def set_of_drawn(points: list[PointResult]) -> list[PointResult]:
    """Those on a frontier or in top-k, each once."""
    return [
        p
        for p in points
        if p.on_frontier or p.on_uniform_frontier or p.on_rule_frontier or p.family in ("top-k", "trained")
    ]


def test_one_bad_point_does_not_flatten_the_picture(axes: tuple[Any, Any]) -> None:
    # Three quarters of the settings span 9.5 to 20. Shown is what lies up to 9.5 + 2·10.5: 23, not 40.
    assert figure._range(body()) == (9.5, 23.0)
    for ax, x in zip(axes, (1.0, 40e3), strict=True):
        assert ax.get_ylim() == pytest.approx((9.5 - 0.08 * 13.5, 23 + 0.12 * 13.5))
        (label,) = ax.texts
        assert (label.get_text(), label.xy) == ("40", (x, 1))
        (arrow,) = [line for line in ax.lines if line.get_marker() == "^" and line.get_color() == INK]
        assert curve(arrow) == ([x], [1])
    assert figure._range(body(chosen=shown(1.3, 8.0))) == (8.0, 23.0)
    edge = replace(TOP_K[0], perplexity=30.0)
    assert figure._range(body(points=[edge, *POINTS[1:]])) == (9.5, 30.0)
    # The chosen setting is always shown, and so is a far point of the frontier if it is the chosen one.
    assert figure._range(body(chosen=shown(1.0, 40.0)))[1] == 40.0


@given(
    close=st.lists(st.floats(1, 2), min_size=3, max_size=20),
    far=st.lists(st.floats(1e3, 1e6), max_size=1),
    needed=st.floats(1, 2),
)
def test_a_readable_range_holds_all_but_far_values(
    close: list[float], far: list[float], needed: float
) -> None:
    low, high = readable_range([*close, *far], [needed])
    inside = {*close, needed}
    assert low == min(inside)
    shown = [v for v in {*inside, *far} if v <= high]
    assert needed in shown
    assert len(shown) >= 0.75 * len({*inside, *far})
    # What is shown reaches at most twice as far up as the third quartile, or as what must be shown.
    ordered = sorted({*inside, *far})
    reach = max(needed, ordered[math.ceil(0.75 * len(ordered)) - 1]) - low
    assert high - low <= 2 * reach * (1 + 1e-9)
    assert all(v - low > 2 * reach * (1 - 1e-9) for v in {*inside, *far} if v > high)


def test_the_limit_asked_for_and_other_models_are_in_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = body(target=Target("perplexity", 0.5))
    assert figure._limit(asked) == 1.5 * asked.trained.perplexity
    assert figure._range(asked)[1] == max(23.0, 1.5 * asked.trained.perplexity)
    assert figure._limit(body()) is None  # a number of experts was asked for
    figures: dict[str, Any] = {"loss": 1.0, "load_cv": 0.1, "increase": asked.trained.increase}
    rows = [
        BudgetRow(model=m, budget=b, experts_per_token=b, perplexity=p, **figures)
        for m, b, p in (("own", 2.0, 11.0), ("own", 1.0, 12.0), ("other", 2.0, 5.0))
    ]
    assert figure._range(body(budgets=rows)) == (5.0, 23.0)
    kept = []
    monkeypatch.setattr(figure, "_ring", lambda ax, *_: kept.append(ax))
    figure.draw(result(budgets=rows, target=Target("perplexity", 0.5)), tmp_path / "pareto.png")
    lines = {line.get_label(): line for line in kept[0].lines}
    assert curve(lines["own, by budget"]) == ([2.0, 1.0], [11.0, 12.0])
    assert curve(lines["other, by budget"]) == ([2.0], [5.0])
    assert lines["own, by budget"].get_color() == INK
    assert [t.get_text() for t in kept[0].texts] == ["+50 %", "40"]
    kept.clear()
    figure.draw(result(budgets=rows[:2]), tmp_path / "pareto.png")  # nothing to compare with
    assert not [line for line in kept[0].lines if "by budget" in line.get_label()]


def test_the_card_has_the_first_and_the_last_of_a_long_frontier() -> None:
    best = [shown(1 + i / 10, 20.0 - i, on_frontier=True) for i in range(7)]
    untimed = shown(0.9, 30.0, on_frontier=True, speed=None)
    for points, names in (
        ([untimed, *best], ["uniform 1", "uniform 1.3", "uniform 1.6"]),
        (best[:4], ["uniform 1", "uniform 1.1", "uniform 1.3"]),
        (best[:3], ["uniform 1", "uniform 1.1", "uniform 1.2"]),
        (best[:1], ["uniform 1"]),
    ):
        card = tables.card_section(result(points=points))
        rows = [line.split(" | ")[1] for line in card.splitlines() if line.startswith("| frontier |")]
        assert rows == names


def test_the_card_names_the_text_and_what_was_asked() -> None:
    card = tables.card_section(result())
    assert "on 4,096 tokens of “held.txt”" in card
    assert "float32)." in card
    assert "Asked: at most 1.5 experts per token." in card
    assert "Chosen: per layer 1.5: 1.500 experts per token, perplexity 12.000," in card
    assert "As trained: trained 2: 2.000 experts per token, perplexity 9.500." in card
    assert "One α for all layers, mass 0.37, cap 2:" in card  # of the first row


def test_the_tables_of_the_terminal() -> None:
    gained = {"k per layer": [Gain(1.2, 0.3, 0.1)], "gate × norm": [Gain(1.2, 0.0, 0.1)]}
    layers = [Gain(1.2, 0.0, 0.1), Gain(1.6, 0.5, 0.1)]
    lines = list(tables.show(result(per_layer_gains=layers, rule_gains=gained)))
    assert lines[0] == "Asked:  at most 1.5 experts per token"  # the answer comes first
    frontiers, alphas, certificates = lines[-3:]
    assert isinstance(frontiers, tables.Table)
    assert isinstance(alphas, tables.Table)
    assert isinstance(certificates, tables.Table)
    # One section per family: the best settings, the chosen and the trained one. The arrow marks the chosen one.
    names = [[row[0] for row in section] for section in frontiers.sections if section]
    assert names == [["one α per layer ←"], ["top-k"], ["k per layer"]]
    speed = "2.00 (1.50 to 2.50)"
    assert frontiers.rows[0][1:] == ("per layer 1.5", "1.500", "12.000", "+0.00 %", speed, "")
    assert [row[0] for row in frontiers.rows if row[-1] == "*"] == ["k per layer"]
    # A setting of two families is shown once, and one without a speed is left out.
    points = [replace(p, best=True) for p in POINTS]
    twice = tables._worth_showing(body(points=points, trained=points[-1]))
    assert [p.name for p in twice["one α for all"]] == ["uniform 1.2", "uniform 1.9"]
    assert [p.name for p in twice["one α per layer"]] == ["per layer 1.1", "per layer 1.5"]
    # The chosen and the trained one are there even if they lie on no frontier, the chosen one among those of its rule.
    off = [shown(1.7, 15.0, family="uniform"), shown(2.0, 9.4, family="trained")]
    beside = tables._worth_showing(body(points=[*points, *off], chosen=off[0], trained=off[1]))
    assert [p.name for p in beside["one α for all"]] == ["uniform 1.2", "uniform 1.7", "uniform 1.9"]
    assert beside["trained"] == off[1:]
    assert (frontiers.left, alphas.left, certificates.left) == (2, 1, 1)
    assert alphas.title == "One α for all layers, mass 0.37, cap 2"
    assert alphas.rows == [
        ("as trained", "2.00", "1.50", "2.000", "9.500", "2.00 (1.50 to 2.50)", "9,500"),
        ("0.5", "2.00", "1.50", "1.400", "11.000", "2.00 (1.50 to 2.50)", "11,000"),
        ("5", "2.00", "1.50", "1.400", "11.000", "–", "–"),
        ("chosen", "2.00", "1.50", "1.500", "12.000", "2.00 (1.50 to 2.50)", "12,000"),
    ]
    assert "1,234 tokens" in certificates.title
    row = ("3", "0.125", "0.250", "0.50 to 1.25", "1.00", "7", "0.1")
    assert certificates.rows == [(*row, "400", "4,000")]
    open_bound = tables._certificate_table(body(certificates=[certificate(holds=False)]))
    assert open_bound.rows == [(*row, "∞ for some tokens", "4,000")]
    assert lines[1] == "Chosen: one α per layer: per layer 1.5"
    assert lines[3] == (
        "        load: CV 0.100 (trained 0.100), the least used expert gets 0.90 of a fair share (trained 0.90)"
    )
    assert (
        lines[4]
        == "        2.00 times the trained speed (middle 80 %: 1.50 to 2.50), 12,000 tokens/s (eager)"
    )
    assert "lower loss at 1 of 2 points" in str(lines[5])
    assert "at most 0.5000 ± 0.1000 nats per token, at 1.60 experts" in str(lines[5])
    assert str(lines[6]).startswith("        k per layer: lower loss at 1 of 1 points")
    assert lines[7] == "        gate × norm: no gain over one α for all beyond noise"


def test_a_gain_within_its_error_is_noise() -> None:
    assert "no gain" in tables.gain_line([Gain(1.2, 0.1, 0.1), Gain(1.5, 0.0, 0.0)])
    best = tables.gain_line([Gain(1.2, 0.3, 0.1), Gain(1.5, 0.2, 0.1)])
    assert "2 of 2" in best
    assert "at most 0.3000" in best
