"""From numbers to verdicts, by fixed rules.

A difference counts if its 95 % interval over at least three seeds excludes zero. Otherwise it decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from grmoe.studies.intervals import out_of, spread_ratio
from grmoe.studies.models.store import Run
from grmoe.studies.models.summary import Mean, difference, short_name, show_mean
from grmoe.studies.page import Verdict

MIN_SEEDS = 3
SEEDS_OF_NEVER = 5  # the paper's: none of three is what half of all seeds may do too
CHANCE = 0.05  # what has a smaller one at the paper's numbers speaks against them


def decide(found: Mean | None, holds: Callable[[Mean], bool]) -> Verdict:
    """By a rule; open with too few seeds."""
    if found is None or found.seeds < MIN_SEEDS:
        return Verdict.OPEN
    return Verdict.HOLDS if holds(found) else Verdict.FAILS


def by_sign(gap: Mean | None, sign: int) -> Verdict:
    """Of "the difference has this sign": fails if the whole interval is on the other side."""
    if gap is None or gap.seeds < MIN_SEEDS:
        return Verdict.OPEN
    if gap.low <= 0 <= gap.high:
        return Verdict.UNDECIDED
    return Verdict.HOLDS if gap.value * sign > 0 else Verdict.FAILS


def below(gap: Mean | None) -> Verdict:
    """Of "ours is lower"."""
    return by_sign(gap, -1)


def above(gap: Mean | None) -> Verdict:
    """Of "ours is higher"."""
    return by_sign(gap, 1)


def not_worse(gap: Mean | None, margin: float) -> Verdict:
    """Of "ours is not worse": the whole interval is below the margin. It fails if the whole interval is above zero."""
    if gap is None or gap.seeds < MIN_SEEDS:
        return Verdict.OPEN
    if gap.low > 0:
        return Verdict.FAILS
    return Verdict.HOLDS if gap.high <= margin else Verdict.UNDECIDED


def not_above(gap: Mean | None, margin: float = 0.0) -> Verdict:
    """Of "ours is no worse, up to a margin": the mean decides. An interval may be wider than the margin."""
    return decide(gap, lambda found: found.value <= margin)


def at_most(gap: Mean | None, limit: float) -> Verdict:
    """Of "it costs at most this": the whole interval is below the limit. It fails if the whole interval is above it."""
    return below(None if gap is None else Mean(gap.value - limit, gap.half, gap.seeds))


def about_at_most(gap: Mean | None, limit: float) -> Verdict:
    """Of "it costs about this, or less": the mean is at most the limit, and the interval excludes twice as much.

    It fails if the whole interval is above the limit. A mean alone would pass by noise. If the whole interval had to be
    below the limit, a number that equals it could not pass.
    """
    verdict = at_most(gap, limit)
    if gap is None or verdict is not Verdict.UNDECIDED or gap.value > limit:
        return verdict
    return Verdict.HOLDS if gap.high < 2 * limit else Verdict.UNDECIDED


def within(gap: Mean | None, margin: float) -> Verdict:
    """Of "it makes no difference": the whole interval is within ± margin. It fails if it is outside."""
    if gap is None or gap.seeds < MIN_SEEDS:
        return Verdict.OPEN
    if gap.low > margin or gap.high < -margin:
        return Verdict.FAILS
    return Verdict.HOLDS if -margin <= gap.low and gap.high <= margin else Verdict.UNDECIDED


def in_doubt(gap: Mean | None, of: str = "") -> str:
    """Why a difference decides nothing, or how clear it is, as a sentence. of: which one, where there are several."""
    if gap is None:
        text = "nothing measured yet."
    elif gap.seeds < MIN_SEEDS:
        text = f"only {gap.seeds} of at least {MIN_SEEDS} seeds."
    elif gap.low <= 0 <= gap.high:
        text = "the interval includes zero."
    else:
        text = f"the interval is {'above' if gap.low > 0 else 'below'} zero."
    return f"{of}: {text}" if of else text[0].upper() + text[1:]


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Of several parts: fails if one fails, open if one is open, not decided if one is not, else holds."""
    found = list(verdicts)
    for verdict in (Verdict.FAILS, Verdict.OPEN, Verdict.UNDECIDED, Verdict.CHANGED):
        if verdict in found:
            return verdict
    return Verdict.HOLDS if found else Verdict.OPEN


