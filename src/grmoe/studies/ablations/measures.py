"""What the claims compare: losses, loads, overlaps and collapses of ablated models, by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grmoe.studies.ablations.recipes import NO_PENALTY, PAPER_HINGE, REFERENCE, UNHINGED
from grmoe.studies.judging import MIN_SEEDS, within
from grmoe.studies.models.store import Run
from grmoe.studies.models.summary import Mean, difference, mean, mean_of, rows_by_seed, show_mean
from grmoe.studies.page import Verdict

Models = Mapping[str, Sequence[Run]]

OURS = "With our prior, scaling and hinge."  # the change, where our GrMoE stands for the paper's
RANDOM = 64 / 512  # overlap of random subspaces as a share of the rank: rank 64 of width 512
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


def never_acts(*recipes: Sequence[Run], rho: float = PAPER_HINGE) -> bool:
    """Whether a hinge at `rho` of the rank is above every overlap: its penalty is zero, and has no gradient.

    It takes a model of each recipe that would be one training, and enough seeds in all of them together. Two models of
    one seed say little more than one.

    Overlaps are known at the start, where subspaces are random, and at the end of each model. Between them the curves
    tell: after 62 steps ρ₀ = 0.3, 0.5, 0.8 and no penalty had the same entropy to .003, and any lower hinge .4 more.
    """
    runs = [run for each in recipes for run in each]
    known = [run.max_overlap for run in runs if run.max_overlap is not None]
    enough = all(recipes) and len({run.seed for run in runs}) >= MIN_SEEDS
    return enough and len(known) == len(runs) and max(RANDOM, *known) < rho


def tell_idle(*recipes: Sequence[Run]) -> str:
    runs = [run for each in recipes for run in each]
    largest = max(run.max_overlap or 0.0 for run in runs)
    return f"the hinge never acts: ρ_max is at most {largest:.3f} in {len(runs)} models"


def unhinged(models: Models) -> list[Sequence[Run]]:
    """Our gate without a penalty, or with a hinge of at least the paper's, by recipe."""
    return [models[name] for name in UNHINGED]


def stand_in(models: Models, name: str) -> Sequence[Run]:
    """Models of a recipe. If its hinge never acts, those without a penalty: the same training, and more seeds."""
    same = name in UNHINGED and never_acts(*unhinged(models))
    return models[NO_PENALTY if same else name]


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
