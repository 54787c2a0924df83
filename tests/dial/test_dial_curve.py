"""The curve of budgets that `grmoe dial` makes of its points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grmoe.dial import Plan, Target, run
from grmoe.dial.curve import build_curve, chosen_budget
from grmoe.dial.meter import Family, Point
from grmoe.dial.setting import Setting, at_least, mass, top_k
from grmoe.probe.losses import Measurement, measure
from grmoe.probe.windows import read_windows
from grmoe.routing import check_curve
from grmoe.routing.curve import curve_numbers
from grmoe.routing.selection import NO_LIMIT

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


def test_the_trained_setting_is_no_step_in_the_midst_of_a_curve_with_more_experts() -> None:
    """Where it is the one that was chosen: between two caps, layers turn one after another."""
    by_mass = point(mass(ALPHAS, 0.5, 2), 1.9, 2.0, "trained")
    wide = [*between(6, cap=4), point(top_k(ALPHAS, 4), 4.0, 2.4, "top-k")]
    for trained in (TRAINED, by_mass):
        curve = build_curve([ONE, trained, *wide], trained, trained, 4, 8)
        assert {p["cap"] for p in curve} == {4}
        assert chosen_budget(curve, trained) is None
        for budget in (1.3, 1.9, 2.0, 2.1, 3.3):  # layers alike: none has turned before the others
            assert len(set(curve_numbers(curve, budget, 2))) == 1


def test_a_chosen_top_k_is_a_budget() -> None:
    """Without it on the curve, the model would be saved as it was trained, with all eight experts."""
    trained = point(top_k(ALPHAS, 8), 8.0, 2.0, "trained")
    plain = [point(top_k(ALPHAS, k), k, 3 - k / 10, "top-k") for k in range(1, 8)]
    by_weight = [point(at_least(ALPHAS, 0.4 - 0.05 * i, 8), 1.5 + i, 2.95 - 0.1 * i) for i in range(6)]
    for chosen in plain:
        curve = build_curve([*plain, *by_weight, trained], trained, chosen, 8, 32)
        check_curve(curve, 2, 32)
        assert chosen_budget(curve, chosen) == chosen.experts_per_token
        for numbers in curve_numbers(curve, chosen.experts_per_token, 2):
            one, k = chosen.setting.cap == 1, chosen.setting.cap
            assert (numbers.tau, numbers.cap) == ((-0.5001, 8) if one else (NO_LIMIT, k))
        assert [p["cap"] for p in curve if p["experts_per_token"] != chosen.experts_per_token] == [8] * (
            len(curve) - 1
        )


@pytest.mark.parametrize("tau", [0.3, 0.99994, 0.99996, 0.999999999, 1.0])
@pytest.mark.parametrize("weight", [0.2, 1e-5, 1e-6, 3e-7])
def test_a_curve_reads_what_was_measured(tau: float, weight: float) -> None:
    """Gates can be so sharp that most tokens hold 1 − 1e-5 by one expert. A τ of 1 would compute the cap instead."""
    for setting, sign in ((mass(ALPHAS, tau, 2), 1), (at_least(ALPHAS, weight, 2), -1)):
        curve = [{"experts_per_token": 1.5, **setting.point}]
        check_curve(curve, 2, 8)
        assert setting.tau is not None
        assert [n.tau for n in curve_numbers(curve, 1.5, 2)] == [sign * setting.tau] * 2
        assert float(torch.tensor(setting.tau)) < 1


def test_a_trained_rule_that_no_budget_can_say() -> None:
    trained = point(Setting(ALPHAS, "threshold", 0.3, 2), 1.7, 2.0, "trained")
    curve = build_curve([ONE, *between(3), point(top_k(ALPHAS, 2), 2.0, 2.0)], trained, trained, 2, 8)
    assert chosen_budget(curve, trained) is None
    assert curve[-1]["experts_per_token"] == 2.0


def test_one_of_many_identity_experts_is_one_choice(identity_run: Path) -> None:
    """The most probable of N + I experts may hold less than 1/N: the lowest budget must still choose one alone."""
    result = run(Plan(model=identity_run, target=Target("experts", 1.0), tokens=512, timed=False))
    curve = result.body.curve
    assert "tau" in curve[0]
    model = result.loaded.model
    model.set_budget(curve[0]["experts_per_token"])
    found = measure(model, read_windows(None, result.loaded, 32, 512))
    assert found.experts_per_token == pytest.approx(curve[0]["experts_per_token"], abs=1e-4)
    assert found.loss == pytest.approx(curve[0]["loss"], abs=1e-5)


@pytest.mark.parametrize("rule", [mass(ALPHAS, 0.5, 1), at_least(ALPHAS, 0.3, 1)], ids=str)
@pytest.mark.parametrize("by", ["weight", "mass"])
def test_one_expert_joins_with_more_whatever_rule_trained_it(rule: Setting, by: str) -> None:
    """With a cap of its own it would stand apart: layers turn one after another up to the next point, and budgets in
    between compute fewer experts."""
    trained = point(rule, 1.0, 3.0, "trained")
    middle = {
        "weight": [point(at_least(ALPHAS, w, 2), x, 2.9) for w, x in ((0.3, 1.3), (0.2, 1.6))],
        "mass": between(2),
    }
    points = [trained, ONE, *middle[by], point(top_k(ALPHAS, 2), 2.0, 2.8, "top-k")]
    curve = build_curve(points, trained, trained, 2, 8)
    check_curve(curve, 2, 8)
    assert [p["cap"] for p in curve] == [2] * 4
    one = {"weight": 0.5001} if by == "weight" else {"tau": 0.1125}
    assert curve[0] == {"experts_per_token": 1.0, **one, "alpha": 1.0, "cap": 2, "loss": 3.0}
    assert chosen_budget(curve, trained) == 1.0
