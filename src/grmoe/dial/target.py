"""What the user asks for, and the measured setting that meets it at the lowest cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from grmoe import checks
from grmoe.dial.frontier import best_within, frontier
from grmoe.dial.meter import Family, Meter, Point
from grmoe.dial.search import halfway
from grmoe.dial.setting import Setting
from grmoe.probe.losses import increase, increase_by_domain, within

_CLEARLY = 0.02  # share of the experts that another rule must save to win
# Text of another kind than that of the calibration can grow by more: by up to 2.47 times as much in 40 checks of 20
# models, from which this number was taken (docs/results/budgets.md).
MARGIN = 2.5
REFINEMENTS = 6  # settings tried between the chosen point and those just beyond the target

RelativeSpeed = Callable[[Point], float | None]


@dataclass(frozen=True)
class Target:
    """experts: the lowest perplexity with at most `value` experts per token.

    perplexity: the fewest experts with a relative increase of perplexity of at most `value`. On the whole text the
        upper end of the interval counts (1.645 paired standard errors over windows), so the promise extends to other
        windows of the same kind of text; and it counts `margin` times, which leaves room for text of another kind. The
        increase on each domain must be within `value` too.
    throughput: the lowest perplexity at `value` times the measured speed of the trained setting, or more.
    """

    kind: Literal["experts", "perplexity", "throughput"]
    value: float
    margin: float = MARGIN

    def __post_init__(self) -> None:
        checks.one_of("kind", self.kind, ("experts", "perplexity", "throughput"))
        if self.kind == "experts":
            value = checks.finite("target-experts", self.value, at_least=1)
        else:
            value = checks.finite(self.kind, self.value, above=0)
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "margin", checks.finite("margin", self.margin, at_least=1))

    def __str__(self) -> str:
        if self.kind == "perplexity":
            here = f"{100 * self.value / self.margin:.2g} % on the calibration text, a margin for other text"
            room = f" ({here})" if self.margin > 1 else ""
            return f"perplexity at most {100 * self.value:g} % above the trained setting{room}"
        if self.kind == "experts":
            return f"at most {self.value:g} experts per token"
        return f"at least {self.value:g} times the speed of the trained setting"


def meets(target: Target, point: Point, trained: Point, speed: RelativeSpeed) -> bool:
    """Whether a measured point is within the target."""
    if target.kind == "experts":
        return point.experts_per_token <= target.value
    if target.kind == "perplexity":
        both = point.measured, trained.measured
        return within(target.value, increase(*both), increase_by_domain(*both), target.margin)
    measured = speed(point)
    return measured is not None and measured >= target.value


def choose(target: Target, points: Iterable[Point], trained: Point, speed: RelativeSpeed) -> Point:
    """The best point within the target, or an error that names the nearest one.

    The simple rule, one number for all layers at the trained α, is preferred. Another α, a k per layer or gate × norm
    wins only beyond noise.

    speed: relative to the trained setting; None for a point that was not timed.
    """
    measured = list(points)
    allowed = [p for p in measured if meets(target, p, trained, speed)]
    if not allowed:
        raise ValueError(f"no setting reaches {target}: {_nearest(target, measured, speed)}")
    fewest = target.kind == "perplexity"

    def order(point: Point) -> tuple[float, float]:
        pair = point.loss, point.experts_per_token
        return pair[::-1] if fewest else pair

    best = min(allowed, key=order)
    simple = [p for p in allowed if is_simple(p, trained)] or [p for p in allowed if p.setting.norms is None]
    plain = min(simple, key=order, default=best)
    if not fewest:
        return best if increase(best.measured, plain.measured).high < 0 else plain
    if best.experts_per_token >= (1 - _CLEARLY) * plain.experts_per_token:
        return plain
    # The simple rule with as few experts has a higher loss. It may be noise that only this text has.
    rival = best_within((p for p in measured if is_simple(p, trained)), best.experts_per_token)
    return best if rival is None or increase(best.measured, rival.measured).high < 0 else plain


def is_simple(point: Point, trained: Point) -> bool:
    """Whether one number for all layers, at the trained α, says which experts are computed."""
    setting = point.setting
    alphas = [round(a, 3) for a in trained.setting.alphas]
    return setting.norms is None and setting.caps is None and [round(a, 3) for a in setting.alphas] == alphas


def _nearest(target: Target, points: list[Point], speed: RelativeSpeed) -> str:
    if target.kind == "experts":
        return f"the fewest measured are {min(p.experts_per_token for p in points):.3f}"
    fastest = max(s for p in points if (s := speed(p)) is not None)
    return f"the fastest measured is {fastest:.2f} times as fast"


def refine(target: Target, meter: Meter, cap: int) -> None:
    """Measure settings halfway between the chosen point and frontier points beyond the target, nearest first.

    cap: of the search. Between two top-k lies a mass with another cap, which no curve of budgets joins with the others.
    """
    if target.kind == "throughput":  # speeds are only known after timing
        return
    for _ in range(REFINEMENTS):
        points = list(meter.points.values())
        chosen = choose(target, points, meter.trained, lambda point: None)
        middles = (halfway(chosen.setting, p.setting) for p in _beyond(target, chosen, frontier(points)))
        joined = (s for s in middles if s is not None and s.cap == cap)
        fresh = next((s for s in joined if s not in meter.points), None)
        if fresh is None:
            return
        meter.measure(fresh, family(fresh))


def family(setting: Setting) -> Family:
    """Of a mass setting."""
    return "gate × norm" if setting.norms else "uniform" if setting.uniform else "per layer"


def _beyond(target: Target, chosen: Point, best: list[Point]) -> list[Point]:
    """Frontier points on the far side of the chosen one."""
    if target.kind == "experts":
        return [p for p in best if p.experts_per_token > chosen.experts_per_token]
    return [p for p in reversed(best) if p.experts_per_token < chosen.experts_per_token]
