"""What the claims compare: losses, loads, overlaps and collapses of ablated models, by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grmoe.studies.ablations.recipes import REFERENCE
from grmoe.studies.judging import within
from grmoe.studies.models.store import Run
from grmoe.studies.models.summary import Mean, difference, mean, mean_of, rows_by_seed, show_mean
from grmoe.studies.page import Verdict

Models = Mapping[str, Sequence[Run]]

OURS = "With our prior, scaling and hinge."  # the change, where our GrMoE stands for the paper's
SMALL = 0.0055  # nats per token: 0.1 of a perplexity of 18, which the paper calls robust


def loss_gap(models: Models, name: str) -> Mean | None:
    """Loss minus that of the default."""
    return difference(models[name], models[REFERENCE.name])


def cv_of(runs: Sequence[Run]) -> Mean | None:
    return mean_of(runs, lambda row: row.load_cv)


def cv_gap(runs: Sequence[Run], others: Sequence[Run]) -> Mean | None:
    """CV of the load of `runs` minus that of `others`."""
    mine, theirs = rows_by_seed(runs), rows_by_seed(others)
    return mean(row.load_cv - theirs[seed].load_cv for seed, row in mine.items() if seed in theirs)


def overlap_of(runs: Sequence[Run]) -> Mean | None:
    """ρ_max, the largest overlap of a model as a share of the rank."""
    return mean(run.max_overlap for run in runs if run.max_overlap is not None)


def kappa_gap(runs: Sequence[Run], others: Sequence[Run]) -> Mean | None:
    """The largest κ of `runs` minus that of `others`, by seed."""
    theirs = _largest_kappas(others)
    return mean(kappa - theirs[seed] for seed, kappa in _largest_kappas(runs).items() if seed in theirs)


def largest_kappa(runs: Sequence[Run]) -> Mean | None:
    """Of all experts of a model, the mean over seeds."""
    return mean(_largest_kappas(runs).values())


def _largest_kappas(runs: Sequence[Run]) -> dict[int, float]:
    return {run.seed: max(map(max, run.kappa)) for run in runs if run.kappa}


def unchanged(gap: Mean | None, limit: float) -> Verdict:
    """Of "it changes by less than the limit": the mean is within it, and the interval within twice as much.

    It fails if the whole interval is outside the limit.
    """
    verdict = within(gap, limit)
    if gap is None or verdict is not Verdict.UNDECIDED or abs(gap.value) > limit:
        return verdict
    return within(gap, 2 * limit)


def same_cv(runs: Sequence[Run], others: Sequence[Run]) -> Verdict:
    """Of "the load is as even": the CV changes by less than a tenth."""
    usual = cv_of(others)
    return unchanged(cv_gap(runs, others), 0.0 if usual is None else usual.value / 10)


def list_gaps(gaps: Mapping[str, Mean | None]) -> str:
    return "; ".join(f"{name}: {show_mean(gap, 4, '+')}" for name, gap in gaps.items())
