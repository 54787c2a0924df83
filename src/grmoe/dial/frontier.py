"""The lower envelope of measured points: perplexity against experts per token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from grmoe.dial.meter import Family, Point
from grmoe.dial.setting import rounded_alphas
from grmoe.probe.losses import ONE_SIDED


def frontier(points: Iterable[Point]) -> list[Point]:
    """The points that no other point beats in both experts and loss. Fewest experts first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.experts_per_token, p.loss)):
        if not best or point.loss < best[-1].loss:
            best.append(point)
    return best


def uniform_points(points: Iterable[Point]) -> list[Point]:
    """One α for all layers, or the trained α of each: a model may have learned another one in every layer."""
    every = list(points)
    trained = (p.setting.alphas for p in every if p.family == "trained")
    own = {kept for alphas in trained for kept in (alphas, rounded_alphas(alphas))}
    return [
        p
        for p in every
        if p.family in ("uniform", "trained") or (p.family == "per layer" and p.setting.alphas in own)
    ]


def dial_points(points: Iterable[Point]) -> list[Point]:
    """One α per layer allowed. Uniform settings are included, so this frontier is never above the uniform one."""
    return [p for p in points if p.family in ("trained", "uniform", "per layer")]


def rule_points(points: Iterable[Point], rule: Family) -> list[Point]:
    """The points of one family."""
    return [p for p in points if p.family == rule]


def top_k_points(points: Iterable[Point], trained: Point) -> list[Point]:
    """Top-k at the trained α. The trained setting is included if it is top-k."""
    first = [trained] if trained.setting.selection == "topk" else []
    return first + [p for p in points if p.family == "top-k"]


def best_within(points: Iterable[Point], experts: float) -> Point | None:
    """The lowest loss with at most `experts` experts per token."""
    return min((p for p in points if p.experts_per_token <= experts), key=lambda p: p.loss, default=None)


@dataclass(frozen=True)
class Gain:
    """How much another rule lowers the loss at a point of the uniform frontier, in nats per token."""

    experts_per_token: float
    gain: float
    error: float
    """1.645 paired standard errors. A gain within its error is noise: settings were searched on this very text."""


def gains(points: Iterable[Point], rule: Family = "per layer") -> list[Gain]:
    """What allowing a rule gains at each point of the uniform frontier, for no more experts. Never negative."""
    every = list(points)
    uniform = uniform_points(every)
    measured = [*uniform, *rule_points(every, rule)]
    found = []
    for base in frontier(uniform):
        best = best_within(measured, base.experts_per_token)
        assert best is not None  # at least the base itself
        gain_W = base.measured.losses_W - best.measured.losses_W
        error = ONE_SIDED * float(gain_W.std()) / len(gain_W) ** 0.5
        found.append(Gain(base.experts_per_token, float(gain_W.mean()), error))
    return found
