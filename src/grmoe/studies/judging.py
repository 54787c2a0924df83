"""From numbers to verdicts, by fixed rules.

A difference counts if its 95 % interval over at least three seeds excludes zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from grmoe.studies.intervals import out_of
from grmoe.studies.models.summary import Mean
from grmoe.studies.page import Verdict

MIN_SEEDS = 3


def decide(found: Mean | None, holds: Callable[[Mean], bool]) -> Verdict:
    """By a rule; open with too few seeds."""
    if found is None or found.seeds < MIN_SEEDS:
        return Verdict.OPEN
    return Verdict.HOLDS if holds(found) else Verdict.FAILS


def below(difference: Mean | None) -> Verdict:
    """Of "ours is lower": holds if the whole interval is below zero."""
    return decide(difference, lambda found: found.high < 0)


def above(difference: Mean | None) -> Verdict:
    """Of "ours is higher": holds if the whole interval is above zero."""
    return decide(difference, lambda found: found.low > 0)


def not_above(difference: Mean | None, margin: float = 0.0) -> Verdict:
    """Of "ours is no worse, up to a margin": the mean decides. An interval may be wider than the margin."""
    return decide(difference, lambda found: found.value <= margin)


def in_doubt(difference: Mean | None) -> str:
    """Why a difference decides nothing, or how clear it is."""
    if difference is None:
        return "Nothing measured yet."
    if difference.seeds < MIN_SEEDS:
        return f"Only {difference.seeds} of at least {MIN_SEEDS} seeds."
    if difference.high < 0 or difference.low > 0:
        return "The interval excludes zero."
    return "The interval includes zero."


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Of several parts: fails if one fails, open if one is open, else holds."""
    found = list(verdicts)
    for verdict in (Verdict.FAILS, Verdict.OPEN, Verdict.CHANGED):
        if verdict in found:
            return verdict
    return Verdict.HOLDS if found else Verdict.OPEN


def never(count: tuple[int, int]) -> Verdict:
    """Of "it never happens", from (times, seeds)."""
    times, seeds = count
    if times:
        return Verdict.FAILS
    return Verdict.HOLDS if seeds >= MIN_SEEDS else Verdict.OPEN


def show_count(count: tuple[int, int]) -> str:
    return out_of(*count) if count[1] else "–"