def any_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Of "one of them does": holds if one holds, fails if all fail."""
    found = list(verdicts)
    for verdict in (Verdict.HOLDS, Verdict.CHANGED, Verdict.OPEN, Verdict.UNDECIDED):
        if verdict in found:
            return verdict
    return Verdict.FAILS if found else Verdict.OPEN


def below_on(ours: Sequence[Run], theirs: Sequence[Run], texts: Iterable[str]) -> tuple[str, Verdict]:
    """(differences of loss by seed, verdict) of "our loss is lower on each of these texts"."""
    found = {text: difference(ours, theirs, text) for text in texts}
    shown = "; ".join(
        f"{short_name(text)}: {show_mean(gap, 4, '+')}" for text, gap in found.items() if gap is not None
    )
    return shown, all_of(below(gap) for gap in found.values())


def narrower(ours: Sequence[float], theirs: Sequence[float]) -> tuple[str, Verdict]:
    """(ratio of standard deviations, verdict) of "ours varies less between seeds": the interval must be below one."""
    if min(len(ours), len(theirs)) < MIN_SEEDS:
        return "", Verdict.OPEN
    ratio, low, high = spread_ratio(list(ours), list(theirs))
    verdict = Verdict.HOLDS if high < 1 else Verdict.FAILS if low > 1 else Verdict.UNDECIDED
    return f"ratio {ratio:.2f} ({low:.2f} to {high:.2f})", verdict


def changed(verdict: Verdict) -> Verdict:
    """Of a claim that was tried in our form alone, which is not the paper's: the reason names the change."""
    return Verdict.CHANGED if verdict is Verdict.HOLDS else verdict


def with_change(paper: Verdict, ours: Verdict) -> Verdict:
    """Of a claim that was tried in the paper's form and in ours: it holds with a change if it holds for ours alone."""
    if paper in (Verdict.HOLDS, Verdict.OPEN):  # not tried as in the paper: it may hold without a change
        return paper
    if ours is Verdict.HOLDS:
        return Verdict.CHANGED
    for verdict in (Verdict.OPEN, Verdict.UNDECIDED):
        if verdict in (paper, ours):
            return verdict
    return Verdict.FAILS


def never(*counts: tuple[int, int]) -> Verdict:
    """Of "it never happens", from (times, seeds) of a model, or of each that the claim is about: their seeds add up."""
    known = absent(*counts)
    enough = sum(seeds for _, seeds in counts) >= SEEDS_OF_NEVER
    return Verdict.UNDECIDED if known is Verdict.HOLDS and not enough else known


def absent(*counts: tuple[int, int]) -> Verdict:
    """Of a condition of another claim: "and it does not happen", in the seeds that there are."""
    if any(times for times, _ in counts):
        return Verdict.FAILS
    return Verdict.HOLDS if all(seeds >= MIN_SEEDS for _, seeds in counts) else Verdict.OPEN


def happens(count: tuple[int, int]) -> Verdict:
    """Of "it happens", from (times, seeds), where not once in all seeds refutes it."""
    times, seeds = count
    if times:
        return Verdict.HOLDS
    return Verdict.FAILS if seeds >= MIN_SEEDS else Verdict.OPEN


def happen_at(found: Sequence[tuple[tuple[int, int], float]]) -> Verdict:
    """Of "each of these happens in such a share of seeds", from ((times, seeds), share).

    It holds if each happens. It fails if none does, and that has a chance below 5 % at these shares.
    """
    if min(seeds for (_, seeds), _ in found) < MIN_SEEDS:
        return Verdict.OPEN
    if all(times for (times, _), _ in found):
        return Verdict.HOLDS
    chance = math.prod((1 - share) ** seeds for (_, seeds), share in found)
    none = not any(times for (times, _), _ in found)
    return Verdict.FAILS if none and chance < CHANCE else Verdict.UNDECIDED


def show_count(count: tuple[int, int]) -> str:
    return out_of(*count) if count[1] else "–"
