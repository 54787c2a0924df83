"""Which measured points are worth having: the lower envelope of (experts per token, loss)."""

from __future__ import annotations

from collections.abc import Iterable

from grmoe.dial.measure import ONE_SIDED, Point


def frontier(points: Iterable[Point]) -> list[Point]:
    """Those that no other beats in one of (experts, loss) without being worse in the other, fewest experts first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.experts, p.loss)):
        if not best or point.loss < best[-1].loss:
            best.append(point)
    return best


def uniform_points(points: Iterable[Point]) -> list[Point]:
    """One α for all layers: what the dial per layer is compared with, the trained setting included."""
    return [p for p in points if p.family in ("uniform", "trained")]


def dial_points(points: Iterable[Point]) -> list[Point]:
    """One α per layer allowed: uniform settings are among them, so their frontier is nowhere above the uniform one."""
    return [p for p in points if p.family != "top-k"]


def top_k_points(points: Iterable[Point], trained: Point) -> list[Point]:
    """Plain top-k at the trained α; the trained setting is one of them where it is top-k."""
    own = [trained] if trained.setting.selection == "topk" else []
    return own + [p for p in points if p.family == "top-k"]


def best_within(points: Iterable[Point], experts: float) -> Point | None:
    """The lowest loss at no more than so many experts."""
    return min((p for p in points if p.experts <= experts), key=lambda p: p.loss, default=None)


def gains(points: Iterable[Point]) -> list[dict[str, float]]:
    """At each point of the uniform frontier: how much lower the loss is for no more experts, one α per layer allowed.

    Never below zero, since uniform settings are allowed there too. `error`: 1.645 paired standard errors; the text
    is the one the settings were searched on, so a gain within it is none.
    """
    measured = dial_points(points)
    rows = []
    for base in frontier(uniform_points(measured)):
        best = best_within(measured, base.experts)
        assert best is not None  # the base itself is one
        gain_W = base.losses_W - best.losses_W
        error = ONE_SIDED * float(gain_W.std()) / len(gain_W) ** 0.5
        rows.append({"experts": base.experts, "gain": float(gain_W.mean()), "error": error})
    return rows
