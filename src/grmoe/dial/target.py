"""What is asked of the dial, and the cheapest measured setting that gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from grmoe import checks
from grmoe.dial.frontier import frontier
from grmoe.dial.measure import Meter, Point, increase
from grmoe.dial.search import between

REFINED = 6  # settings tried between the best that meets a target and those that do not


@dataclass(frozen=True)
class Target:
    """experts: lowest perplexity at ≤ `value` experts a token.

    perplexity: fewest experts whose perplexity increase stays within `value`, its upper band (1.645 paired standard
    errors over windows) included: a promise about other windows of such text, not only about those measured.
    throughput: lowest perplexity at ≥ `value` times the measured speed of the trained setting.
    """

    kind: Literal["experts", "perplexity", "throughput"]
    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", checks.finite(f"target for {self.kind}", self.value, above=0))

    def __str__(self) -> str:
        if self.kind == "perplexity":
            return f"perplexity at most {100 * self.value:g} % above the trained setting's"
        if self.kind == "experts":
            return f"at most {self.value:g} experts a token"
        return f"at least {self.value:g} times the trained setting's speed"


def parse_target(experts: float | None, max_ppl_increase: str | None, throughput: str | None) -> Target:
    """From the words of the command line; without any, a perplexity increase of 1 %."""
    given = [v for v in (experts, max_ppl_increase, throughput) if v is not None]
    checks.require(
        len(given) <= 1, "give one of --target-experts, --max-ppl-increase and --throughput, not several"
    )
    if experts is not None:
        checks.require(experts >= 1, f"target-experts must be at least 1, got {experts:g}")
        return Target("experts", experts)
    if throughput is not None:
        return Target("throughput", _number("throughput", throughput, "x", "1.3x"))
    text = "1%" if max_ppl_increase is None else max_ppl_increase
    value = _number("max-ppl-increase", text, "%", "1%")
    return Target("perplexity", value / 100 if text.strip().endswith("%") else value)


def _number(name: str, text: str, unit: str, example: str) -> float:
    try:
        value = float(text.strip().removesuffix(unit))
    except ValueError:
        raise ValueError(f"{name} must be a number like {example}, got {text!r}") from None
    checks.require(0 < value < float("inf"), f"{name} must be above 0 and finite, got {text!r}")
    return value


def meets(target: Target, point: Point, trained: Point, speed: Callable[[Point], float | None]) -> bool:
    if target.kind == "experts":
        return point.experts <= target.value
    if target.kind == "perplexity":
        return point is trained or increase(point, trained).high <= target.value
    measured = speed(point)
    return measured is not None and measured >= target.value


def choose(
    target: Target, points: Iterable[Point], trained: Point, speed: Callable[[Point], float | None]
) -> Point:
    """speed: relative to the trained setting; None for a point that was not timed."""
    measured = list(points)
    able = [p for p in measured if meets(target, p, trained, speed)]
    if not able:
        raise ValueError(f"no setting gives {target}: {_nearest(target, measured, speed)}")
    if target.kind == "perplexity":
        return min(able, key=lambda p: (p.experts, p.loss))
    return min(able, key=lambda p: (p.loss, p.experts))


def _nearest(target: Target, points: list[Point], speed: Callable[[Point], float | None]) -> str:
    if target.kind == "experts":
        return f"the fewest measured are {min(p.experts for p in points):.3f}"
    fastest = max(s for p in points if (s := speed(p)) is not None)
    return f"the fastest measured is {fastest:.2f} times as fast"


def refine(target: Target, meter: Meter) -> None:
    """Try settings halfway from the chosen point to those of the frontier that ask for more, the nearest first."""
    if target.kind == "throughput":  # what is next in speed is not known before it is timed
        return
    for _ in range(REFINED):
        points = list(meter.points.values())
        chosen = choose(target, points, meter.trained, lambda _: None)
        ways = (between(chosen.setting, p.setting, 0.5) for p in _beyond(target, chosen, frontier(points)))
        fresh = next((s for s in ways if s is not None and s not in meter.points), None)
        if fresh is None:
            return
        meter.measure(fresh, "uniform" if len(set(fresh.alphas)) == 1 else "per layer")


def _beyond(target: Target, chosen: Point, best: list[Point]) -> list[Point]:
    """Points on the side where the target ends."""
    if target.kind == "experts":
        return [p for p in best if p.experts > chosen.experts]
    return [p for p in reversed(best) if p.experts < chosen.experts]
