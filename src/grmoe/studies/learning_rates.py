"""Every method at three learning rates, in every setting, so that each is compared at its best."""

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
from grmoe.studies.models.summary import mean_of
from grmoe.studies.page import Page
from grmoe.tables import Table

STEPS = 1000
SEEDS = 1
RATES = tuple(DEFAULT_RATE * factor for factor in (0.5, 1.0, 2.0))
NOISE = 0.004  # nats between two seeds. The default stays unless another rate is better by more.
# By setting and method. All methods are searched with two of eight experts, those of the comparison everywhere.
SEARCHED: dict[Setting, dict[str, Recipe]] = {**GATES, "two": {recipe.name: recipe for recipe in METHODS}}


def at(recipe: Recipe, rate: float) -> Recipe:
    return recipe.plus(f"{recipe.name}-lr-{rate:g}", f"{recipe.label}, rate {rate:g}", f"optim.lr={rate:g}")


def losses_of(store: Store, setting: Setting, recipe: Recipe) -> dict[float, float]:
    """Validation loss by learning rate, where it was measured."""
    base = base_of(setting, STEPS)
    found = {rate: mean_of(store.runs(base, at(recipe, rate)), lambda row: row.loss) for rate in RATES}
    return {rate: mean.value for rate, mean in found.items() if mean is not None}


def best_rates(store: Store) -> dict[tuple[Setting, str], float]:
    """The best rate of each method in each setting, beyond noise, where it was measured at all rates."""
    found = {}
    for setting, recipes in SEARCHED.items():
        for method, recipe in recipes.items():
            losses = losses_of(store, setting, recipe)
            if len(losses) == len(RATES):
                best = min(losses, key=lambda rate: losses[rate])
                found[setting, method] = best if losses[best] < losses[DEFAULT_RATE] - NOISE else DEFAULT_RATE
    return found


def write(store: Store) -> Page:
    best, tables = best_rates(store), []
    for setting, recipes in SEARCHED.items():
        headings = ["router", *(f"{rate:g}" for rate in RATES), "best", "used"]
        table = Table(f"Validation loss by learning rate: {SETTINGS[setting]}", headings)
        for method, recipe in recipes.items():
            losses = losses_of(store, setting, recipe)
            table.add(
                recipe.label,
                *(f"{losses[rate]:.4f}" if rate in losses else "–" for rate in RATES),
                f"{best[setting, method]:g}" if (setting, method) in best else "–",
                f"{best_rate(setting, method):g}",
            )
        tables.append(table)
    return Page(
        claims=[],
        tables=tables,
        notes=[
            f"`small` and `small-fine`, 1000 steps of 32 × 512 tokens, one seed. {DEFAULT_RATE:g} is used unless "
            f"another rate is better by more than {NOISE:g} nats, the noise between seeds. The rate of κ follows that "
            "of the weights. With two of eight experts, rates of GrMoE, softmax and vMF were searched before, with "
            "four values or more: `results/learning-rates-small.json`.",
        ],
    )


STUDY = ModelStudy(
    name="learning-rates",
    title="Learning rates",
    where="not in the paper",
    groups=tuple(
        Group(
            base_of(setting, STEPS),
            tuple(at(recipe, rate) for recipe in recipes.values() for rate in RATES),
            SEEDS,
        )
        for setting, recipes in SEARCHED.items()
    ),
    write=write,
)
