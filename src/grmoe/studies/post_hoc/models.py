"""Which models are turned after training and timed, and the paper's numbers of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grmoe.studies.benchmarks import Measured
from grmoe.studies.models.recipes import RECIPES, Recipe
from grmoe.studies.models.store import Run
from grmoe.studies.models.summary import Mean, mean, mean_of, rows_by_seed
from grmoe.studies.throughput import Speed, speed_ratio

LITERAL = RECIPES["grmoe-paper-dense"]  # the paper's gate, prior, penalty and sum: it decides first
DENSE = RECIPES["grmoe"].plus("grmoe-dense", "GrMoE, trained dense", "model.selection=dense")
RETRAINED = {"top-2": RECIPES["softmax-bias"], "top-1": RECIPES["softmax-one"]}
ELASTIC = RECIPES["token-mass"]
OURS = (DENSE, ELASTIC)
TIMED = (LITERAL, *OURS, *RETRAINED.values())
# One model of each is timed: the first seed, or one that another study still trains. Of the paper's form that is the
# last one, of the language models. Of softmax with a bias it is the third, which the downstream tasks open. Then
# neither is trained again for its speed alone.
_SEEDS = {LITERAL.name: 2, RETRAINED["top-2"].name: 2}
_NAMES = {
    LITERAL.name: "GrMoE in the paper's form",
    ELASTIC.name: "GrMoE, random budgets",  # its own label names the way to draw them
}
# The paper's table at 350M: effective experts, perplexity, throughput.
PAPER = {
    0.5: ("5.2", "18.4", "0.82"),
    1.0: ("3.1", "18.1", "1.00"),
    2.0: ("1.8", "18.3", "1.24"),
    5.0: ("1.1", "19.0", "1.41"),
}
PAPER_SOFTMAX = {"top-2": ("2.0", "18.7", "1.00"), "top-1": ("1.0", "19.8", "1.35")}

Models = Mapping[str, Sequence[Run]]
Speeds = Mapping[tuple[str, str], Speed]


def name_of(recipe: Recipe) -> str:
    """As tables and the figure call it."""
    return _NAMES.get(recipe.name, recipe.label)


def dense(alpha: float) -> str:
    return f"dense, α {alpha:g}"


def cut(alpha: float) -> str:
    """Experts up to 90 % of the probability are computed. The paper names no rule."""
    return f"mass 0.9, α {alpha:g}"


def effective_experts(runs: Sequence[Run], alpha: float) -> Mean | None:
    rows = rows_by_seed(runs, setting=dense(alpha)).values()
    return mean(row.effective_experts for row in rows if row.effective_experts is not None)


def experts_computed(runs: Sequence[Run], alpha: float) -> Mean | None:
    return mean_of(runs, lambda row: row.experts_per_token, setting=cut(alpha))


def seed_timed(recipe: Recipe) -> int:
    return _SEEDS.get(recipe.name, 0)


def relative(speeds: Speeds, recipe: Recipe, setting: str, base: Recipe = DENSE) -> Measured | None:
    """Throughput over that of a model trained dense at α = 1, as `cut` computes it."""
    mine, under = speeds.get((recipe.name, setting)), speeds.get((base.name, cut(1.0)))
    return None if mine is None or under is None else speed_ratio(mine, under)


def times(value: Measured | None) -> str:
    """With the middle 80 % of the rounds."""
    return "–" if value is None else f"{value.value:.2f}× ({value.low:.2f} to {value.high:.2f})"
