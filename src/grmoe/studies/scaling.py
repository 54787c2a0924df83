"""More experts: 8, 16, 32 and 64 at equal active parameters and equal routing settings.

The paper grows the model with N (350M, 1.3B, 2.7B). Here only N grows, so the effect of N stands alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grmoe.pictures import COLORS, two_panels
from grmoe.studies.judging import MIN_SEEDS, all_of, below, in_doubt, never, not_worse, show_count
from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.recipes import RECIPES, Recipe, small
from grmoe.studies.models.store import Run, Store
from grmoe.studies.models.summary import collapsed, difference, mean_of, model_table, show_mean
from grmoe.studies.page import Claim, Figure, Page, Verdict

BASE = small(1250)
SEEDS = 3
COUNTS = (8, 16, 32, 64)
METHODS = ("grmoe", "grmoe-amortised", "softmax", "softmax-bias", "softmax-load", "softmax-z", "vmf")
BASELINES = METHODS[2:]
MOST_CV = 0.10


def recipe_of(method: str, count: int) -> Recipe:
    known = RECIPES[method]
    if count == 8:  # the preset's own
        return known
    return known.plus(f"{method}-n{count}", f"{known.label}, N = {count}", f"model.num_experts={count}")


ALL = tuple(recipe_of(method, count) for count in COUNTS for method in METHODS)


def write(store: Store) -> Page:
    models = runs_of(store, BASE, *ALL)

    def of(method: str, count: int) -> Sequence[Run]:
        return models[recipe_of(method, count).name]

    lost = {n: collapsed(of("grmoe", n)) for n in COUNTS}
    cv = {n: mean_of(of("grmoe", n), lambda row: row.load_cv) for n in COUNTS}
    softmax = {n: collapsed(of("softmax", n)) for n in COUNTS}
    gains = {n: difference(of("grmoe-amortised", n), of("grmoe", n)) for n in COUNTS}
    gaps = {(n, b): difference(of("grmoe", n), of(b, n)) for n in COUNTS for b in BASELINES}
    hardest = {
        n: max((g for b in BASELINES if (g := gaps[n, b]) is not None), key=lambda g: g.value, default=None)
        for n in COUNTS
    }
    even = all_of(never(found) for found in lost.values())
    if even is Verdict.HOLDS:
        even = Verdict.CHANGED if all(m and m.value <= MOST_CV for m in cv.values()) else Verdict.FAILS
    shares = [hit / seeds for hit, seeds in softmax.values() if seeds]
    worse = Verdict.OPEN
    if len(shares) == len(COUNTS) and min(seeds for _, seeds in softmax.values()) >= MIN_SEEDS:
        worse = Verdict.HOLDS if shares == sorted(shares) and shares[-1] > shares[0] else Verdict.FAILS
    grows, first, last = Verdict.OPEN, gains[8], gains[64]
    if first is not None and last is not None and min(first.seeds, last.seeds) >= MIN_SEEDS:
        grows = Verdict.HOLDS if last.high < first.low else Verdict.FAILS
    claims = [
        Claim(
            "Table 2",
            "Softmax top-2 collapses more often with more experts: 40 %, 55 %, 65 % of seeds at N = 8, 16, 32",
            "; ".join(f"N = {n}: {show_count(found)}" for n, found in softmax.items()),
            worse,
            "Without balancing. Collapsed: an expert receives less than a tenth of its fair share, at every N.",
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
        Claim(
            "Section 6.3",
            "The hyper-parameters transfer: no retuning at larger N",
            "; ".join(f"N = {n}: {show_mean(gap, 4, '+')}" for n, gap in hardest.items()),
            all_of(not_worse(gap) for gap in gaps.values()),
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
            [(RECIPES[m].label, of(m, n), None) for m in METHODS],
            (of("grmoe", n), None),
            first="router",
        )
        for n in COUNTS
    ]
    figure = Figure("scaling", "Loss and load by the number of experts", lambda path: _draw(models, path))
    return Page(
        claims,
        tables,
        [figure] if any(models.values()) else [],
        [
            "`small` with N experts of width 1024, two per token, rank 32, 1250 steps of 32 × 512 tokens. Only N "
            "changes, so active parameters are equal but for the gate.",
        ],
    )


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
