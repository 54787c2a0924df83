"""The curve of budgets that `grmoe dial` makes of its points."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grmoe.dial.curve import build_curve, chosen_budget
from grmoe.dial.meter import Family, Point
from grmoe.dial.setting import Setting, at_least, mass, top_k
from grmoe.probe.losses import Measurement
from grmoe.routing import check_curve

ALPHAS = (1.0, 1.0)


def point(setting: Setting, experts: float, loss: float, family: Family = "uniform") -> Point:
    measured = Measurement(
        losses_W=torch.full((8,), loss, dtype=torch.float64),
        layer_experts=(experts,) * 2,
        entropy=1.0,
        effective_experts_entropy=2.0,
        effective_experts_inverse=2.0,
    )
    return Point(setting, family, measured)


ONE = point(top_k(ALPHAS, 1), 1.0, 3.0, "top-k")
TRAINED = point(top_k(ALPHAS, 2), 2.0, 2.0, "trained")


def between(count: int, cap: int = 2) -> list[Point]:
    shares = [(i + 1) / (count + 1) for i in range(count)]
    return [point(mass(ALPHAS, 0.2 + 0.6 * s, cap), 1 + s * (cap - 1), 3.0 - s) for s in shares]


def curve_of(points: list[Point], chosen: Point, cap: int = 2) -> list[dict[str, Any]]:
    curve = build_curve(points, TRAINED, chosen, cap, 8)
    check_curve(curve, 2, 8)  # ascending, and otherwise as a configuration takes it
    return curve


@pytest.mark.parametrize("count", [0, 1, 5, 10, 11, 40])
def test_from_one_expert_to_the_trained_setting_in_few_points(count: int) -> None:
    middle = between(count)
    for chosen in (TRAINED, *middle[-1:]):
        curve = curve_of([ONE, TRAINED, *middle], chosen)
        assert len(curve) == min(12, 2 + count)
        # One expert by a τ that it always reaches, so that points above can be joined with it.
        assert curve[0] == {"experts_per_token": 1.0, "tau": 0.1125, "alpha": 1.0, "cap": 2, "loss": 3.0}
        assert curve[-1] == {"experts_per_token": 2.0, "tau": 1.0, "alpha": 1.0, "cap": 2, "loss": 2.0}
        assert chosen_budget(curve, chosen) == round(chosen.experts_per_token, 4)
        taus = [p["tau"] for p in curve]
        assert taus == sorted(taus)


def test_a_curve_that_turns_up_says_so() -> None:
    """Left out, the points would be missing where budgets in between need them."""
    worse = point(mass(ALPHAS, 0.5, 2), 1.5, 3.5)
    better = point(mass(ALPHAS, 0.6, 2), 1.6, 1.5)
    same = point(mass(ALPHAS, 0.6001, 2), 1.6, 1.6)  # as many experts, a higher loss
    curve = curve_of([ONE, TRAINED, worse, better, same], TRAINED)
    assert [p["loss"] for p in curve] == [3.0, 3.5, 1.5, 2.0]


def test_losses_have_six_digits() -> None:
    curve = curve_of([ONE, TRAINED, point(mass(ALPHAS, 0.5, 2), 1.23456789, 2.123456789)], TRAINED)
    assert (curve[1]["experts_per_token"], curve[1]["loss"]) == (1.2346, 2.123457)


def test_other_alphas_are_not_on_the_curve_unless_chosen() -> None:
    sharp = point(mass((2.0, 2.0), 0.5, 2), 1.3, 2.2)
    layered = point(mass((0.5, 3.0), 0.4, 2), 1.5, 2.1, "per layer")
    points = [ONE, TRAINED, *between(3), sharp, layered]
    assert {str(p["alpha"]) for p in curve_of(points, TRAINED)} == {"1.0"}
    curve = curve_of(points, layered)
    (chosen,) = [p for p in curve if p["alpha"] == [0.5, 3.0]]
    assert chosen == {"experts_per_token": 1.5, "tau": 0.4, "alpha": [0.5, 3.0], "cap": 2, "loss": 2.1}
    assert chosen_budget(curve, layered) == 1.5  # in place of the point with as many experts


def test_more_experts_than_trained_go_up_to_the_cap() -> None:
    wide = [*between(4, cap=4), point(top_k(ALPHAS, 4), 4.0, 2.4, "top-k")]
    curve = curve_of([ONE, TRAINED, *wide], wide[1], cap=4)
    assert {p["cap"] for p in curve} == {4}
    assert (curve[0]["experts_per_token"], curve[-1]["experts_per_token"]) == (1.0, 4.0)
    # With a cap below the trained one, the trained setting is the end.
    wider = point(top_k(ALPHAS, 4), 4.0, 1.0, "trained")
    curve = build_curve([ONE, TRAINED, wider], wider, TRAINED, 2, 8)
    assert [p["cap"] for p in curve] == [2, 2, 4]
    by_weight = point(at_least(ALPHAS, 0.3, 2), 1.5, 2.5)
    curve = build_curve([ONE, by_weight, TRAINED, wider], wider, by_weight, 2, 8)
    check_curve(curve, 2, 8)
    assert [(p["experts_per_token"], p["cap"]) for p in curve] == [(1.0, 2), (1.5, 2), (2.0, 2), (4.0, 4)]


def test_a_trained_rule_that_no_budget_can_say() -> None:
    trained = point(Setting(ALPHAS, "threshold", 0.3, 2), 1.7, 2.0, "trained")
    curve = build_curve([ONE, *between(3), point(top_k(ALPHAS, 2), 2.0, 2.0)], trained, trained, 2, 8)
    assert chosen_budget(curve, trained) is None
    assert curve[-1]["experts_per_token"] == 2.0
