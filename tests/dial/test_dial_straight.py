"""Budgets between the points of a curve: about as many experts as asked for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from grmoe.dial.curve import build_curve
from grmoe.dial.gates import Gates
from grmoe.dial.meter import Family, Point
from grmoe.dial.setting import Setting, at_least, mass, top_k
from grmoe.dial.straight import MAX_ADDED, TOLERANCE, straighten
from grmoe.probe.gates import AffineGate
from grmoe.probe.losses import Measurement
from grmoe.routing import check_curve
from grmoe.routing.curve import curve_numbers

LAYERS, N = 2, 32
ALPHAS = (1.0, 1.0)


def some_gates(cap: int) -> Gates:
    torch.manual_seed(0)
    gates: Gates = object.__new__(Gates)
    gates.cap = cap
    gates.layers = [AffineGate(torch.zeros(200, N), 1.5 * torch.randn(200, N)) for _ in range(LAYERS)]
    return gates


class Counts:
    """A meter of gates whose layers do not depend on each other, but for `error`."""

    def __init__(self, gates: Gates, error: float = 0.0) -> None:
        self.gates, self.error = gates, error
        self.asked: list[Setting] = []

    def measure(self, setting: Setting, family: Family) -> Point:
        self.asked.append(setting)
        numbers = curve_numbers([{"experts_per_token": 1.5, **setting.point}], 1.5, LAYERS)
        count = self.gates.count(numbers)
        count += self.error * (count - 1) * (self.gates.cap - count) / self.gates.cap
        losses = torch.full((8,), 3 - count / 10, dtype=torch.float64)
        measured = Measurement(
            losses_W=losses, layer_experts=(count,) * LAYERS, entropy=1.0, effective_experts_entropy=2.0,
            effective_experts_inverse=2.0,
        )  # fmt: skip
        return Point(setting, family, measured)


def worst(curve: list[dict[str, Any]], meter: Counts) -> float:
    """The largest share by which a budget is off."""
    budgets = [
        a + s * (b - a) for a, b in pairwise(p["experts_per_token"] for p in curve) for s in (0.2, 0.5, 0.8)
    ]
    return max(abs(count_at(curve, b, meter) - b) / b for b in budgets)


def count_at(curve: list[dict[str, Any]], budget: float, meter: Counts) -> float:
    count = meter.gates.count(curve_numbers(curve, budget, LAYERS))
    return count + meter.error * (count - 1) * (meter.gates.cap - count) / meter.gates.cap


def curve_of(points: list[Point], chosen: Point, meter: Counts, cap: int) -> list[dict[str, Any]]:
    trained = points[-1]
    curve = build_curve(
        points, trained, chosen, cap, N,
        between=lambda found, describe: straighten(found, meter.gates, meter, describe),  # type: ignore[arg-type]
    )  # fmt: skip
    check_curve(curve, LAYERS, N)
    return curve


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_a_curve_by_weight(error: float) -> None:
    """Its ends are weights that no expert has, and that every expert has: between them and the next point a weight that
    is linear means nothing."""
    meter = Counts(some_gates(8), error)
    shares = (0.03, 0.25, 0.5, 0.75, 0.93)
    cuts = [at_least(ALPHAS, meter.gates.weight_for(ALPHAS, 1 + 7 * share), 8) for share in shares]
    ends = [meter.measure(top_k(ALPHAS, k), "top-k") for k in (1, 8)]
    points = [ends[0], *(meter.measure(cut, "uniform") for cut in cuts), ends[1]]
    plain = build_curve(points, ends[1], ends[1], 8, N)
    assert worst(plain, meter) > 0.1
    curve = curve_of(points, ends[1], meter, 8)
    assert worst(curve, meter) < 1.5 * TOLERANCE
    assert len(plain) < len(curve) <= len(plain) + MAX_ADDED
    assert [p for p in curve if p in plain] == plain


def test_a_curve_whose_alpha_was_chosen() -> None:
    """Its ends have the trained α. No other point has."""
    meter = Counts(some_gates(2))
    sharp = (5.0, 5.0)
    ends = [meter.measure(top_k(ALPHAS, k), "top-k") for k in (1, 2)]
    middle = [meter.measure(mass(sharp, tau, 2), "uniform") for tau in (0.55, 0.8)]
    mixed = meter.measure(
        mass(ALPHAS, meter.gates.tau_for(ALPHAS, middle[1].experts_per_token + 0.05), 2), "uniform"
    )
    points = [ends[0], *middle, mixed, ends[1]]
    curve = curve_of(points, middle[1], meter, 2)
    assert {1.0, 5.0} <= {p["alpha"] for p in curve}
    assert mixed.setting.tau not in {p["tau"] for p in curve}
    assert worst(curve, meter) < 1.5 * TOLERANCE
    counts = [count_at(curve, 1 + i / 50, meter) for i in range(51)]
    assert all(b > a - TOLERANCE for a, b in pairwise(counts))


def test_by_gate_times_norm_the_bias_stays_and_fades_at_the_trained_end() -> None:
    torch.manual_seed(1)
    norms = tuple(tuple(layer) for layer in (1 + torch.rand(LAYERS, N)).tolist())
    meter = Counts(some_gates(8))
    biased = meter.gates.times(norms)
    cuts = [
        at_least(ALPHAS, biased.weight_for(ALPHAS, 1 + 7 * share), 8, norms)
        for share in (0.05, 0.2, 0.4, 0.6, 0.8)
    ]
    one = meter.measure(top_k(ALPHAS, 1, norms), "gate × norm")
    points = [
        one,
        *(meter.measure(cut, "gate × norm") for cut in cuts),
        meter.measure(top_k(ALPHAS, 8), "trained"),
    ]
    curve = curve_of(points, points[1], meter, 8)
    assert worst(curve, meter) < 2 * TOLERANCE
    added = meter.asked[len(points) :]
    assert {s.norms for s in added} == {norms, None}  # None: between the last of them and the trained one
    for setting in added:
        assert (setting.level is None) == (setting.norms is not None)
    found = {p["experts_per_token"]: p for p in curve}
    assert len(found) == len(points) + len(added)


def test_where_budgets_mean_what_they_say_nothing_is_measured() -> None:
    """Second weights that are spread evenly from 0 to ½: experts per token are linear in the least weight."""
    second_T = (torch.arange(200) + 0.5) / 400
    logits_TN = torch.full((200, N), -40.0)
    logits_TN[:, :2] = torch.stack([1 - second_T, second_T], -1).log()
    gates = some_gates(2)
    gates.layers = [AffineGate(torch.zeros(200, N), logits_TN)] * LAYERS
    meter = Counts(gates)
    points = [meter.measure(top_k(ALPHAS, 1), "top-k"), meter.measure(at_least(ALPHAS, 0.3, 2), "uniform")]
    trained = meter.measure(top_k(ALPHAS, 2), "trained")
    curve = curve_of([*points, trained], trained, meter, 2)
    assert (len(curve), len(meter.asked)) == (3, 3)
    assert worst(curve, meter) < TOLERANCE


def test_gates_that_foretell_badly_do_not_ask_forever() -> None:
    class Stuck(Counts):
        def measure(self, setting: Setting, family: Family) -> Point:
            found = super().measure(setting, family)
            if setting.selection == "at_least":
                found = replace(found, measured=replace(found.measured, layer_experts=(8.0,) * LAYERS))
            return found

    meter = Stuck(some_gates(8))
    ends = [meter.measure(top_k(ALPHAS, k), "top-k") for k in (1, 8)]
    cut = meter.measure(at_least(ALPHAS, 0.2, 8), "uniform")
    curve = curve_of([ends[0], replace(cut, measured=replace(cut.measured, layer_experts=(3.0,) * 2)), ends[1]],
                     ends[1], meter, 8)  # fmt: skip
    assert [p["experts_per_token"] for p in curve] == [1.0, 3.0, 8.0]
    assert len(meter.asked) == 3 + 2  # once for each of the two pairs
