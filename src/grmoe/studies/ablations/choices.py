"""Claims on how the subspaces start and are trained, and on the amortiser; what each of our choices buys."""

from __future__ import annotations

from grmoe.studies.ablations.measures import (
    OURS,
    SMALL,
    Models,
    cv_of,
    list_gaps,
    loss_gap,
    same_cv,
    stand_in,
    unchanged,
)
from grmoe.studies.ablations.recipes import CHOICES, REFERENCE
from grmoe.studies.judging import above, all_of, at_most, changed, in_doubt, never, show_count
from grmoe.studies.models.summary import collapsed, difference, show_mean
from grmoe.studies.page import Claim
from grmoe.tables import Table


def claims(models: Models) -> list[Claim]:
    return [_starts(models), _matrix(models), _manifold(models)]


def _starts(models: Models) -> Claim:
    names = {"PCA": "init-pca", "identity": "init-identity"}
    reference, others = models[REFERENCE.name], [models[name] for name in names.values()]
    gaps = {label: loss_gap(models, name) for label, name in names.items()}
    runs = (reference, *others)
    parts = (
        *(unchanged(gap, SMALL) for gap in gaps.values()),
        *(same_cv(other, reference) for other in others),
        never(*(collapsed(each, paper=True) for each in runs)),
    )
    return Claim(
        "Appendix, Sensitivity to Initialization",
        "Haar, PCA and identity frames end alike: perplexity 18.1, 18.0, 18.2, CV .074, .071, .078, 0 % collapse",
        f"{list_gaps(gaps)}; CV {', '.join(show_mean(cv_of(each), 3) for each in runs)}; collapsed "
        f"{', '.join(show_count(collapsed(each, paper=True)) for each in runs)}",
        changed(all_of(parts)),
        f"Loss and CV minus those of Haar frames, by seed: means within {SMALL:g} nats and a tenth of the CV, "
        f"intervals within twice as much. {OURS}",
    )


def _matrix(models: Models) -> Claim:
    scalar, matrix = models["grmoe-amortised"], models["amortiser-matrix"]
    gap = difference(matrix, scalar)
    return Claim(
        "Section 5.2",
        "A full N × N matrix per token does not improve perplexity over the scalar amortiser",
        show_mean(gap, 4, "+"),
        changed(at_most(difference(scalar, matrix), SMALL)),
        f"Loss minus that of the scalar amortiser, by seed; it may be lower by {SMALL:g} nats. {in_doubt(gap)} Our "
        f"scalar amortiser reads the energies. {OURS}",
    )


def _manifold(models: Models) -> Claim:
    """The sentence can mean a projection after each step, or one in the forward pass. Both must be worse."""
    names = {"Adam, then QR": "optimiser-projected", "Adam on a matrix with its QR frame": "optimiser-qr"}
    gaps = {label: loss_gap(models, name) for label, name in names.items()}
    return Claim(
        "Section 5.3",
        "Training on the manifold is important, rather than unconstrained steps followed by a projection",
        list_gaps(gaps),
        changed(all_of(map(above, gaps.values()))),
        "Loss minus that with GrassmannAdam, by seed. Both must be higher: the paper's words fit either. They have the "
        f"rate of the weights, so that a step is about as long as GrassmannAdam's; no other was tried. {OURS}",
    )


def choice_table(models: Models) -> Table:
    table = Table(
        "What each choice buys",
        [
            "we have",
            "seeds",
            "loss without it minus loss with it",
            "load CV without it",
            "collapsed without it",
        ],
    )
    for choice in CHOICES:
        runs, others = stand_in(models, choice.without), models[choice.has]
        shared = "" if runs is models[choice.without] else ", which never acts: the models without a penalty"
        table.add(
            choice.text + shared,
            str(len(runs)),
            show_mean(difference(runs, others), 4, "+"),
            show_mean(cv_of(runs), 3),
            show_count(collapsed(runs)),
        )
    return table
