"""More experts: 8, 16, 32 and 64 at equal active parameters and equal routing settings.

The paper grows the model with N (350M, 1.3B, 2.7B). Here only N grows, so the effect of N stands alone.

GrMoE's gate has N·d·k parameters, and a token uses all of them. At one rank for all N they would grow with N, to 28 %
more active parameters than softmax at N = 64. So the rank is d/N, as in the paper: the gate has as many at every N. One
row has the same rank at every N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from grmoe.config import load
from grmoe.model import preset
from grmoe.model.count import count as cost_of
from grmoe.pictures import COLORS, two_panels
from grmoe.runs.config import TrainConfig
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
    SAME_RANK,
    SLOT_COUNTS,
    SWITCH_COUNTS,
    TABLE,
    Of,
    claims,
    show_share,
    starved_share,
)
from grmoe.studies.scaling_questions import questions
from grmoe.tables import Table

BASE = small(1250)
SEEDS = 3
PRESET = preset("small")
GRMOE = ("grmoe", DEFAULT, AMORTISED)
METHODS = (*GRMOE, *BASELINES)
# Only where something asks for them: the paper's Switch where it has it, and the rank of N = 8.
SOME = {"switch": SWITCH_COUNTS, SAME_RANK: COUNTS[1:]}
# The paper's methods that are not causal, where it has them. Their losses compare with no other, and their load is even
# by design. So one model each, and the queue orders by seed: a late one leaves room for what decides a claim.
NOT_CAUSAL = {"expert-choice": (16,), "soft-moe": SLOT_COUNTS}
LATE_SEED = 9
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
    """A method with N experts and the preset's rank."""
    known = RECIPES[method]
    if count == PRESET.num_experts:
        return known
    return known.plus(f"{method}-n{count}", f"{_label(method)}, N = {count}", f"model.num_experts={count}")


def row_recipe(method: str, count: int) -> Recipe:
    """What is trained for a row of the tables: `recipe_of`, with the rank d/N for GrMoE."""
    if method == SAME_RANK:
        return recipe_of("grmoe", count)
    recipe, rank = recipe_of(method, count), rank_at(count)
    if method not in GRMOE or rank == PRESET.router_rank:
        return recipe
    return recipe.plus(
        f"{recipe.name}-rank-{rank}", f"{recipe.label}, rank {rank}", f"model.router_rank={rank}"
    )


def rank_at(count: int) -> int:
    return PRESET.hidden_size // count


@cache
def active_parameters(recipe: Recipe) -> int:
    """Of one token, from the configuration."""
    config = load(TrainConfig, None, [*BASE.settings, *recipe.settings]).resolved()
    return cost_of(config.model_config(PRESET.vocab_size, 0), config.data.sequence_length).active


def _label(method: str) -> str:
    return "GrMoE, defaults" if method == DEFAULT else RECIPES[method].label


def _row_label(method: str, count: int) -> str:
    if method == SAME_RANK:
        return f"GrMoE, rank {PRESET.router_rank}"
    return f"{_label(method)}, rank {rank_at(count)}" if method in GRMOE else _label(method)


def methods_at(count: int) -> tuple[str, ...]:
    few = SOME | NOT_CAUSAL
    return (*METHODS, *(method for method, counts in few.items() if count in counts))


ROWS = [(method, count) for count in COUNTS for method in methods_at(count)]
DECIDING, SHOWN = (
    tuple(row_recipe(method, count) for method, count in ROWS if (method in NOT_CAUSAL) is late)
    for late in (False, True)
)


def write(store: Store) -> Page:
    models = runs_of(store, BASE, *DECIDING, *SHOWN)

    def of(method: str, count: int) -> Sequence[Run]:
        return models[row_recipe(method, count).name]

    tables = [_beside_paper(of), _starved_table(of), *(_model_table(of, count) for count in COUNTS)]
    figure = Figure("scaling", "Loss and load by the number of experts", lambda path: _draw(models, path))
    return Page([*claims(of), *questions(of)], tables, [figure] if any(models.values()) else [], _notes())


def _model_table(of: Of, count: int) -> Table:
    """With active parameters, which follow from the configuration."""
    methods = methods_at(count)
    found = model_table(
        f"N = {count}; difference to GrMoE by seed",
        [(_row_label(m, count), of(m, count), None) for m in methods],
        (of("grmoe", count), None),
        first="router",
    )
    first, *others = found.headings
    table = Table(found.title, [first, "active parameters", "to softmax", *others])
    usual = active_parameters(row_recipe("softmax", count))
    for method, (label, *cells) in zip(methods, found.rows, strict=True):
        active = active_parameters(row_recipe(method, count))
        table.add(label, f"{active / 1e6:.1f} M", f"{100 * (active / usual - 1):+.1f} %", *cells)
    return table


def _starved_table(of: Of) -> Table:
    headings = [*(f"N = {n}" for n in COUNTS), *(f"< 1 %, N = {n}" for n in COUNTS)]
    table = Table("Starved experts, per cent of all", ["router", *headings])
    for method in (*METHODS, "switch"):
        table.add(
            _label(method),
            *(
                show_share(starved_share(of(method, n), n, paper)) if method in methods_at(n) else "–"
                for paper in (False, True)
                for n in COUNTS
            ),
        )
    return table


def _notes() -> list[str]:
    return [
        "`small` with N experts of width 1024, two per token, 1250 steps of 32 × 512 tokens. Only N changes. The paper "
        "grows the model with N: 16 experts at 1.3B, 32 at 2.7B. Switch computes one expert per token; Expert Choice "
        "and Soft MoE look at later tokens.",
        "GrMoE's rank is d/N, as in the paper, so its gate has as many parameters at every N. At one rank for all N "
        f"the gate would grow with N: the rows with rank {PRESET.router_rank} have that. Active parameters are those "
        "of one token, counted from the configuration, embeddings included.",
        "Expert Choice and Soft MoE are here once, where the paper has them. Their losses compare with no other, and "
        "every expert receives as much by design. Both are at N = 8 with [the routers](language-model.md).",
        "Collapsed, in the tables by N: in some layer an expert receives less than a tenth of its fair share. `< 1 %` "
        "and the table beside the paper have the paper's rule, less than 1 % of the tokens. At N = 32 that is a sixth "
        "of the fair share. Starved experts are counted by both rules. Earlier results say only whether there is one.",
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
            _row_label(method, count),
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
            runs = {n: models[row_recipe(method, n).name] for n in COUNTS}
            loss = {n: mean_of(found, lambda row: row.loss) for n, found in runs.items()}
            cv = {n: mean_of(found, lambda row: row.load_cv) for n, found in runs.items()}
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
    groups=(Group(BASE, DECIDING, SEEDS), Group(BASE, SHOWN, 1, LATE_SEED)),
    write=write,
)
