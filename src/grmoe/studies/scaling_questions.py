"""Questions of our own on more experts: are more of them starved, and is GrMoE as good and as even at every N?

Three seeds cannot tell a few thousandths of a nat. So what must not be worse is judged over all N together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from grmoe.studies.judging import (
    MIN_SEEDS,
    above,
    all_of,
    below,
    in_doubt,
    never,
    not_above,
    not_worse,
    show_count,
)
from grmoe.studies.models.recipes import RECIPES
from grmoe.studies.models.store import TRAINING
from grmoe.studies.models.summary import VALIDATION, Mean, collapsed, difference, mean, mean_of, show_mean
from grmoe.studies.page import OWN, Claim, Verdict
from grmoe.studies.scaling_claims import (
    BASELINES,
    COUNTS,
    DEFAULT,
    MOST_CV,
    NEAR,
    SAME_RANK,
    Of,
    hardest,
    join,
    loss_by_seed,
    show_loss,
    show_losses,
    show_starved,
    starves_more,
)


def questions(of: Of) -> list[Claim]:
    return [_more_starved(of), _below_all(of), _defaults(of), _rank(of)]


def _more_starved(of: Of) -> Claim:
    more = starves_more(of, "softmax", COUNTS[0], COUNTS[-1])
    change = "" if more is None else f"from N = 8 to 64 {show_mean(_percent(more), 1, '+')}"
    return Claim(
        OWN,
        "Without balancing, softmax starves a larger share of its experts at N = 64 than at N = 8",
        join(show_starved(of, "softmax", COUNTS), change),
        above(more),
        "Experts with less than a tenth of their fair load, over all layers, by seed. The limit does not grow "
        f"with N, as 1 % of the tokens would. {in_doubt(more)}",
    )


def _below_all(of: Of) -> Claim:
    gaps = {(n, b): difference(of("grmoe", n), of(b, n)) for n in COUNTS for b in BASELINES}
    worst = {n: hardest(gaps[n, b] for b in BASELINES) for n in COUNTS}
    return Claim(
        OWN,
        "GrMoE has the lowest loss at every N, balanced baselines of equal experts per token included",
        show_losses(worst),
        all_of(map(below, gaps.values())),
        "Loss minus that of a baseline, by seed. All of them decide, at every N; the one that speaks most against "
        "GrMoE is shown.",
    )


def _defaults(of: Of) -> Claim:
    """What we ask of the defaults at every N: no collapse, an even load, a loss no worse than any baseline's."""
    lost = {n: collapsed(of(DEFAULT, n)) for n in COUNTS}
    cv, seen = (
        {n: mean_of(of(DEFAULT, n), lambda row: row.load_cv, text) for n in COUNTS}
        for text in (VALIDATION, TRAINING)
    )
    gaps = {n: [difference(of(DEFAULT, n), of(b, n)) for b in BASELINES] for n in COUNTS}
    shown = {n: _largest(found) for n, found in gaps.items()}
    overall = {b: over_counts(loss_by_seed(of(DEFAULT, n), of(b, n)) for n in COUNTS) for b in BASELINES}
    parts = [
        never(*lost.values()),
        *(not_above(found, MOST_CV) for found in cv.values()),
        *(not_worse(gap, NEAR) for gap in overall.values()),
        *(_not_clearly_worse(gap) for found in gaps.values() for gap in found),
    ]
    by_count = "; ".join(
        f"N = {n}: collapsed {show_count(lost[n])}, CV {show_mean(cv[n], 3)} (on training text "
        f"{show_mean(seen[n], 3)}), loss {show_loss(shown[n])}"
        for n in COUNTS
        if lost[n][1]
    )
    by_baseline = ", ".join(
        f"{RECIPES[b].label} {show_loss(gap)}" for b, gap in overall.items() if gap is not None
    )
    return Claim(
        OWN,
        f"With its defaults GrMoE never collapses and has a mean CV of at most {MOST_CV:g} at every N, and over all N "
        "a loss no worse than that of any baseline of equal experts per token",
        join(by_count, f"loss over all N, minus {by_baseline}" if by_baseline else ""),
        all_of(parts),
        "Random budgets in training, measured at two experts per token; the rank is d/N, the default of a model "
        "without a preset. Loss minus that of a baseline, by seed; at each N that of the best one by means is shown. "
        f"Three seeds cannot tell {NEAR:g} nats at one N, so over all N the whole interval must be at most that. It "
        f"fails if that interval is above zero, or at some N above {NEAR:g}. Collapsed: less than a tenth of the fair "
        "share. The load on validation text decides, by means; with few documents it is less even than on text of the "
        "training.",
    )


def _rank(of: Of) -> Claim:
    by_seed = {n: loss_by_seed(of("grmoe", n), of(SAME_RANK, n)) for n in COUNTS[1:]}
    gap = over_counts(by_seed.values())
    shown = show_losses({n: mean(found.values()) for n, found in by_seed.items()})
    return Claim(
        OWN,
        "The rank d/N, which keeps active parameters equal, costs GrMoE nothing against rank 64, over N = 16, 32, 64",
        join(shown, f"over all N {show_loss(gap)}" if gap else ""),
        not_worse(gap, NEAR),
        f"Loss at rank d/N minus that at rank 64, by seed: over all three N at most {NEAR:g} nats. It fails if the "
        f"whole interval is above zero. {in_doubt(gap)}",
    )


def over_counts(found: Iterable[Mapping[int, float]]) -> Mean | None:
    """The mean over N and seeds of differences by seed at each N. None before every N has enough seeds.

    Every pair of models was trained apart. Three of them leave an interval of about ± .01 nats, which is wider than any
    difference of interest; twelve leave ± .003.
    """
    parts = [list(by_seed.values()) for by_seed in found]
    if min(map(len, parts)) < MIN_SEEDS:
        return None
    return mean(value for part in parts for value in part)


def _not_clearly_worse(gap: Mean | None) -> Verdict:
    """At one N: fails if the whole interval is above the margin, which three seeds can tell."""
    if gap is None or gap.seeds < MIN_SEEDS:
        return Verdict.OPEN
    return Verdict.FAILS if gap.low > NEAR else Verdict.HOLDS


def _percent(share: Mean) -> Mean:
    return Mean(100 * share.value, None if share.half is None else 100 * share.half, share.seeds)


def _largest(gaps: Iterable[Mean | None]) -> Mean | None:
    """To the best baseline, by means."""
    return max((gap for gap in gaps if gap is not None), key=lambda gap: gap.value, default=None)
