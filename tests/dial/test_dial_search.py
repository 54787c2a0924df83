"""The frontier is an envelope, the dial per layer never above it, targets are met."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grmoe.cli.dial import _asked
from grmoe.dial import Setting, Target, mass, top_k
from grmoe.dial.frontier import best_within, dial_points, frontier, gains, top_k_points, uniform_points
from grmoe.dial.meter import Family, Meter, Point
from grmoe.dial.search import Option, Sensitivity, combine, halfway
from grmoe.dial.target import choose, is_simple, meets, refine
from grmoe.probe.losses import Measurement, increase, within

Searched = tuple[Meter, list[Sensitivity]]


def point(
    experts: float,
    loss: float,
    family: Family = "uniform",
    layers: int = 1,
    alphas: tuple[float, ...] | None = None,
) -> Point:
    measured = Measurement(
        losses_W=torch.full((8,), loss, dtype=torch.float64),
        layer_experts=(experts,) * layers,
        entropy=1.0,
        effective_experts_entropy=2.0,
        effective_experts_inverse=2.0,
    )
    return Point(mass(alphas or (1.0,) * layers, 0.5, 2), family, measured)


@given(st.lists(st.tuples(st.floats(1, 2), st.floats(1, 5)), min_size=1, max_size=12))
def test_the_frontier_is_the_lower_envelope(pairs: list[tuple[float, float]]) -> None:
    points = [point(*pair) for pair in pairs]
    best = frontier(points)
    for a, b in itertools.pairwise(best):
        assert a.experts_per_token < b.experts_per_token
        assert a.loss > b.loss
    for p in points:  # some point on it is at least as good in both
        assert any(q.experts_per_token <= p.experts_per_token and q.loss <= p.loss for q in best)


def test_per_layer_is_nowhere_above_uniform(searched: Searched) -> None:
    points = list(searched[0].points.values())
    assert {p.family for p in points} == {
        "trained",
        "top-k",
        "uniform",
        "per layer",
        "k per layer",
        "gate × norm",
    }
    envelope = frontier(dial_points(points))
    for base in frontier(uniform_points(points)):
        best = best_within(envelope, base.experts_per_token)
        assert best is not None
        assert best.loss <= base.loss
    assert all(row.gain >= 0 for row in gains(points))
    assert [p.experts_per_token for p in top_k_points(points, searched[0].trained)] == pytest.approx(
        [2.0, 1.0]
    )


def test_gains_find_a_layer_that_can_do_without() -> None:
    points = [point(1.2, 3.0), point(1.8, 2.0), point(1.7, 1.5, "per layer"), point(1.1, 1.0, "top-k")]
    assert [row.gain for row in gains(points)] == pytest.approx([0.0, 0.5])


def test_an_alpha_that_every_layer_has_learned_is_no_search_by_layer() -> None:
    """Least weights at the trained α are the simple rule, whatever that α is. They were a gain of "one α per layer"."""
    learned, foreign = (0.812345, 1.3), (1.0, 1.0)
    trained = point(2.0, 2.0, "trained", 2, learned)
    trained = replace(trained, setting=top_k(learned, 2))
    points = [
        trained,
        point(1.5, 2.5, "uniform", 2, foreign),
        point(1.5, 2.1, "per layer", 2, learned),
        point(1.2, 2.4, "per layer", 2, (0.5, 3.0)),
    ]
    assert points[2] in uniform_points(points)
    assert points[3] not in uniform_points(points)
    assert {row.gain for row in gains(points)} == {0.0}


def test_sensitivity_is_measured_one_layer_at_a_time(searched: Searched) -> None:
    meter, found = searched
    assert found
    for sensitivity in found:
        base = sensitivity.base
        assert base.setting.tau is not None
        for i, options in enumerate(sensitivity.layers):
            assert options[0] == Option(base.setting.alphas[i], 0.0, 0.0)
            for option in options[1:]:
                alphas = list(base.setting.alphas)
                alphas[i] = option.alpha
                there = meter.points[mass(tuple(alphas), base.setting.tau, 2)]
                assert option.loss == pytest.approx(there.loss - base.loss)
                assert option.experts == pytest.approx(2 * (there.experts_per_token - base.experts_per_token))


def test_combinations_are_the_best_for_their_cost_if_losses_add_up() -> None:
    """Against all 27 combinations of three layers by brute force."""
    generator = torch.Generator().manual_seed(3)
    layers = []
    for _ in range(3):
        cost, loss = torch.rand(2, 2, generator=generator).tolist()
        layers.append([Option(1.0, 0.0, 0.0), Option(2.0, -cost[0], loss[0]), Option(3.0, -cost[1], loss[1])])
    every = {
        tuple(o.alpha for o in picks): (sum(o.experts for o in picks), sum(o.loss for o in picks))
        for picks in itertools.product(*layers)
    }
    base = point(2.0, 0.0, layers=3)
    chosen = combine(Sensitivity(base, layers), 27)
    assert len(chosen) >= 2
    for alphas in chosen:
        experts, loss = every[alphas]
        assert all(l >= loss - 1e-12 for e, l in every.values() if e <= experts)
    assert len(combine(Sensitivity(base, layers), 2)) == 2


@pytest.mark.parametrize(
    "target", [Target("experts", 1.4), Target("perplexity", 0.02), Target("perplexity", 1e-6)], ids=str
)
def test_targets_are_met_by_construction(searched: Searched, target: Target) -> None:
    meter = searched[0]
    before = choose(target, meter.points.values(), meter.trained, lambda _: None)
    refine(target, meter, 2)
    chosen = choose(target, meter.points.values(), meter.trained, lambda _: None)
    assert meets(target, chosen, meter.trained, lambda _: None)
    # No other point of the simple rule that meets it is better.
    for other in (p for p in meter.points.values() if is_simple(p, meter.trained)):
        if target.kind == "experts" and other.experts_per_token <= 1.4:
            assert other.loss >= chosen.loss
        if target.kind == "perplexity" and within(
            target.value, increase(other.measured, meter.trained.measured), {}, target.margin
        ):
            assert other.experts_per_token >= chosen.experts_per_token
    if target.kind == "experts":
        assert chosen.loss <= before.loss
    else:
        assert chosen.experts_per_token <= before.experts_per_token


def test_a_target_of_speed_takes_what_was_timed() -> None:
    slow, fast, unknown = point(2, 1.0), point(1.5, 1.1), point(1.2, 0.9)
    speeds = {slow: 1.0, fast: 1.4}
    points = [slow, fast, unknown]
    assert choose(Target("throughput", 1.3), points, slow, speeds.get) is fast
    assert choose(Target("throughput", 0.9), points, slow, speeds.get) is slow
    with pytest.raises(ValueError, match=r"fastest measured is 1\.40 times"):
        choose(Target("throughput", 3), points, slow, speeds.get)
    with pytest.raises(ValueError, match=r"the fewest measured are 1\.200"):
        choose(Target("experts", 1.1), points, slow, speeds.get)


def _target(*words: Any) -> Target:
    return Target(*_asked(*words))


def test_targets_from_the_command_line() -> None:
    assert _target(None, None, None) == Target("perplexity", 0.01)
    assert _target(None, "2.5%", None).value == pytest.approx(0.025)
    assert _target(None, "0.02", None).value == pytest.approx(0.02)
    assert _target(None, "150 %", None).value == pytest.approx(1.5)
    assert _target(1.5, None, None) == Target("experts", 1.5)
    assert _target(None, None, "1.3x") == Target("throughput", 1.3)
    wrong = [
        ((0.5, None, None), "target-experts must be a finite number >= 1, got 0.5"),
        ((None, "many", None), "max-ppl-increase must be a number like 1%, got 'many'"),
        ((None, "nan", None), "max-ppl-increase must be above 0 and finite, got 'nan'"),
        # 1 would be 100 percent, which nobody asks for.
        ((None, "1", None), r"max-ppl-increase 1: 1% or 0\.01\? From 0\.1 on, write the % sign"),
        ((None, "0.5", None), r"max-ppl-increase 0\.5: 0\.5% or 50%\?"),
        ((None, "100", None), r"max-ppl-increase 100: 100%\? From"),
        ((None, None, "-1x"), "throughput must be above 0 and finite, got '-1x'"),
        ((1.5, "1%", None), "not several"),
    ]
    for words, message in wrong:
        with pytest.raises(ValueError, match=message):
            _target(*words)


def test_halfway_between_two_settings() -> None:
    a, b = mass((1.0, 4.0), 0.4, 2), mass((4.0, 4.0), 0.8, 2)
    assert halfway(a, b) == Setting((2.0, 4.0), "mass", 0.6, 2)
    assert halfway(top_k((1.0, 1.0), 2), a) == Setting((1.0, 2.0), "mass", 0.7, 2)
    assert halfway(top_k((1.0, 1.0), 2), mass((1.0, 1.0), 0.5, 4)) is None  # another cap
    assert halfway(Setting((1.0, 1.0), "threshold", 0.3, 2), a) is None


def test_budgets_are_any_number() -> None:
    for value in (np.float32(1.5), torch.tensor(1.5), np.array(1.5)):
        assert Target("experts", value) == Target("experts", 1.5)
    for wrong in (float("nan"), np.float32("inf"), 0, -1.0, "1.5"):
        with pytest.raises(ValueError, match="target-experts must be a finite number >= 1"):
            Target("experts", wrong)  # type: ignore[arg-type]
