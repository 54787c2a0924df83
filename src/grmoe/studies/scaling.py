"""More experts: 8, 16, 32 and 64 at equal active parameters and equal routing settings.

The paper grows the model with N (350M, 1.3B, 2.7B). Here only N grows, so the effect of N stands alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from grmoe.model import preset
from grmoe.pictures import COLORS, two_panels
from grmoe.studies.judging import MIN_SEEDS, all_of, below, in_doubt, never, not_above, not_worse, show_count
from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.recipes import RECIPES, Recipe, small
from grmoe.studies.models.store import Run, Store
from grmoe.studies.models.summary import (
    Mean,
    collapsed,
    difference,
    mean,
    mean_of,
    model_table,
    rows_by_seed,
    show_mean,
)
from grmoe.studies.page import OWN, Claim, Figure, Page, Verdict
from grmoe.tables import Table

BASE = small(1250)
SEEDS = 3
COUNTS = (8, 16, 32, 64)
DEFAULT = "token-mass"  # GrMoE with its defaults: random budgets in training
METHODS = ("grmoe", DEFAULT, "grmoe-amortised", "softmax", "softmax-bias", "softmax-load", "softmax-z", "vmf")
BASELINES = METHODS[3:]  # of equal experts per token
# The paper's other methods, at the N it has: one expert per token, or not causal.
OTHERS = ("switch", "expert-choice", "soft-moe")
OTHER_COUNTS = (8, 16, 32)
MOST_CV = 0.10
# The paper at 1.3B and 2.7B: perplexity, load CV, collapsed seeds, H. N = 8 is in the study of the routers.
PAPER = {
    (16, "softmax"): ("14.2 ± 0.3", ".298", "55 %", "1.08"),
    (16, "switch"): ("14.6 ± 0.2", ".185", "30 %", "0.82"),
    (16, "expert-choice"): ("14.4 ± 0.2", ".072", "0 %", "1.85"),
    (16, "soft-moe"): ("14.0 ± 0.2", ".128", "15 %", "1.51"),
    (16, "grmoe-amortised"): ("13.8 ± 0.2", ".081", "0 %", "1.42"),
    (32, "softmax"): ("12.1 ± 0.4", ".342", "65 %", "1.04"),
    (32, "soft-moe"): ("11.8 ± 0.3", ".148", "20 %", "1.48"),
    (32, "grmoe-amortised"): ("11.5 ± 0.2", ".092", "0 %", "1.38"),
}


def recipe_of(method: str, count: int) -> Recipe:
    known = RECIPES[method]
    if count == 8:  # the preset's own
        return known
    return known.plus(f"{method}-n{count}", f"{_label(method)}, N = {count}", f"model.num_experts={count}")


def _label(method: str) -> str:
    return "GrMoE, defaults" if method == DEFAULT else RECIPES[method].label


def methods_at(count: int) -> tuple[str, ...]:
    return (*METHODS, *OTHERS) if count in OTHER_COUNTS else METHODS


ALL = tuple(recipe_of(method, count) for count in COUNTS for method in methods_at(count))


def write(store: Store) -> Page:
    models = runs_of(store, BASE, *ALL)

    def of(method: str, count: int) -> Sequence[Run]:
        return models[recipe_of(method, count).name]

    lost = {n: collapsed(of("grmoe", n)) for n in COUNTS}
    cv = {n: mean_of(of("grmoe", n), lambda row: row.load_cv) for n in COUNTS}
    softmax = {n: collapsed(of("softmax", n)) for n in COUNTS}
    gains = {n: difference(of("grmoe-amortised", n), of("grmoe", n)) for n in COUNTS}
    gaps = {(n, b): difference(of("grmoe", n), of(b, n)) for n in COUNTS for b in BASELINES}
    hardest = {n: _hardest(gaps[n, b] for b in BASELINES) for n in COUNTS}
    even = all_of(never(found) for found in lost.values())
    if even is Verdict.HOLDS:
        even = Verdict.CHANGED if all(m and m.value <= MOST_CV for m in cv.values()) else Verdict.FAILS
    others = {m: {n: collapsed(of(m, n)) for n in OTHER_COUNTS} for m in ("switch", "soft-moe")}
    grows, first, last = Verdict.OPEN, gains[8], gains[64]
    if first is not None and last is not None and min(first.seeds, last.seeds) >= MIN_SEEDS:
        grows = Verdict.HOLDS if last.high < first.low else Verdict.FAILS
    claims = [
        Claim(
            "Table 2",
            "Softmax top-2 collapses more often with more experts: 40 %, 55 %, 65 % of seeds at N = 8, 16, 32",
            "; ".join(f"N = {n}: {show_count(found)}" for n, found in softmax.items()),
            _worsens(softmax),
            "Without balancing. Collapsed: an expert receives less than a tenth of its fair share, at every N.",
        ),
        Claim(
            "Table 2",
            "So do Switch (20 %, 30 % at N = 8, 16) and Soft MoE (10 %, 15 %, 20 % at N = 8, 16, 32)",
            "; ".join(
                f"{RECIPES[m].label}: " + ", ".join(show_count(count) for count in found.values())
                for m, found in others.items()
            ),
            all_of(map(_worsens, others.values())),
            "At N = 8, 16 and 32, by the same rule. Soft MoE gives every expert as many slots.",
        ),
        Claim(
            "Table 2",
            "GrMoE keeps 0 % collapse and an even load (CV .074 to .092) at every N",
            "; ".join(f"N = {n}: {show_count(lost[n])}, CV {show_mean(cv[n], 3)}" for n in COUNTS),
            even,
            f"With the balanced prior, which the paper does not have. A CV of at most {MOST_CV:g} is asked for.",
        ),
        Claim(
            "Table 2",
            "GrMoE has the lowest perplexity at every N",
            "; ".join(f"N = {n}: {show_mean(gap, 4, '+')}" for n, gap in hardest.items()),
            all_of(below(gap) for gap in gaps.values()),
            "Loss minus that of the best baseline with two experts per token, by seed. All of them count.",
        ),
        _defaults(of),
        Claim(
            "Section 6.3",
            "The hyper-parameters transfer: no retuning at larger N",
            "; ".join(f"N = {n}: {show_mean(gap, 4, '+')}" for n, gap in hardest.items()),
            all_of(not_worse(gap, 0.005) for gap in gaps.values()),
            "The same settings at every N; it fails where a baseline is better with an interval that excludes zero.",
        ),
        Claim(
            "Section 6.4.1",
            "The gain of the amortiser grows with N: 0.2 of 18.3 at N = 8, 0.3 of 14.1 at N = 16",
            "; ".join(f"N = {n}: {show_mean(gain, 4, '+')}" for n, gain in gains.items()),
            grows,
            f"Loss with the amortiser minus without. At N = 64: {in_doubt(gains[64])}",
        ),
    ]
    tables = [
        model_table(
            f"N = {n}; difference to GrMoE by seed",
            [(_label(m), of(m, n), None) for m in methods_at(n)],
            (of("grmoe", n), None),
            first="router",
        )
        for n in COUNTS
    ]
    figure = Figure("scaling", "Loss and load by the number of experts", lambda path: _draw(models, path))
    return Page(
        claims,
        [_beside_paper(of), *tables],
        [figure] if any(models.values()) else [],
        [
            f"`small` with N experts of width 1024, two per token, rank {preset('small').router_rank}, 1250 steps of "
            "32 × 512 tokens. Only N changes, so active parameters are equal but for the gate. Switch computes one "
            "expert per token; Expert Choice and Soft MoE look at later tokens.",
        ],
    )


def _beside_paper(of: Callable[[str, int], Sequence[Run]]) -> Table:
    headings = [
        "paper: perplexity",
        "here",
        "paper: CV",
        "here",
        "paper: collapsed",
        "here",
        "paper: H",
        "here",
    ]
    table = Table("Beside the paper (1.3B and 2.7B there, `small` here)", ["N", "router", *headings], left=2)
    for (count, method), (perplexity, cv, lost, entropy) in PAPER.items():
        runs = of(method, count)
        h = mean(row.entropy for row in rows_by_seed(runs).values() if row.entropy is not None)
        table.add(
            str(count),
            _label(method),
            perplexity,
            show_mean(mean_of(runs, lambda row: math.exp(row.loss)), 2),
            cv,
            show_mean(mean_of(runs, lambda row: row.load_cv), 3),
            lost,
            show_count(collapsed(runs)),
            entropy,
            "–" if h is None else f"{h.value:.2f}",
        )
    return table


def _worsens(lost: Mapping[int, tuple[int, int]]) -> Verdict:
    """Of "more seeds collapse with more experts"."""
    if min(seeds for _, seeds in lost.values()) < MIN_SEEDS:
        return Verdict.OPEN
    shares = [times / seeds for times, seeds in lost.values()]
    return Verdict.HOLDS if shares == sorted(shares) and shares[-1] > shares[0] else Verdict.FAILS


def _defaults(of: Callable[[str, int], Sequence[Run]]) -> Claim:
    """What we ask of the defaults at every N: no collapse, an even load, no baseline with a lower mean loss."""
    lost = {n: collapsed(of(DEFAULT, n)) for n in COUNTS}
    cv = {n: mean_of(of(DEFAULT, n), lambda row: row.load_cv) for n in COUNTS}
    gaps = {n: [difference(of(DEFAULT, n), of(b, n)) for b in BASELINES] for n in COUNTS}
    shown = {n: _hardest(found) for n, found in gaps.items()}
    parts = [
        *(never(found) for found in lost.values()),
        *(not_above(found, MOST_CV) for found in cv.values()),
        *(not_above(gap) for found in gaps.values() for gap in found),
    ]
    return Claim(
        OWN,
        f"With its defaults GrMoE never collapses, has a mean CV of at most {MOST_CV:g} and no higher mean loss than "
        "any baseline of equal experts per token, at every N",
        "; ".join(
            f"N = {n}: {show_count(lost[n])}, CV {show_mean(cv[n], 3)}, loss {show_mean(shown[n], 4, '+')}"
            for n in COUNTS
        ),
        all_of(parts),
        "Random budgets in training, measured at two experts per token. Loss minus that of the best baseline, by seed; "
        "means decide.",
    )


def _hardest(gaps: Iterable[Mean | None]) -> Mean | None:
    """To the best baseline."""
    return max((gap for gap in gaps if gap is not None), key=lambda gap: gap.value, default=None)


def _draw(models: dict[str, list[Run]], path: Path) -> None:
    with two_panels(path) as (left, right):
        for color, method in zip(COLORS, ("grmoe", "softmax", "softmax-bias", "softmax-z"), strict=False):
            loss = {n: mean_of(models[recipe_of(method, n).name], lambda row: row.loss) for n in COUNTS}
            cv = {n: mean_of(models[recipe_of(method, n).name], lambda row: row.load_cv) for n in COUNTS}
            for ax, found in ((left, loss), (right, cv)):
                known = [(n, m) for n, m in found.items() if m is not None]
                ax.errorbar(
                    [n for n, _ in known], [m.value for _, m in known], [m.half or 0.0 for _, m in known],
                    color=color, marker="o", ms=4, lw=1.5, capsize=3, label=RECIPES[method].label,
                )  # fmt: skip
        left.set(title="validation loss, nats per token", xscale="log", xlabel="experts")
        right.set(title="load CV", xscale="log", xlabel="experts", ylim=(0, None))
        for ax in (left, right):
            ax.set_xticks(COUNTS, [str(n) for n in COUNTS])
            ax.minorticks_off()
        left.legend(frameon=False)


STUDY = ModelStudy(
    name="scaling",
    title="More experts",
    where="Table 2, Sections 6.3 and 6.4.1",
    groups=(Group(BASE, ALL, SEEDS),),
    write=write,
)
