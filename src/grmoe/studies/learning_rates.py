"""Every method at three learning rates, in every setting, so that each is compared at its best.

The search is short. A rate that wins there has to win at full length too: a high rate is ahead early and behind late.
"""

from __future__ import annotations

from grmoe.studies.model_study import Group, ModelStudy
from grmoe.studies.models.recipes import (
    DEFAULT_RATE,
    GATES,
    METHODS,
    SETTINGS,
    Recipe,
    Setting,
    base_of,
    best_rate,
)
from grmoe.studies.models.store import Store
from grmoe.studies.models.summary import Mean, difference, mean_of, show_mean
from grmoe.studies.page import Page
from grmoe.tables import Table

STEPS = 1000
SEEDS = 1
RATES = tuple(DEFAULT_RATE * factor for factor in (0.5, 1.0, 2.0))
NOISE = 0.004  # nats between two seeds. The default stays unless another rate is better by more.
FULL_LENGTH = 2500  # steps of the comparisons
FULL_LENGTH_SEEDS = 3
# Rates other than the default that won the search. They are trained at full length beside the default.
WINNERS: dict[tuple[Setting, str], float] = {
    ("two", "grmoe-amortised"): 3.2e-3,
    ("two", "grmoe-paper"): 3.2e-3,
    ("two", "softmax-z"): 3.2e-3,
    ("two", "switch"): 3.2e-3,
    ("fine", "softmax-bias"): 3.2e-3,
    ("fine", "softmax-z"): 3.2e-3,
}
# By setting and method. All methods are searched with two of eight experts, those of the comparison everywhere.
SEARCHED: dict[Setting, dict[str, Recipe]] = {**GATES, "two": {recipe.name: recipe for recipe in METHODS}}


def at(recipe: Recipe, rate: float) -> Recipe:
    return recipe.plus(f"{recipe.name}-lr-{rate:g}", f"{recipe.label}, rate {rate:g}", f"optim.lr={rate:g}")


def losses_of(store: Store, setting: Setting, recipe: Recipe) -> dict[float, float]:
    """Validation loss by learning rate, where it was measured."""
    base = base_of(setting, STEPS)
    found = {rate: mean_of(store.runs(base, at(recipe, rate)), lambda row: row.loss) for rate in RATES}
    return {rate: mean.value for rate, mean in found.items() if mean is not None}


def winner(store: Store, setting: Setting, method: str) -> float | None:
    """The rate that won the search beyond noise. None: not measured at all rates."""
    losses = losses_of(store, setting, SEARCHED[setting][method])
    if len(losses) < len(RATES):
        return None
    best = min(losses, key=lambda rate: losses[rate])
    return best if losses[best] < losses[DEFAULT_RATE] - NOISE else DEFAULT_RATE


def long_recipe(setting: Setting, method: str, rate: float) -> Recipe:
    """The method at this rate, for runs of full length: the recipe of the comparisons if that is the rate in use."""
    recipe = SEARCHED[setting][method]
    return recipe if rate == best_rate(setting, method) else at(recipe, rate)


def at_full_length(store: Store, setting: Setting, method: str, rate: float) -> Mean | None:
    """Loss at this rate minus loss at the default, both after all steps, by seed."""
    base = base_of(setting, FULL_LENGTH)
    runs, others = (store.runs(base, long_recipe(setting, method, r)) for r in (rate, DEFAULT_RATE))
    return difference(runs, others)


def best_rates(store: Store) -> dict[tuple[Setting, str], float]:
    """The best rate of each method in each setting, where it was measured at all rates."""
    found = {}
    for setting, recipes in SEARCHED.items():
        for method in recipes:
            rate = winner(store, setting, method)
            if rate is not None:
                longer = at_full_length(store, setting, method, rate)
                won = longer is not None and longer.value < 0
                found[setting, method] = rate if won else DEFAULT_RATE
    return found


def write(store: Store) -> Page:
    tables = []
    for setting, recipes in SEARCHED.items():
        headings = ["router", *(f"{rate:g}" for rate in RATES), "best of these", "used"]
        table = Table(f"Validation loss by learning rate: {SETTINGS[setting]}", headings)
        for method, recipe in recipes.items():
            losses, best = losses_of(store, setting, recipe), winner(store, setting, method)
            table.add(
                recipe.label,
                *(f"{losses[rate]:.4f}" if rate in losses else "–" for rate in RATES),
                "–" if best is None else f"{best:g}",
                f"{best_rate(setting, method):g}",
            )
        tables.append(table)
    tables.append(_longer(store))
    return Page(
        claims=[],
        tables=tables,
        notes=[
            f"`small` and `small-fine`, {STEPS} steps of 32 × 512 tokens, one seed. {DEFAULT_RATE:g} counts as best "
            f"unless another rate is better by more than {NOISE:g} nats, the noise between seeds. Another rate is used "
            f"only if it is better after {FULL_LENGTH} steps too. The rate of κ follows that of the weights. With two "
            "of eight experts, rates of GrMoE, softmax and vMF were searched before, with four values or more: "
            "`results/learning-rates-small.json`.",
        ],
    )


def _longer(store: Store) -> Table:
    headings = ["router", "experts", "rate", "seeds", "loss", f"minus that at {DEFAULT_RATE:g}"]
    table = Table(f"Rates that won the search, after {FULL_LENGTH} steps", headings)
    for (setting, method), rate in WINNERS.items():
        recipe = long_recipe(setting, method, rate)
        runs = store.runs(base_of(setting, FULL_LENGTH), recipe)
        table.add(
            SEARCHED[setting][method].label,
            SETTINGS[setting],
            f"{rate:g}",
            str(len(runs)),
            show_mean(mean_of(runs, lambda row: row.loss), 4),
            show_mean(at_full_length(store, setting, method, rate), 4, "+"),
        )
    return table


STUDY = ModelStudy(
    name="learning-rates",
    title="Learning rates",
    where="not in the paper",
    groups=(
        *(
            Group(
                base_of(setting, STEPS),
                tuple(at(recipe, rate) for recipe in recipes.values() for rate in RATES),
                SEEDS,
            )
            for setting, recipes in SEARCHED.items()
        ),
        *(
            Group(
                base_of(setting, FULL_LENGTH),
                tuple(long_recipe(setting, method, r) for r in (rate, DEFAULT_RATE)),
                FULL_LENGTH_SEEDS,
            )
            for (setting, method), rate in WINNERS.items()
        ),
    ),
    write=write,
)
