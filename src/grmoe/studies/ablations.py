"""Ablations: one setting of GrMoE at a time, beside the default. What does each departure from the paper buy?

To add a row, add a value to a group of `GROUPS`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grmoe.studies.judging import MIN_SEEDS, above, all_of, decide, in_doubt, never, show_count
from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.recipes import DEFAULT_RATE, RECIPES, Recipe, best_rate
from grmoe.studies.models.store import Run, Store
from grmoe.studies.models.summary import Mean, collapsed, difference, mean_of, model_table, show_mean
from grmoe.studies.page import Claim, Page, Verdict
from grmoe.studies.scaling import BASE
from grmoe.tables import Table

SEEDS = 3
REFERENCE = RECIPES["grmoe"]
# `small` has d = 512 and rank 32, so random subspaces overlap by 32/512 of the rank: the paper's unit is 16 of ours.
_UNIT = 16
_PAPER_UNIT = "routing.overlap_unit=absolute"
OVERLAP = "Table 4"
_KAPPA_1X = f"optim.kappa_lr={DEFAULT_RATE:g}"


@dataclass(frozen=True)
class Ablation:
    """Values of one setting beside the default's."""

    name: str
    title: str
    default: str
    """The default's label in the table."""
    values: Mapping[str, tuple[str, ...] | Recipe]
    """What is added to the default, or a recipe that other studies have too, by a short name."""

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        return tuple(
            found
            if isinstance(found, Recipe)
            else REFERENCE.plus(f"{self.name}-{value}", f"{self.title}: {value}", *found)
            for value, found in self.values.items()
        )


def _each(key: str, *values: str) -> dict[str, tuple[str, ...] | Recipe]:
    return {value: (f"{key}={value}",) for value in values}


def _router(option: str, *values: str) -> dict[str, tuple[str, ...] | Recipe]:
    return _each(f"model.router_options.{option}", *values)


GROUPS = (
    Ablation(
        "overlap", "overlap penalty", "ρ₀ = 0.5 of random (default)",
        {
            "none": ("routing.overlap_weight=0",),
            **{f"paper-{rho:g}": (_PAPER_UNIT, f"routing.overlap_rho={rho:g}") for rho in (0.1, 0.3, 0.5, 0.8)},
            **{f"random-{rho:g}": (f"routing.overlap_rho={rho:g}",) for rho in (0.25, 1)},
        },
    ),
    Ablation("rank", "rank", "32 (default)", _each("model.router_rank", "8", "16", "64", "128")),
    Ablation("beta", "weight of the penalty", ".01 (default)", _each("routing.overlap_weight", "0.005", "0.02", "0.1")),
    Ablation("pairs", "pairs in the penalty", "all 28 (default)", _each("routing.overlap_pairs", "8", "16")),
    Ablation("init", "initial subspaces", "Haar (default)", _router("init", "identity", "pca")),
    Ablation("prior", "prior", "balanced (default)", _router("prior", "paper", "uniform")),
    Ablation("scaling", "scaling of the energy", "d/k (default)", _router("scaling", "unit", "rms", "raw")),
    Ablation(
        "amortiser", "amortiser", "none (default)",
        {"affinity": RECIPES["grmoe-amortised"], **_router("amortizer", "input", "matrix")},
    ),
    Ablation("weights", "weights", "as they are (default)", {"renormalised": ("model.norm_topk_prob=true",)}),
    Ablation("training", "budgets in training", "full", {"random": RECIPES["token-mass"]}),
    Ablation(
        "kappa", "rate of κ", "5 × (default)",
        {"fixed": ("optim.kappa_lr=0",), "1x": (_KAPPA_1X,)},
    ),
    Ablation("frames", "rate of the subspaces", "0.017 (default)", _each("optim.frames_lr", "0", "0.05", "0.15")),
    Ablation(
        "optimiser", "optimiser of the subspaces", "GrassmannAdam (default)",
        # At the rate of the weights, because they step entry by entry.
        {
            method: (f"optim.frames_method={method}", f"optim.frames_lr={best_rate('two', 'grmoe'):g}")
            for method in ("projected", "qr")
        },
    ),
    Ablation(
        "gate", "form of the gate", "scalar κ (default)",
        {"diagonal": ("model.router_options.concentration=diagonal",), "linear": ("model.router_options.linear=true",)},
    ),
    Ablation(
        "paper", "all choices of the paper", "ours",
        {
            "gate": (
                "model.router_options.prior=paper", "model.router_options.scaling=raw", _PAPER_UNIT,
                "routing.overlap_rho=0.3", _KAPPA_1X,
            )
        },
    ),
)  # fmt: skip
BY_NAME = {group.name: group for group in GROUPS}
ALL = (REFERENCE, *(recipe for group in GROUPS for recipe in group.recipes))
# What the paper does: the recipe, and what ours changes.
DEPARTURES = {
    "prior-paper": "a prior that is balanced by the load",
    "overlap-paper-0.3": "a hinge that is active, at half the random overlap",
    "overlap-none": "the overlap penalty at all",
    "kappa-1x": "κ at five times the rate",
    "scaling-unit": "energies scaled by d/k, against unit tokens",
    "scaling-rms": "energies scaled by d/k, against RMS-normed tokens",
    "scaling-raw": "energies scaled by d/k, against the paper's tokens as they are",
    "paper-gate": "prior, scaling, hinge and rate of κ together",
    "weights-renormalised": "weights as they are, against renormalised ones (which the paper does not have either)",
    "optimiser-projected": "subspaces trained on their manifold, against Adam and QR (the paper has the former)",
    "optimiser-qr": "subspaces trained on their manifold, against Adam on a matrix with its QR frame in the model",
    "token-mass": "full budgets in training, against random ones",
}

