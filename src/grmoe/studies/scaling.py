"""More experts: 8, 16, 32 and 64 at equal active parameters and equal routing settings.

The paper grows the model with N (350M, 1.3B, 2.7B). Here only N grows, so the effect of N stands alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from grmoe.model import preset
from grmoe.pictures import COLORS, two_panels
from grmoe.studies.judging import show_count
from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.recipes import RECIPES, Recipe, small
from grmoe.studies.models.store import Run, Store
from grmoe.studies.models.summary import collapsed, mean, mean_of, model_table, rows_by_seed, show_mean
from grmoe.studies.page import Figure, Page
from grmoe.studies.scaling_claims import (
    AMORTISED,
    BASELINES,
    COUNTS,
    DEFAULT,
    PAPER_COUNTS,
    TABLE,
    Of,
    claims,
)
from grmoe.tables import Table

BASE = small(1250)
SEEDS = 3
METHODS = ("grmoe", DEFAULT, AMORTISED, *BASELINES)
# The paper's other methods, at the N it has: one expert per token, or not causal.
OTHERS = ("switch", "expert-choice", "soft-moe")
# The paper at 1.3B and 2.7B: perplexity, load CV, collapsed seeds, H. N = 8 is in the study of the routers.
PAPER = {
    (16, "softmax"): ("14.2 ± 0.3", ".298", "55 %", "1.08"),
    (16, "switch"): ("14.6 ± 0.2", ".185", "30 %", "0.82"),
    (16, "expert-choice"): ("14.4 ± 0.2", ".072", "0 %", "1.85"),
    (16, "soft-moe"): ("14.0 ± 0.2", ".128", "15 %", "1.51"),
    (16, AMORTISED): ("13.8 ± 0.2", ".081", "0 %", "1.42"),
    (32, "softmax"): ("12.1 ± 0.4", ".342", "65 %", "1.04"),
    (32, "soft-moe"): ("11.8 ± 0.3", ".148", "20 %", "1.48"),
    (32, AMORTISED): ("11.5 ± 0.2", ".092", "0 %", "1.38"),
}


def recipe_of(method: str, count: int) -> Recipe:
    known = RECIPES[method]
    if count == 8:  # the preset's own
        return known
    return known.plus(f"{method}-n{count}", f"{_label(method)}, N = {count}", f"model.num_experts={count}")


def _label(method: str) -> str:
    return "GrMoE, defaults" if method == DEFAULT else RECIPES[method].label


def methods_at(count: int) -> tuple[str, ...]:
    return (*METHODS, *OTHERS) if count in PAPER_COUNTS else METHODS


ALL = tuple(recipe_of(method, count) for count in COUNTS for method in methods_at(count))


def write(store: Store) -> Page:
    models = runs_of(store, BASE, *ALL)

    def of(method: str, count: int) -> Sequence[Run]:
        return models[recipe_of(method, count).name]

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
    return Page(claims(of), [_beside_paper(of), *tables], [figure] if any(models.values()) else [], _notes())


def _notes() -> list[str]:
    return [
        f"`small` with N experts of width 1024, two per token, rank {preset('small').router_rank}, 1250 steps of "
        "32 × 512 tokens. Only N changes, so active parameters are equal but for the gate. The paper grows the model "
        "with N: 16 experts at 1.3B, 32 at 2.7B. Switch computes one expert per token; Expert Choice and Soft MoE look "
        "at later tokens.",
        "Collapsed, in the tables by N: in some layer an expert receives less than a tenth of its fair share. `< 1 %` "
        "and the table beside the paper have the paper's rule, less than 1 % of the tokens. At N = 32 that is a sixth "
        "of the fair share.",
        'The paper contradicts itself. By its limitations its "largest experiment is 1.3B parameters with 16 experts"; '
        "its abstract, Section 6.3 and Table 2 have 2.7B with 32. Its appendix has Soft MoE collapse in 8 to 15 % of "
        "seeds; Table 2 has 20 % at 2.7B. It has 15, 30, 55 and 65 % of five seeds, where only multiples of 20 % are "
        "possible.",
    ]


def _beside_paper(of: Of) -> Table:
    headings = [
        "paper: perplexity ± std", "here ± 95 %", "paper: CV", "here ± 95 %", "paper: collapsed", "here", "paper: H",
        "here",
    ]  # fmt: skip
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
            show_count(collapsed(runs, paper=True)),
            entropy,
            "–" if h is None else f"{h.value:.2f}",
        )
    return table


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
    where=f"{TABLE}, Sections 6.3 and 6.4.1",
    groups=(Group(BASE, ALL, SEEDS),),
    write=write,
)
