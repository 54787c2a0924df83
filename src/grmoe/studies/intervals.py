"""Intervals over seeds: Student's for means, Wilson's for counts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def student(values: list[float], level: float = 0.95) -> float | None:
    """Half the width of Student's interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    from scipy.stats import t  # an extra: the command line names it when it is missing

    return float(t.ppf((1 + level) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)))


def spread_ratio(values: list[float], others: list[float], level: float = 0.95) -> tuple[float, float, float]:
    """(ratio of two standard deviations, the ends of its interval), by the F distribution. Two values each at least."""
    from scipy.stats import f  # an extra: the command line names it when it is missing

    mine, theirs = statistics.stdev(values), statistics.stdev(others)
    ratio = mine / theirs if theirs else math.inf
    m, n = len(values) - 1, len(others) - 1
    low, high = (math.sqrt(float(f.ppf(q, m, n))) for q in ((1 - level) / 2, (1 + level) / 2))
    return ratio, ratio / high, ratio / low


def chance(mean: float, half: float, seeds: int, level: float = 0.95) -> float:
    """Of a mean at least this far from zero, on either side, if it really were zero: from its Student interval."""
    from scipy.stats import t  # an extra: the command line names it when it is missing

    if half == 0:
        return 0.0 if mean else 1.0
    return float(2 * t.sf(abs(mean) / half * t.ppf((1 + level) / 2, seeds - 1), seeds - 1))


def holm(chances: Sequence[float]) -> list[float]:
    """Of comparisons that are looked at together: the smallest level at which Holm's rule keeps each."""
    found, largest = [1.0] * len(chances), 0.0
    for rank, place in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        largest = max(largest, min(1.0, (len(chances) - rank) * chances[place]))
        found[place] = largest
    return found


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for a proportion. Unlike the usual one it keeps a length at 0 of n."""
    if trials == 0:
        return 0.0, 1.0
    p, scale = successes / trials, 1 + z * z / trials
    centre = (p + z * z / (2 * trials)) / scale
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def plus_minus(mean: float, half: float | None, digits: int, sign: str = "") -> str:
    """26.7 ± 0.3; the mean alone where one seed gives no interval."""
    return f"{mean:{sign}.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def out_of(count: int, seeds: int) -> str:
    """3/50 (2–16 %): a number of seeds with Wilson's interval."""
    low, high = wilson(count, seeds)
    return f"{count}/{seeds} ({100 * low:.0f}–{100 * high:.0f} %)"