Models = Mapping[str, Sequence[Run]]


def write(store: Store) -> Page:
    models = runs_of(store, BASE, *ALL)
    reference = models[REFERENCE.name]
    tables = [_departures(models), _overlap(models)]
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
            f"of the paper's units is {_UNIT} of ours, so its ρ₀ = 0.3 is 4.8 times random and never active.",
            "The paper ranks 16 to 96 at width 768, N = 8. Here the width is 512.",
        ],
    )


def _claims(models: Models) -> list[Claim]:
    reference = models[REFERENCE.name]

    def gap(name: str) -> Mean | None:
        return difference(models[name], reference)

    none, cv = models["overlap-none"], {}
    for name in (REFERENCE.name, "overlap-none"):
        cv[name] = mean_of(models[name], lambda row: row.load_cv)
    lost = collapsed(none, paper=True)
    needed = Verdict.OPEN if lost[1] < MIN_SEEDS else Verdict.HOLDS if lost[0] else Verdict.FAILS
    ranks = {name: gap(name) for name in ("rank-8", "rank-16", "rank-64", "rank-128")}
    every_rank = [collapsed(models[name], True) for name in (*ranks, REFERENCE.name)]
    strict, loose = gap("overlap-random-0.25"), gap("overlap-paper-0.8")
    betas = {name: gap(name) for name in ("beta-0.005", "beta-0.02")}
    paper_prior = collapsed(models["prior-paper"], True)
    inits = {name: gap(f"init-{name}") for name in ("pca", "identity")}
    pairs = {name: mean_of(models[f"pairs-{name}"], lambda row: row.load_cv) for name in ("8", "16")}
    projected = gap("optimiser-projected")
    matrix = difference(models["amortiser-matrix"], models["grmoe-amortised"])
    return [
        Claim(
            OVERLAP,
            "Without the overlap penalty 20 % of seeds collapse, and CV rises from .074 to .168",
            f"collapsed {show_count(lost)}; CV {show_mean(cv['overlap-none'], 3)}, "
            f"with it {show_mean(cv[REFERENCE.name], 3)}",
            needed,
            "Both have the balanced prior, which the paper does not have.",
        ),
        Claim(
            OVERLAP,
            "ρ₀ = 0.3 is the best trade-off; stricter hurts a little, 0.8 regularises too little",
            f"a quarter of random: {show_mean(strict, 4, '+')}; the paper's 0.8: {show_mean(loose, 4, '+')}",
            all_of(map(above, (strict, loose))),
            "Loss minus that of half the random overlap, our default. The paper's 0.3 is above the random overlap.",
        ),
        Claim(
            "Table 5",
            "The best rank is in the middle (48 of 768); smaller ranks underfit, larger ones overlap too much",
            "; ".join(f"{name}: {show_mean(found, 4, '+')}" for name, found in ranks.items()),
            _inner_optimum(ranks),
            "Loss minus that of rank 32, by seed.",
        ),
        Claim(
            "Table 5",
            "0 % collapse at every rank",
            ", ".join(show_count(found) for found in every_rank),
            _changed(all_of(never(found) for found in every_rank)),
            "Ranks 8, 16, 64, 128 and 32, with the balanced prior.",
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
            "A sample of pairs is as good as all: CV .074 and .074 with M = 8 and 16, .073 with all 28",
            "; ".join(f"M = {name}: CV {show_mean(found, 3)}" for name, found in pairs.items())
            + f"; all: {show_mean(cv[REFERENCE.name], 3)}",
            _equal_cv(cv[REFERENCE.name], pairs.values()),
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
            f"collapsed with the paper's prior {show_count(paper_prior)}",
            never(paper_prior),
            "The paper's prior favours high κ and does not react to the load.",
        ),
    ]  # fmt: skip


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


STUDY = ModelStudy(
    name="ablations",
    title="Ablations",
    where=f"{OVERLAP}, Table 5, appendices",
    groups=(Group(BASE, ALL, SEEDS),),
    write=write,
)
