"""From measured points to the curve that `model.set_budget` follows (`grmoe.routing.curve`).

A curve has one rule, because no setting lies between two rules. Usually it varies the least weight at the trained α,
because turning α also changes the weights of the experts that are kept. Where a τ, a k per layer or gate × norm was
chosen, the curve is made of that rule. It goes from one expert per token to all that the cap allows, and has the chosen
setting as a point. The full budget is the trained setting, unless another one has a lower loss there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from grmoe.dial.meter import Point
from grmoe.dial.setting import Setting, rounded_alphas
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.losses import Measurement
from grmoe.routing.curve import NO_WEIGHT

Describe = Callable[[Point], dict[str, Any] | None]
Pairs = list[tuple[Point, dict[str, Any]]]

MAX_POINTS = 12  # beside those that `between` adds
_ONE = 0.5001  # no second expert has this weight


def build_curve(
    points: Iterable[Point],
    trained: Point,
    chosen: Point,
    cap: int,
    num_experts: int,
    level: Callable[[Point], Point] = lambda point: point,
    between: Callable[[Pairs, Describe], Pairs] = lambda curve, describe: curve,
) -> list[dict[str, Any]]:
    """Points in the words of config.json, strictly ascending in experts per token.

    num_experts: that the gate chooses from, identity experts too.
    level: measures a point again with an even load. The trained setting stays as it is: training made its load even.
    between: adds points (`grmoe.dial.straight`).

    A point stays where its loss is above that of a point with fewer experts: without it, budgets in between would get
    another number of experts than asked for. The losses beside the points show where the curve turns up.
    """
    family = _family([*points, trained], trained, chosen)
    if chosen.setting.caps is not None:
        levelled = [p if p in (trained, chosen) else level(p) for p in _nested(family, chosen)]
        return [numbers for _, numbers in _ascending(levelled, chosen, lambda p: _point(p, p.setting.point))]
    family = [
        p
        for p in family
        if p.setting.caps is None and p.setting.level is None and p.setting.norms == chosen.setting.norms
    ]
    by_mass = chosen.setting.selection == "mass" and not _is_one(chosen.setting, cap)
    by_weight = not by_mass and any(
        p.setting.selection == "at_least" and p.setting.cap == cap for p in family
    )

    def describe(p: Point) -> dict[str, Any] | None:
        return _weight_point(p, cap) if by_weight else _tau_point(p, cap, num_experts)

    found = {p: c for p in family if (c := describe(p)) and c["cap"] == cap}
    top = max(p.experts_per_token for p in found)
    end = describe(trained)
    # At the full budget also where the curve is of gate × norm: there its bias fades out.
    if end and trained.experts_per_token >= top:
        found[trained] = end
    picked = describe(chosen)
    # The trained setting with a smaller cap would be a step in the midst: between two caps layers turn one by one.
    if picked is not None and (chosen is not trained or picked["cap"] == cap):
        found[chosen] = picked
    by_experts: dict[float, Point] = {}
    for p in sorted(found, key=lambda p: (p is not chosen, p.loss)):
        by_experts.setdefault(found[p]["experts_per_token"], p)
    ascending = [by_experts[count] for count in sorted(by_experts)]
    forced = {ascending[0], ascending[-1], *({chosen} & set(ascending))}
    levelled = [p if p in (trained, chosen) else level(p) for p in _thinned(ascending, forced)]
    curve = _ascending(levelled, chosen, lambda p: found.get(p) or describe(p) or {})
    return [numbers for _, numbers in between(curve, describe)]


def _family(points: list[Point], trained: Point, chosen: Point) -> list[Point]:
    """The points at the curve's α: the trained one, unless a mass at another α was chosen.

    Then points at the trained α are only its ends, top-k: with two α between them, fewer experts may need a larger τ.
    """
    own = trained.setting.alphas
    at_trained = [p for p in points if p.setting.alphas in (own, rounded_alphas(own))]
    if chosen.setting.selection != "mass" or chosen in at_trained:
        return at_trained
    ends = [p for p in at_trained if p is trained or p.setting.selection == "topk"]
    return [*ends, *(p for p in points if p.setting.alphas == chosen.setting.alphas and p not in ends)]


def _ascending(points: list[Point], chosen: Point, describe: Callable[[Point], dict[str, Any]]) -> Pairs:
    """Levelled points may have traded places, or share a number of experts: then one of them stays."""
    found: dict[float, tuple[Point, dict[str, Any]]] = {}
    for p in sorted(points, key=lambda p: p is not chosen):
        numbers = describe(p)
        found.setdefault(numbers["experts_per_token"], (p, numbers))
    return [found[count] for count in sorted(found)]


def _weight_point(point: Point, cap: int) -> dict[str, Any] | None:
    """None for a setting that is not "the most probable expert and those with at least this weight, at most cap"."""
    setting = point.setting
    numbers = setting.point
    if _is_one(setting, cap):  # by a weight that joins with the points above it
        numbers = _without_rule(numbers) | {"weight": _ONE, "cap": cap}
    elif setting.selection == "topk":
        # Its own cap: a chosen one, or the trained one of a model with more experts than the cap.
        numbers = _without_rule(numbers) | {"weight": NO_WEIGHT}
    return _point(point, numbers) if "weight" in numbers else None


def _tau_point(point: Point, cap: int, num_experts: int) -> dict[str, Any] | None:
    """None for a setting that is not "the most probable experts, at most cap, up to τ"."""
    setting = point.setting
    if _is_one(setting, cap):
        # One expert always holds this much, so the rule joins with the points above it.
        one = {"tau": float(f"{0.9 / num_experts:.4g}"), "cap": cap}
        return _point(point, _without_rule(setting.point) | one)
    return None if setting.selection in ("at_least", "threshold") else _point(point, setting.point)


def _is_one(setting: Setting, cap: int) -> bool:
    """Whether every token gets one expert because of its cap, in a search that allows more. Any rule by rank does it:
    a model with one expert per token may have been trained with a selection by mass."""
    return setting.cap == 1 < cap and setting.selection in ("topk", "mass", "at_least")


def _without_rule(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in numbers.items() if name not in ("tau", "weight")}


def _point(point: Point, numbers: dict[str, Any]) -> dict[str, Any]:
    count, loss = round(point.experts_per_token, 4), round(point.loss, 6)
    return {"experts_per_token": count, **numbers, "loss": loss}


def _nested(points: Iterable[Point], chosen: Point) -> list[Point]:
    """Top-k settings from the fewest experts to the most. No layer loses an expert on the way up."""

    def caps(point: Point) -> tuple[int, ...]:
        return point.setting.caps or (point.setting.cap,) * len(point.setting.alphas)

    def grow(candidates: list[Point], up: bool) -> list[Point]:
        chain = [chosen]
        for p in candidates:
            fewer, more = (caps(chain[-1]), caps(p)) if up else (caps(p), caps(chain[-1]))
            if fewer != more and all(a <= b for a, b in zip(fewer, more, strict=True)):
                chain.append(p)
        return chain[1:]

    plain = [p for p in points if p.setting.selection == "topk" and p.setting.norms is None]
    ordered = sorted(plain, key=lambda p: (sum(caps(p)), p.loss))
    below = grow(sorted(plain, key=lambda p: (-sum(caps(p)), p.loss)), up=False)
    return _thinned(
        [*reversed(below), chosen, *(above := grow(ordered, up=True))], {chosen, *below[-1:], *above[-1:]}
    )


def _thinned(points: list[Point], forced: set[Point]) -> list[Point]:
    """At most `MAX_POINTS`, evenly among those that are not forced."""
    free = [p for p in points if p not in forced]
    room = MAX_POINTS - len(forced)
    if len(free) > room:
        free = [free[(2 * i + 1) * len(free) // (2 * room)] for i in range(room)]
    return [p for p in points if p in forced or p in free]


def measured_at(curve: list[dict[str, Any]], points: Iterable[Point]) -> dict[float, Measurement]:
    """What was measured at the points of the curve, by experts per token."""
    known = {(round(p.experts_per_token, 4), round(p.loss, 6)): p.measured for p in points}
    pairs = [(p["experts_per_token"], p["loss"]) for p in curve]
    return {pair[0]: known[pair] for pair in pairs if pair in known}


def use_curve(model: GrmoeForCausalLM, curve: list[dict[str, Any]] | None, budget: float | None) -> None:
    """Give a model a curve, or None, and set the budget."""
    model.config.budget, model.config.budget_curve = None, curve
    model.set_budget(budget)


def chosen_budget(curve: list[dict[str, Any]], chosen: Point) -> float | None:
    """The budget of the chosen setting; None if it is the trained rule and no point of the curve."""
    count = round(chosen.experts_per_token, 4)
    return count if any(p["experts_per_token"] == count for p in curve) else None
