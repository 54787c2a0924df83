"""More points for a curve of budgets, where a budget between two points would compute another number of experts.

Between points, weight and τ are linear (`grmoe.routing.curve`). Experts per token are not linear in them, least of all
near one expert and near the cap, or where α changes. Gates predict by how much a budget would be off. Where that is
more than `TOLERANCE`, the setting in the middle is measured and becomes a point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from grmoe.dial.curve import Describe, Pairs
from grmoe.dial.gates import Gates
from grmoe.dial.meter import Family, Meter, Point
from grmoe.dial.setting import Norms, Setting, at_least, mass
from grmoe.routing.curve import LayerNumbers, curve_numbers

Numbers = Mapping[str, Any]  # a point in the words of config.json

TOLERANCE = 0.02  # of the budget
MAX_ADDED = 8
_SHARES = (0.25, 0.5, 0.75)  # where between two points the prediction is looked at


def straighten(curve: Pairs, gates: Gates, meter: Meter, describe: Describe) -> Pairs:
    """The curve with at most `MAX_ADDED` points more.

    gates: of the model at its trained setting.
    """
    found = list(curve)
    off: dict[tuple[Point, Point], float] = {}  # of pairs of neighbours
    for _ in range(MAX_ADDED):
        for a, b in pairwise(found):
            if (a[0], b[0]) not in off:
                off[a[0], b[0]] = _off(a[1], b[1], gates)
        worst = max(pairwise(found), key=lambda pair: off[pair[0][0], pair[1][0]], default=None)
        if worst is None or off[worst[0][0], worst[1][0]] <= TOLERANCE:
            break
        a, b = worst
        setting = _middle(a, b, gates)
        rule: Family = "gate × norm" if setting.norms else "uniform" if setting.uniform else "per layer"
        point = meter.measure(setting, rule)
        numbers = describe(point)
        if numbers is None or not _count(a[1]) < numbers["experts_per_token"] < _count(b[1]):
            off[a[0], b[0]] = 0.0  # the gates foretell these experts badly
            continue
        found.insert(found.index(b), (point, numbers))
    return found


def _count(point: Numbers) -> float:
    return float(point["experts_per_token"])


def _at(curve: Sequence[Numbers], budget: float, gates: Gates) -> float:
    """Experts per token that the gates foretell at a budget of the curve."""
    return gates.count(curve_numbers(curve, budget, len(gates.layers)))


def _off(a: Numbers, b: Numbers, gates: Gates) -> float:
    """By how much budgets between two points would be off at most, as a share of the budget.

    Zero where caps differ: layers turn one after another there, and nothing lies between the points.
    """
    ends = (curve_numbers([p], _count(p), len(gates.layers)) for p in (a, b))
    if any(x.cap != y.cap for x, y in zip(*ends, strict=True)):
        return 0.0
    lacks, gaps = _lacks(a, b, gates), []
    for share in _SHARES:
        budget = _count(a) + share * (_count(b) - _count(a))
        gaps.append(abs(_at([a, b], budget, gates) + lacks(share) - budget) / budget)
    return max(gaps)


def _lacks(a: Numbers, b: Numbers, gates: Gates) -> Callable[[float], float]:
    """What a prediction lacks between two points: linear between what it lacks at both, which were measured."""
    low, high = (_count(p) - _at([p], _count(p), gates) for p in (a, b))
    return lambda share: low + share * (high - low)


def _middle(a: tuple[Point, Numbers], b: tuple[Point, Numbers], gates: Gates) -> Setting:
    """The setting that computes the mean of both points' experts, by the gates. α and bias lie between theirs."""
    budget = (_count(a[1]) + _count(b[1])) / 2
    numbers = curve_numbers([a[1], b[1]], budget, len(gates.layers))
    alphas, cap = tuple(n.alpha for n in numbers), numbers[0].cap
    biased, wanted = gates.biased([n.bias for n in numbers]), budget - _lacks(a[1], b[1], gates)(0.5)
    if "weight" in a[1]:
        setting = at_least(alphas, min(1.0, biased.weight_for(alphas, wanted)), cap)
    else:
        setting = mass(alphas, biased.tau_for(alphas, wanted), cap)
    norms = a[0].setting.norms if a[0].setting.norms == b[0].setting.norms else None
    return _with_bias(setting, numbers, norms)


def _with_bias(setting: Setting, numbers: Sequence[LayerNumbers], norms: Norms | None) -> Setting:
    """With the bias of each layer. It includes log n where experts are chosen by gate × norm."""
    if all(n.bias is None for n in numbers):
        return setting
    plain = replace(setting, norms=norms)
    part = plain.bias or [[0.0] * len(n.bias or ()) for n in numbers]
    level = tuple(
        tuple(round(x - y, 4) for x, y in zip(n.bias or (), of_norms, strict=True))
        for n, of_norms in zip(numbers, part, strict=True)
    )
    return replace(plain, level=level) if any(map(any, level)) else plain
