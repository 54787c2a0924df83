"""A budget between calibrated points: exact at the points, monotone between them, refused outside."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmoe.routing import LayerNumbers, check_curve, curve_loss, curve_numbers, curve_room
from grmoe.routing.curve import NO_WEIGHT
from grmoe.routing.selection import NO_LIMIT

LAYERS = 3


def point(experts: float, tau: Any, alpha: Any = 1.0, cap: Any = 2, **more: float) -> dict[str, Any]:
    return {"experts_per_token": experts, "tau": tau, "alpha": alpha, "cap": cap} | more


CURVE = [
    point(1.0, 0.1, loss=3.0),
    point(1.4, [0.3, 0.4, 0.5], [1.0, 4.0, 1.0], loss=2.6),
    point(2.0, 1.0, loss=2.5),
]


@st.composite
def curves(draw: Any, same_cap: bool) -> list[dict[str, Any]]:
    """Ascending in everything, as a calibration finds it."""
    count = draw(st.integers(1, 5))
    experts = sorted(draw(st.lists(st.floats(1, 8), min_size=count, max_size=count, unique=True)))
    taus = [sorted(draw(st.lists(st.floats(0.01, 1), min_size=count, max_size=count))) for _ in range(LAYERS)]
    caps = [sorted(draw(st.lists(st.integers(1, 8), min_size=count, max_size=count))) for _ in range(LAYERS)]
    alphas = draw(st.lists(st.floats(0.1, 5), min_size=count, max_size=count))
    return [
        point(experts[i], [t[i] for t in taus], alphas[i], 8 if same_cap else [c[i] for c in caps])
        for i in range(count)
    ]


@given(curves(same_cap=True), st.data())
def test_tau_grows_with_the_budget_and_stays_between_its_neighbours(
    curve: list[dict[str, Any]], data: Any
) -> None:
    low, high = curve[0]["experts_per_token"], curve[-1]["experts_per_token"]
    budgets = sorted(data.draw(st.lists(st.floats(low, high), min_size=2, max_size=6)))
    found = [curve_numbers(curve, b, LAYERS) for b in budgets]
    for fewer, more in pairwise(found):
        assert all(a.tau <= b.tau + 1e-12 for a, b in zip(fewer, more, strict=True))
    alphas = [p["alpha"] for p in curve]
    for numbers in found:
        assert all(n.cap == 8 for n in numbers)
        assert all(min(alphas) * (1 - 1e-12) <= n.alpha <= max(alphas) * (1 + 1e-12) for n in numbers)
        assert all(0 < n.tau < 1 or n.tau == NO_LIMIT for n in numbers)


@given(curves(same_cap=False), st.data())
def test_every_layer_has_a_calibrated_cap_and_caps_grow_with_the_budget(
    curve: list[dict[str, Any]], data: Any
) -> None:
    low, high = curve[0]["experts_per_token"], curve[-1]["experts_per_token"]
    budgets = sorted(data.draw(st.lists(st.floats(low, high), min_size=2, max_size=6)))
    found = [curve_numbers(curve, b, LAYERS) for b in budgets]
    for fewer, more in pairwise(found):
        assert all(a.cap <= b.cap for a, b in zip(fewer, more, strict=True))
    for numbers, budget in zip(found, budgets, strict=True):
        for layer, n in enumerate(numbers):
            caps = [p["cap"][layer] for p in curve]
            assert min(caps) <= n.cap <= max(caps)
            # Caps between two points are for layers in which the caps alone decide.
            assert n.cap in caps or n.tau == NO_LIMIT, budget


@given(st.one_of(curves(same_cap=True), curves(same_cap=False)))
def test_exact_at_the_points(curve: list[dict[str, Any]]) -> None:
    for p in curve:
        for layer, n in enumerate(curve_numbers(curve, p["experts_per_token"], LAYERS)):
            cap = p["cap"] if isinstance(p["cap"], int) else p["cap"][layer]
            tau = p["tau"][layer]
            assert n == LayerNumbers(NO_LIMIT if tau >= 1 else tau, p["alpha"], cap)


def test_tau_is_linear_and_alpha_geometric_between_points() -> None:
    found = curve_numbers(CURVE, 1.2, LAYERS)
    assert [n.tau for n in found] == pytest.approx([0.2, 0.25, 0.3])
    assert [n.alpha for n in found] == pytest.approx([1.0, 2.0, 1.0])
    # τ = 1 is the end of the way to it, and there the cap alone decides.
    assert curve_numbers(CURVE, 1.7, LAYERS)[0].tau == pytest.approx(0.65)
    assert {n.tau for n in curve_numbers(CURVE, 2.0, LAYERS)} == {NO_LIMIT}
    # A gate that is uniform has no geometric mean with another.
    zero = [point(1.0, 0.5, 0.0), point(2.0, 0.5, 2.0)]
    assert curve_numbers(zero, 1.5, 1)[0].alpha == pytest.approx(1.0)


def test_static_experts_grow_one_by_one_and_one_layer_after_another() -> None:
    static = [point(1.0, 1.0, cap=1), point(2.0, 1.0, cap=2), point(8 / 3, 1.0, cap=[4, 2, 2])]
    caps = {b: [n.cap for n in curve_numbers(static, b, LAYERS)] for b in (1.0, 1.3, 1.4, 1.7, 2.0, 2.5)}
    assert caps == {
        1.0: [1, 1, 1], 1.3: [1, 1, 1], 1.4: [2, 1, 1], 1.7: [2, 2, 1], 2.0: [2, 2, 2], 2.5: [3, 2, 2],
    }  # fmt: skip
    for budget, found in caps.items():  # never more experts than asked for
        assert sum(found) / 3 <= budget + 1e-9
    assert curve_room(static) == 4


def test_a_smaller_cap_with_more_experts_turns_layers_upwards_too() -> None:
    """As of `grmoe dial --cap 4` that chose top-2. Before, layers turned back: most experts for the least budgets."""
    mixed = [point(1.9, 0.6, cap=4), point(2.0, 1.0, cap=2), point(2.3, 0.8, cap=4)]
    budgets = {1.93: 0, 1.94: 1, 1.97: 2, 1.99: 2, 2.0: 3, 2.11: 2, 2.29: 1}  # layers at the cap of 2
    assert {b: [n.cap for n in curve_numbers(mixed, b, LAYERS)].count(2) for b in budgets} == budgets


def test_layers_that_gain_more_than_others_do_not_pass_the_budget() -> None:
    steep = [point(1.0, 1.0, cap=1), point(8 / 3, 1.0, cap=[5, 2, 1])]
    caps = {b: [n.cap for n in curve_numbers(steep, b, LAYERS)] for b in (1.0, 2.0, 2.3, 2.4, 2.6, 8 / 3)}
    assert caps == {
        1.0: [1, 1, 1], 2.0: [4, 1, 1], 2.3: [4, 1, 1], 2.4: [5, 1, 1], 2.6: [5, 1, 1], 8 / 3: [5, 2, 1],
    }  # fmt: skip
    for budget, found in caps.items():
        assert budget - 1 / 3 < sum(found) / 3 <= budget + 1e-9


def test_a_layer_that_gets_one_expert_of_several_gets_as_much_of_the_bias() -> None:
    none, ends = [[0.0, 0.0]] * LAYERS, [[0.3, -0.6]] * LAYERS
    curve: Any = [point(1.0, 1.0, cap=1) | {"bias": none}, point(2.0, 1.0, cap=[4, 1, 1]) | {"bias": ends}]
    first, *others = curve_numbers(curve, 1.4, LAYERS)
    assert (first.cap, first.bias) == (2, pytest.approx((0.1, -0.2)))
    assert {n.cap for n in others} == {1}


@pytest.mark.parametrize("budget", [0.5, 0.999, 2.001, 8])
def test_outside_the_range_is_an_error_with_the_range(budget: float) -> None:
    message = f"budget must be from 1 to 2 experts per token, the calibrated range, got {budget:g}"
    with pytest.raises(ValueError, match=message):
        curve_numbers(CURVE, budget, LAYERS)


BY_WEIGHT: list[dict[str, Any]] = [
    {"experts_per_token": 1.0, "weight": 0.5001, "alpha": 1.0, "cap": 2},
    {"experts_per_token": 1.5, "weight": [0.3, 0.2, 0.1], "alpha": 1.0, "cap": 2},
    {"experts_per_token": 2.0, "weight": NO_WEIGHT, "alpha": 1.0, "cap": 2},
]


def test_a_curve_by_weight() -> None:
    """A negative τ is the least weight. At the end the cap alone decides."""
    check_curve(BY_WEIGHT, LAYERS, 8)
    assert [n.tau for n in curve_numbers(BY_WEIGHT, 1.5, LAYERS)] == [-0.3, -0.2, -0.1]
    assert [n.tau for n in curve_numbers(BY_WEIGHT, 1.75, LAYERS)] == pytest.approx(
        [-0.15, -0.1, -0.05], abs=1e-5
    )
    assert [n.tau for n in curve_numbers(BY_WEIGHT, 2.0, LAYERS)] == [NO_LIMIT] * LAYERS
    mixed = [BY_WEIGHT[0], {**point(2, 1.0), "cap": 2}]
    with pytest.raises(ValueError, match=r"budget_curve\[1\] must have the rule of the first point, got tau"):
        check_curve(mixed, LAYERS, 8)


def test_losses_between_points() -> None:
    assert curve_loss(CURVE, 1.2) == pytest.approx(2.8)
    assert curve_loss(CURVE, 2.0) == pytest.approx(2.5)
    assert curve_loss([point(1, 0.1), point(2, 1.0)], 1.5) is None
    assert curve_loss([point(2, 1.0, loss=3.0)], 2) == 3.0
    assert curve_loss(CURVE, 3.0) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tau": 0.0}, r"budget_curve\[1\].tau must be in \(0, 1\], got 0"),
        ({"tau": 1.5}, r"budget_curve\[1\].tau must be in"),
        ({"tau": [0.5, 0.5]}, r"budget_curve\[1\].tau must be one number or 3, got \[0.5, 0.5\]"),
        ({"alpha": -1}, r"budget_curve\[1\].alpha must be a finite number >= 0"),
        ({"cap": 9}, r"budget_curve\[1\].cap must be at most 8 experts, got 9"),
        ({"cap": 1.5}, r"budget_curve\[1\].cap must be an integer >= 1"),
        ({"experts_per_token": 0.9}, r"budget_curve must ascend in experts_per_token, got \[1.0, 0.9, 2.0\]"),
        ({"experts_per_token": float("nan")}, r"experts_per_token must be a finite number"),
        (
            {"extra": 1},
            r"budget_curve\[1\] must have the keys experts_per_token, alpha, cap and either tau or weight \(and loss",
        ),
        ({"weight": 0.2}, r"budget_curve\[1\] must have the keys .* either tau or weight"),
        ({"bias": [0.0]}, r"budget_curve\[1\].bias must be 3 lists of 8 numbers"),
        ({"loss": float("nan")}, r"budget_curve\[1\].loss must be a finite number"),
    ],
)
def test_a_curve_that_is_none_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    check_curve(json.loads(json.dumps(CURVE)), LAYERS, 8)
    wrong = copy.deepcopy(CURVE)
    wrong[1] |= change
    with pytest.raises(ValueError, match=message):
        check_curve(wrong, LAYERS, 8)
    for nothing in ([], {}, "curve"):
        with pytest.raises(ValueError, match="budget_curve must be a list of points"):
            check_curve(nothing, LAYERS, 8)
