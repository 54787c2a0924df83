"""A budget as one number, experts per token, and the calibrated curve that turns it into the numbers of every layer.

`grmoe dial` measures the curve once. Its points are plain data in config.json, fewest experts first:

    {"experts_per_token": 1.35, "weight": 0.21, "alpha": 1.0, "cap": 2, "loss": 3.61}

A token computes its most probable expert and those with at least this weight, at most `cap`. Other curves have `tau` in
place of `weight`: the fewest experts that hold τ, at most `cap`. All points of a curve have the same of the two.
Weight, τ, α and cap are one number each, or a list with one number per MoE layer. τ = 1 means: the cap alone decides. A
weight of `NO_WEIGHT` means the same.

Two keys are optional. `loss`: nats per token on the calibration text. `bias`: for each MoE layer a list with one number
per expert, added to the logits for the choice alone. It evens out the load, or ranks experts by gate × output norm.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from grmoe import checks
from grmoe.routing.selection import NO_LIMIT

NO_WEIGHT = 1e-6  # a weight that every expert has: the cap alone decides
_KEYS = ("experts_per_token", "alpha", "cap")
_RULES = ("tau", "weight")


class LayerNumbers(NamedTuple):
    """The budget of one layer: its most probable experts, at most `cap`, while those before hold less than τ.

    A negative τ: while the next one has at least −τ (`grmoe.routing.selection.largest`).
    """

    tau: float
    alpha: float
    cap: int
    bias: tuple[float, ...] | None = None
    """Added to the logits for the choice alone, one number per expert (`Budget.set_bias`)."""


def curve_numbers(curve: Iterable[Mapping[str, Any]], budget: float, layers: int) -> list[LayerNumbers]:
    """The numbers of every layer for `budget` experts per token. Exact at the points of the curve.

    Between two points, τ and the bias are linear and α is geometric. A layer with two different caps has no rule in
    between. There layers move to the upper point one after another, so that the mean is at most the budget. Where caps
    alone decide, a layer gets one expert after another.
    """
    points = list(curve)
    counts = [point["experts_per_token"] for point in points]
    low, high = counts[0], counts[-1]
    checks.require(
        low <= budget <= high,
        f"budget must be from {low:g} to {high:g} experts per token, the calibrated range, got {budget:g}",
    )
    at = min(bisect_right(counts, budget), len(points) - 1)
    below, above = _layers(points[max(0, at - 1)], layers), _layers(points[at], layers)
    share = (budget - counts[at - 1]) / (counts[at] - counts[at - 1]) if at else 1.0
    apart = [i for i in range(layers) if below[i].cap != above[i].cap]
    gains = {i: above[i].cap - below[i].cap for i in apart}
    if any(gain < 0 for gain in gains.values()):  # a smaller cap with a larger τ: caps say nothing of experts
        gains = dict.fromkeys(apart, 1)
    got, left = dict.fromkeys(apart, 0), share * sum(gains.values()) + 1e-9
    for i, gain in gains.items():
        in_steps = gain > 1 and _by_cap(below[i]) and _by_cap(above[i])
        got[i] = min(gain, int(left) if in_steps else gain * (left >= gain))
        left -= got[i]
        if got[i] < gain:
            break
    found = []
    for i, (a, b) in enumerate(zip(below, above, strict=True)):
        if share in (0.0, 1.0):
            found.append(b if share == 1.0 else a)
        elif a.cap == b.cap:
            found.append(_mix(a, b, share))
        elif 0 < got[i] < gains[i]:
            found.append(_mix(a, b, got[i] / gains[i])._replace(cap=a.cap + got[i]))
        else:
            found.append(b if got[i] else a)
    return [n._replace(tau=NO_LIMIT if _by_cap(n) else n.tau) for n in found]


def _by_cap(numbers: LayerNumbers) -> bool:
    """Whether the cap alone decides."""
    return numbers.tau >= 1 or -NO_WEIGHT <= numbers.tau < 0


def _mix(a: LayerNumbers, b: LayerNumbers, share: float) -> LayerNumbers:
    """Between two points that have the same cap."""
    alpha = a.alpha + share * (b.alpha - a.alpha)
    if a.alpha != b.alpha and min(a.alpha, b.alpha) > 0:
        alpha = a.alpha ** (1 - share) * b.alpha**share
    return LayerNumbers(a.tau + share * (b.tau - a.tau), alpha, a.cap, _between(a.bias, b.bias, share))


def curve_loss(curve: Iterable[Mapping[str, Any]], budget: float) -> float | None:
    """The loss at a budget within the curve, linear between points; None where the curve has no losses."""
    points = list(curve)
    for point in points:
        if point["experts_per_token"] == budget and "loss" in point:
            return float(point["loss"])
    for a, b in pairwise(points):
        if a["experts_per_token"] <= budget <= b["experts_per_token"] and "loss" in a and "loss" in b:
            share = (budget - a["experts_per_token"]) / (b["experts_per_token"] - a["experts_per_token"])
            return float(a["loss"] + share * (b["loss"] - a["loss"]))
    return None


def check_curve(curve: Any, layers: int, num_experts: int) -> None:
    """Raise a `ValueError` that names the point and the key."""
    checks.require(
        isinstance(curve, list) and len(curve) > 0, f"budget_curve must be a list of points, got {curve!r}"
    )
    for number, point in enumerate(curve):
        name = f"budget_curve[{number}]"
        rules = [rule for rule in _RULES if isinstance(point, Mapping) and rule in point]
        ok = len(rules) == 1 and set(_KEYS) <= set(point) <= {*_KEYS, *rules, "loss", "bias"}
        keys = f"{', '.join(_KEYS)} and either tau or weight"
        checks.require(ok, f"{name} must have the keys {keys} (and loss, bias), got {point!r}")
        checks.require(
            rules[0] in curve[0],
            f"{name} must have the rule of the first point, got {rules[0]}: a curve has one rule",
        )
        checks.finite(f"{name}.experts_per_token", point["experts_per_token"], above=0)
        for key in (*rules, "alpha", "cap"):
            values = point[key] if isinstance(point[key], list) else [point[key]] * layers
            checks.require(
                len(values) == layers, f"{name}.{key} must be one number or {layers}, got {point[key]!r}"
            )
            for value in values:
                _check_number(f"{name}.{key}", key, value, num_experts)
        if "loss" in point:
            checks.finite(f"{name}.loss", point["loss"])
        if "bias" in point:
            _check_bias(f"{name}.bias", point["bias"], layers, num_experts)
    counts = [point["experts_per_token"] for point in curve]
    checks.require(
        all(a < b for a, b in pairwise(counts)),
        f"budget_curve must ascend in experts_per_token, got {counts}",
    )


def curve_room(curve: Iterable[Mapping[str, Any]]) -> int:
    """The largest cap of any point."""
    return max(cap for p in curve for cap in (p["cap"] if isinstance(p["cap"], list) else [p["cap"]]))


def _check_number(name: str, key: str, value: Any, num_experts: int) -> None:
    if key in _RULES:
        checks.fraction(name, value)
    elif key == "alpha":
        checks.alpha(name, value)
    else:
        checks.positive_int(name, value)
        checks.require(value <= num_experts, f"{name} must be at most {num_experts} experts, got {value}")


def _check_bias(name: str, bias: Any, layers: int, num_experts: int) -> None:
    lists = isinstance(bias, list) and all(isinstance(layer, list) for layer in bias)
    ok = lists and [len(layer) for layer in bias] == [num_experts] * layers
    checks.require(ok, f"{name} must be {layers} lists of {num_experts} numbers, got {bias!r}")
    for layer in bias:
        for value in layer:
            checks.finite(name, value)


def _between(
    a: tuple[float, ...] | None, b: tuple[float, ...] | None, share: float
) -> tuple[float, ...] | None:
    """Linear; no bias is a bias of zero."""
    if a is None and b is None:
        return None
    N = len(a or b or ())
    pairs = zip(a or (0.0,) * N, b or (0.0,) * N, strict=True)
    return tuple((1 - share) * x + share * y for x, y in pairs)


def _layers(point: Mapping[str, Any], layers: int) -> list[LayerNumbers]:
    """A point with one number per layer."""
    rule = "weight" if "weight" in point else "tau"
    columns = [p if isinstance(p, list) else [p] * layers for p in (point[k] for k in (rule, "alpha", "cap"))]
    biases = [tuple(map(float, layer)) for layer in point["bias"]] if "bias" in point else [None] * layers
    return [
        LayerNumbers(-float(tau) if rule == "weight" else float(tau), float(alpha), int(cap), bias)
        for tau, alpha, cap, bias in zip(*columns, biases, strict=True)
    ]
