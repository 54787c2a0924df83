"""Ablations: one setting of GrMoE at a time, beside the default. What does each departure from the paper buy?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from grmoe.studies.ablated import ALL, ALL_PAIRS, BY_NAME, DEPARTURES, GROUPS, REFERENCE, SAMPLED
from grmoe.studies.judging import MIN_SEEDS, above, all_of, decide, in_doubt, never, show_count, with_change
from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.store import Run, Store
from grmoe.studies.models.summary import Mean, collapsed, difference, mean_of, model_table, show_mean
from grmoe.studies.page import Claim, Page, Verdict
from grmoe.studies.scaling import BASE
from grmoe.tables import Table

SEEDS = 3
# `small` has d = 512 and rank 64, so random subspaces overlap by 64/512 of the rank: the paper's unit is 8 of ours.
_UNIT = 8
OVERLAP = "Table 4"

Models = Mapping[str, Sequence[Run]]


def write(store: Store) -> Page:
    models = runs_of(store, BASE, *ALL)
    reference = models[REFERENCE.name]
    tables = [_departures(models), _overlap(models), _ranks(models)]
    for group in GROUPS:
        if group.values:
            lines = [(group.default, reference, None)]
            lines += [(recipe.label, models[recipe.name], None) for recipe in group.recipes]
            tables.append(
                model_table(
                    f"{group.title[0].upper()}{group.title[1:]}; difference to the default by seed",
                    lines,
                    (reference, None),
                    first=group.title,
                )
            )
    return Page(
        claims=_claims(models),
        tables=tables,
        notes=[
            "`small`, 1250 steps of 32 × 512 tokens, three seeds, top-2, full budgets. One setting changes at a time. "
            "Half the steps of the main table: small differences may not last.",
            "The paper's ρ₀ is a share of the rank; ours is a share of the overlap of random subspaces. Here one "
            f"of the paper's units is {_UNIT} of ours, so its ρ₀ = 0.3 is 2.4 times random.",
            "The paper ranks 16 to 96 at width 768, N = 8. Here the width is 512.",
        ],
    )


def _claims(models: Models) -> list[Claim]:
    reference = models[REFERENCE.name]

    def gap(name: str) -> Mean | None:
        return difference(models[name], reference)

    def cv_of(name: str) -> Mean | None:
        return mean_of(models[name], lambda row: row.load_cv)

    # The paper's gate and ours, each with the penalty and without.
    paired = (("grmoe-paper", "paper-gate-free"), (REFERENCE.name, "overlap-none"))
    lost = [(collapsed(models[one], True), collapsed(models[free], True)) for one, free in paired]
    ranks = {name: gap(name) for name in ("rank-8", "rank-16", "rank-32", "rank-128")}
    every_rank = [collapsed(models[name], True) for name in (*ranks, REFERENCE.name)]
    hinge = models["overlap-paper-0.3"]
    hinges = {rho: difference(models[f"overlap-paper-{rho}"], hinge) for rho in ("0.1", "0.5", "0.8")}
    betas = {name: gap(name) for name in ("beta-0.005", "beta-0.02")}
    paper_prior = {name: collapsed(models[name], True) for name in ("grmoe-paper", "prior-paper")}
    inits = {name: gap(f"init-{name}") for name in ("pca", "identity")}
    pairs = {name: cv_of(f"pairs-{name}") for name in ("8", "16")}
    many = {n: (cv_of(SAMPLED[n].name), cv_of(ALL_PAIRS[n].name)) for n in SAMPLED}
    projected = gap("optimiser-projected")
    matrix = difference(models["amortiser-matrix"], models["grmoe-amortised"])
    return [
        Claim(
            OVERLAP,
            "Without the overlap penalty 20 % of seeds collapse, and CV rises from .074 to .168",
            "; ".join(
                f"{label}: collapsed {show_count(counts[1])} without, {show_count(counts[0])} with it, "
                f"CV {show_mean(cv_of(free), 3)} and {show_mean(cv_of(one), 3)}"
                for label, counts, (one, free) in zip(("the paper's gate", "ours"), lost, paired, strict=True)
            ),
            with_change(*(_prevents(*counts) for counts in lost)),
            "The paper's gate has its prior, scaling and ρ₀ = 0.3; ours the balanced prior and an active hinge. Some "
            "seed must collapse without the penalty, and none with it.",
        ),
        Claim(
            OVERLAP,
            "ρ₀ = 0.3 is the best trade-off; stricter hurts a little, 0.8 regularises too little",
            "; ".join(f"ρ₀ = {rho}: {show_mean(found, 4, '+')}" for rho, found in hinges.items()),
            all_of(map(above, hinges.values())),
            "Loss minus that of ρ₀ = 0.3, in the paper's unit, by seed. Random subspaces overlap by 0.125 here; a "
            "hinge above that acts only on subspaces that come closer.",
        ),
        Claim(
            "Table 5",
            "The best rank is in the middle (48 of 768); smaller ranks underfit, larger ones overlap too much",
            "; ".join(f"{name}: {show_mean(found, 4, '+')}" for name, found in ranks.items()),
            _inner_optimum(ranks),
            "Loss minus that of rank 64, by seed.",
        ),
        Claim(
            "Table 5",
            "0 % collapse at every rank",
            ", ".join(show_count(found) for found in every_rank),
            _changed(all_of(never(found) for found in every_rank)),
            "Ranks 8, 16, 32, 128 and 64, with the balanced prior.",
        ),
        Claim(
            "Appendix, Extended Experimental Details",
            "β from .005 to .02 changes perplexity by less than 0.1 of 18 (0.6 %)",
            "; ".join(f"{name}: {show_mean(found, 4, '+')}" for name, found in betas.items()),
            _small(betas.values(), 0.0055),
            "Loss minus that of β = .01, by seed; the mean must lie within .0055 nats.",
        ),
        Claim(
            "Appendix, Sensitivity to Initialization",
            "Haar, PCA and identity frames end at the same perplexity (18.1, 18.0, 18.2)",
            "; ".join(f"{name}: {show_mean(found, 4, '+')}" for name, found in inits.items()),
            _small(inits.values(), 0.0055),
            "Loss minus that of Haar frames, by seed; the mean must lie within .0055 nats.",
        ),
        Claim(
            "Appendix, Sampled-Pairs Approximation",
            "A sample of pairs is as good as all: CV .074 and .074 with M = 8 and 16, .073 with all 28; at N = 16 .081 "
            "with 64 and .079 with all 120; at N = 32 .092 with 128 and .090 with all 496",
            "; ".join(f"M = {name}: CV {show_mean(found, 3)}" for name, found in pairs.items())
            + f"; all: {show_mean(cv_of(REFERENCE.name), 3)}"
            + "".join(
                f"; N = {n}: {show_mean(some, 3)}, all: {show_mean(all_, 3)}" for n, (some, all_) in many.items()
            ),
            all_of((
                _equal_cv(cv_of(REFERENCE.name), pairs.values()),
                *(_equal_cv(all_, [some]) for some, all_ in many.values()),
            )),
            "The means of CV must lie within a tenth of that with all pairs.",
        ),
        Claim(
            "Section 5.2",
            "A full N × N matrix per token does not improve perplexity over the scalar amortiser",
            show_mean(matrix, 4, "+"),
            decide(matrix, lambda found: found.high >= 0),
            f"Loss minus that of the scalar amortiser, by seed. {in_doubt(matrix)}",
        ),
        Claim(
            "Section 5.3",
            "Training on the manifold is important, rather than unconstrained steps followed by a projection",
            show_mean(projected, 4, "+"),
            above(projected),
            f"Loss with Adam and QR minus that with GrassmannAdam, by seed. {in_doubt(projected)}",
        ),
        Claim(
            "Sections 4 and 6.2",
            "Auxiliary balancing can be dispensed with: the prior ∝ Z(κ) and the penalty suffice",
            f"collapsed: the paper's gate {show_count(paper_prior['grmoe-paper'])}, its prior alone "
            f"{show_count(paper_prior['prior-paper'])}",
            with_change(*map(never, paper_prior.values())),
            "The paper's gate has its prior, scaling and penalty. The change: our scaling and an active penalty beside "
            "its prior, which does not react to the load.",
        ),
    ]  # fmt: skip


def _prevents(with_it: tuple[int, int], without: tuple[int, int]) -> Verdict:
    """Of "it prevents collapse", from (times, seeds)."""
    if min(with_it[1], without[1]) < MIN_SEEDS:
        return Verdict.OPEN
    return Verdict.HOLDS if without[0] and not with_it[0] else Verdict.FAILS


def _changed(verdict: Verdict) -> Verdict:
    return Verdict.CHANGED if verdict is Verdict.HOLDS else verdict


def _small(gaps: Iterable[Mean | None], limit: float) -> Verdict:
    """Of "it makes no difference": every mean lies within the limit."""
    return all_of(decide(gap, lambda found: abs(found.value) <= limit) for gap in gaps)


def _equal_cv(reference: Mean | None, others: Iterable[Mean | None]) -> Verdict:
    given = [reference, *others]
    found = [cv for cv in given if cv is not None and cv.seeds >= MIN_SEEDS]
    if len(found) < len(given):
        return Verdict.OPEN
    first, *rest = found
    return (
        Verdict.HOLDS
        if all(abs(cv.value - first.value) <= first.value / 10 for cv in rest)
        else Verdict.FAILS
    )


def _inner_optimum(ranks: Mapping[str, Mean | None]) -> Verdict:
    """Both ends are worse than the best of all, with intervals that exclude it."""
    found = [gap for gap in ranks.values() if gap is not None and gap.seeds >= MIN_SEEDS]
    if len(found) < len(ranks):
        return Verdict.OPEN
    first, *_, last = found
    best = min(0.0, *(gap.value for gap in found))
    return Verdict.HOLDS if first.low > best and last.low > best else Verdict.FAILS


def _departures(models: Models) -> Table:
    table = Table(
        "What each departure from the paper buys",
        ["ours has", "seeds", "loss without it", "load CV without it", "collapsed without it"],
    )
    reference = models[REFERENCE.name]
    for name, meaning in DEPARTURES.items():
        runs = models[name]
        gap = difference(runs, reference)
        table.add(
            meaning,
            str(len(runs)),
            show_mean(gap, 4, "+"),
            show_mean(mean_of(runs, lambda row: row.load_cv), 3),
            show_count(collapsed(runs)),
        )
    return table


def _overlap(models: Models) -> Table:
    paper = {
        "none": ("18.3", ".168", "20 %", "0.72"), "paper-0.1": ("18.4", ".052", "0 %", "0.10"),
        "paper-0.3": ("18.1", ".074", "0 %", "0.28"), "paper-0.5": ("18.2", ".098", "0 %", "0.46"),
        "paper-0.8": ("18.3", ".142", "10 %", "0.71"),
    }  # fmt: skip
    headings = [
        "penalty",
        "paper: perplexity",
        "CV",
        "collapsed",
        "ρ_max",
        "here: loss",
        "CV",
        "collapsed",
        "ρ_max",
    ]
    table = Table("Overlap penalty beside the paper", headings)
    names = {"default": REFERENCE.name} | {v: f"overlap-{v}" for v in BY_NAME["overlap"].values}
    for value, name in names.items():
        runs = models[name]
        overlaps = [run.max_overlap for run in runs if run.max_overlap is not None]
        table.add(
            BY_NAME["overlap"].default if value == "default" else value,
            *paper.get(value, ("", "", "", "")),
            show_mean(mean_of(runs, lambda row: row.loss), 4),
            show_mean(mean_of(runs, lambda row: row.load_cv), 3),
            show_count(collapsed(runs, paper=True)),
            f"{statistics.fmean(overlaps):.3f}" if overlaps else "–",
        )
    return table


def _ranks(models: Models) -> Table:
    """The paper's ranks and ours, as shares of d/N."""
    paper = {
        16: ("18.9 ± 0.3", ".092"), 32: ("18.4 ± 0.2", ".081"), 48: ("18.1 ± 0.2", ".074"), 64: ("18.2 ± 0.2", ".078"),
        96: ("18.5 ± 0.3", ".105"),
    }  # fmt: skip
    table = Table("Ranks beside the paper", ["rank", "of d/N", "perplexity", "CV", "collapsed"])
    for rank, numbers in paper.items():
        table.add(f"paper: {rank} of 768", f"{rank * 8 / 768:.2f}", *numbers, "0 %")
    own = {int(value): models[f"rank-{value}"] for value in BY_NAME["rank"].values} | {
        64: models[REFERENCE.name]
    }
    for rank, runs in sorted(own.items()):
        table.add(
            f"here: {rank} of 512",
            f"{rank * 8 / 512:.2f}",
            show_mean(mean_of(runs, lambda row: math.exp(row.loss)), 2),
            show_mean(mean_of(runs, lambda row: row.load_cv), 3),
            show_count(collapsed(runs, paper=True)),
        )
    return table


STUDY = ModelStudy(
    name="ablations",
    title="Ablations",
    where=f"{OVERLAP}, Table 5, appendices",
    groups=(Group(BASE, ALL, SEEDS),),
    write=write,
)
