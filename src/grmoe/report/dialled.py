"""What `grmoe dial` measured, in the form the page shows: the stops of its slider, and the frontier of every rule.

The slider follows the curve of budgets, because that is what `set_budget` and `--budget` follow. Each point of the
curve is a stop with its measured perplexity. Speeds were measured on the frontiers, so they are kept apart. Between two
stops, or between two timed settings, the page interpolates and says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grmoe.pictures import readable_range

Row = Mapping[str, Any]

# Rules that have a frontier of their own, with the flag of its points. All other rules have `on_rule_frontier`.
_FRONTIERS = {"one α for all": "on_uniform_frontier", "one α per layer allowed": "on_frontier"}
_PLAIN = ("trained", "top-k", "uniform", "per layer")  # families that those frontiers and top-k are made of
_POINT = ("name", "experts_per_token", "perplexity", "increase", "speed")
_DETAIL = (*_POINT, "family", "setting", "alpha", "effective_experts_entropy")
_KEPT = ("target", "asked", "calibration", "checks", "budget", "budgets")


def dial_facts(body: Row) -> dict[str, Any]:
    """What the page needs of the body of results.json."""
    points = body["points"]
    drawn = families(points)
    named = [body[name]["perplexity"] for name in ("trained", "chosen")]
    return {
        **{key: body.get(key) for key in _KEPT},
        "points": [_some(p, _POINT) for p in points],
        "families": [
            {"name": name, "points": [i for i, p in enumerate(points) if p in found]}
            for name, found in drawn.items()
        ],
        "scale": readable_range([p["perplexity"] for those in drawn.values() for p in those], named),
        "trained": _some(body["trained"], _DETAIL),
        "chosen": _some(body["chosen"], _DETAIL),
        "table": [_some(row, _DETAIL) for row in body["table"]],
        "certificates": [c | {"tells": tells(c)} for c in body["certificates"]],
    }


def families(points: Sequence[Row]) -> dict[str, list[Row]]:
    """Every rule that was measured, with the points of its frontier, fewest experts first."""
    found = {name: [p for p in points if p[flag]] for name, flag in _FRONTIERS.items()}
    plain = [p for p in points if p["family"] in ("top-k", "trained")]
    found["top-k"] = [p for p in plain if p["setting"]["selection"] == "topk"]
    for rule in dict.fromkeys(p["family"] for p in points if p["family"] not in _PLAIN):
        found[rule] = [p for p in points if p["family"] == rule and p.get("on_rule_frontier")]
    return {name: those for name, those in found.items() if those}


def tells(certificate: Row) -> bool:
    """Whether a certificate excludes anything: the proved error is below the size of the output itself."""
    bound, output = certificate["bound"], certificate["output"]
    return bool(certificate["holds"]) and bound is not None and bound < output


def slider_stops(
    body: Row | None, curve: Sequence[Row] | None, budget: float | None
) -> dict[str, Any] | None:
    """The stops of the slider, fewest experts first, and the two settings with a name. None without any.

    body: of the dial's results; None where they are not there. Then the curve saved with the model is all there is.
    curve, budget: of the model's configuration.
    """
    if body is None:
        if not curve or any("loss" not in p for p in curve):
            return None
        stops = [_stop(p, None) for p in curve]
        at = next((s for s in stops if s["experts_per_token"] == budget), None)
        return {"stops": stops, "speeds": [], "trained": None, "chosen": at, "exact": True}
    points, trained, chosen = body["points"], body["trained"], body["chosen"]
    if body.get("curve"):
        stops = [_stop(p, trained, points) for p in body["curve"]]
    else:
        stops = [_some(p, _POINT) for p in points if p["on_frontier"]]
    return {
        "stops": stops,
        "speeds": _speeds(points, chosen["family"]),
        "trained": _some(trained, _POINT),
        "chosen": _some(chosen, _POINT),
        "exact": bool(body.get("curve")),
    }


def _stop(point: Row, trained: Row | None, measured: Iterable[Row] = ()) -> dict[str, Any]:
    """A point of the curve of budgets. Where the results describe it, with its interval and speed."""
    for p in measured:
        same = round(p["experts_per_token"], 4), round(p["loss"], 6)
        if same == (point["experts_per_token"], point["loss"]):
            return _some(p, _POINT) | {"experts_per_token": point["experts_per_token"]}
    grown = None if trained is None else {"value": math.expm1(point["loss"] - trained["loss"])}
    return {
        "name": None,
        "experts_per_token": point["experts_per_token"],
        "perplexity": math.exp(point["loss"]),
        "increase": grown,
        "speed": None,
    }


def _speeds(points: Iterable[Row], chosen: str) -> list[dict[str, Any]]:
    """Timed settings of the rules that the curve is made of, fewest experts first, one for each number of experts."""
    found: dict[float, dict[str, Any]] = {}
    for p in points:
        near = p["on_frontier"] or p["on_uniform_frontier"] or p["family"] in ("trained", "top-k", chosen)
        if near and p["speed"] is not None:
            found.setdefault(p["experts_per_token"], _some(p, ("experts_per_token", "speed")))
    return [found[count] for count in sorted(found)]


def _some(row: Row, keys: Iterable[str]) -> dict[str, Any]:
    return {key: row[key] for key in keys if key in row}
