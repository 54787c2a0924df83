"""The page of the ablations. What does each choice buy, and does the paper's argument for its own hold?"""

from __future__ import annotations

from grmoe.studies.ablations import choices, penalty, ranks
from grmoe.studies.ablations.measures import RANDOM, Models, cv_of, overlap_of
from grmoe.studies.ablations.recipes import (
    ALL,
    COPIES,
    DECIDING,
    GROUPS,
    REFERENCE,
    SAME,
    SAME_SEEDS,
    SEEDS,
    SHOWN,
)
from grmoe.studies.judging import show_count
from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.store import Store
from grmoe.studies.models.summary import collapsed, mean_of, model_table, show_mean
from grmoe.studies.page import Page
from grmoe.studies.scaling import BASE
from grmoe.tables import Table

# `small` has d = 512 and rank 64, so random subspaces overlap by 64/512 of the rank: the paper's unit is 8 of ours.
_UNIT = 8


def write(store: Store) -> Page:
    models = runs_of(store, BASE, *ALL)
    reference = models[REFERENCE.name]
    by_setting = [
        model_table(
            f"{group.title[0].upper()}{group.title[1:]}; difference to the default by seed",
            [
                (group.default, reference, None),
                *((label, models[recipe.name], None) for label, recipe in group.rows),
            ],
            (reference, None),
            first=group.title,
        )
        for group in GROUPS
    ]
    return Page(
        claims=[*penalty.claims(models), *ranks.claims(models), *choices.claims(models)],
        tables=[choices.choice_table(models), _overlap_table(models), ranks.rank_table(models), *by_setting],
        notes=[
            "`small`, 1250 steps of 32 × 512 tokens, top-2, full budgets. One setting changes at a time. Half the "
            "steps of the main table: small differences may not last.",
            f"A row has {SEEDS} seeds, or {SAME_SEEDS} where a claim says that settings do the same: a small interval "
            "takes more seeds than a sign. A row that no claim and no choice needs has one.",
            "A hinge above every overlap never acts: it gives the training without a penalty again. The rows of ρ₀ = "
            "0.3 and more, and the paper's gate without its penalty, have one seed, to see that. If so, and if the "
            f"models of these rows have {SEEDS} seeds between them, claims and choices take the models without a "
            "penalty for them. Overlaps are measured at the end of a training; at the start they are those of random "
            f"subspaces, about {RANDOM:g}.",
            "The paper's Tables 4 and 5 are of GrMoE with its amortiser: 18.1 and .074 are that row of its Table 2. "
            "Ours have none, unless a row says so.",
            "The paper's ρ₀ is a share of the rank; ours is a share of the overlap of random subspaces. Here one "
            f"of the paper's units is {_UNIT} of ours, so its ρ₀ = 0.3 is 2.4 times random.",
            "The paper tries ranks from 16 to 96 at width 768, N = 8. Here the width is 512. It writes k_r = 48 ≈ d/N "
            "= 96, and takes 64 at d/N = 128 (1.3B): both are d/2N.",
            "The paper's rates of collapse are over five seeds, where only multiples of 20 % are possible. Its 10 % "
            "and 25 % are not. Its ± are standard deviations, ours 95 % intervals of the mean.",
        ],
    )


def _overlap_table(models: Models) -> Table:
    paper = {
        "overlap-none": ("18.3 ± 0.3", ".168 ± .05", "20 %", "0.72"),
        "overlap-paper-0.1": ("18.4 ± 0.2", ".052 ± .01", "0 %", "0.10"),
        "overlap-paper-0.3": ("18.1 ± 0.2", ".074 ± .02", "0 %", "0.28"),
        "overlap-paper-0.5": ("18.2 ± 0.2", ".098 ± .03", "0 %", "0.46"),
        "overlap-paper-0.8": ("18.3 ± 0.3", ".142 ± .04", "10 %", "0.71"),
    }
    headings = [
        "penalty", "paper: perplexity ± std", "CV ± std", "collapsed", "ρ_max", "here: loss ± 95 %", "CV ± 95 %",
        "collapsed", "ρ_max",
    ]  # fmt: skip
    table = Table("Overlap penalty beside the paper", headings)
    (group,) = (group for group in GROUPS if group.name == "overlap")
    for label, recipe in ((group.default, REFERENCE), *group.rows):
        runs = models[recipe.name]
        overlap = overlap_of(runs)
        table.add(
            label,
            *paper.get(recipe.name, ("", "", "", "")),
            show_mean(mean_of(runs, lambda row: row.loss), 4),
            show_mean(cv_of(runs), 3),
            show_count(collapsed(runs, paper=True)),
            "–" if overlap is None else f"{overlap.value:.3f}",
        )
    return table


STUDY = ModelStudy(
    name="ablations",
    title="Ablations",
    where="Tables 4 and 5, Section 6.4.3, appendices",
    groups=(
        Group(BASE, DECIDING, SEEDS),
        Group(BASE, SAME, SAME_SEEDS),
        Group(BASE, COPIES, 1),
        # Of the last seed of the default, because the queue goes by seeds, and differences are by seed.
        Group(BASE, SHOWN, 1, first=SAME_SEEDS - 1),
    ),
    write=write,
)
