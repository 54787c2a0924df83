"""Every method at three learning rates, so that each is compared at its best."""

from __future__ import annotations

from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.recipes import DEFAULT_RATE, METHODS, RATES, Recipe, small
from grmoe.studies.models.store import Store
from grmoe.studies.models.summary import mean_of
from grmoe.studies.page import Page
from grmoe.tables import Table

BASE = small(1000)
SEEDS = 1
FACTORS = (0.5, 1.0, 2.0)


def rates() -> list[float]:
    return [DEFAULT_RATE * factor for factor in FACTORS]


def at(recipe: Recipe, rate: float) -> Recipe:
    return recipe.plus(f"{recipe.name}-lr-{rate:g}", f"{recipe.label}, rate {rate:g}", f"optim.lr={rate:g}")


ALL = tuple(at(recipe, rate) for recipe in METHODS for rate in rates())


def best_rates(store: Store) -> dict[str, float]:
    """The best rate of each method that was measured at all of them."""
    models = runs_of(store, BASE, *ALL)
    found = {}
    for recipe in METHODS:
        losses = {rate: mean_of(models[at(recipe, rate).name], lambda row: row.loss) for rate in rates()}
        known = {rate: mean.value for rate, mean in losses.items() if mean is not None}
        if len(known) == len(FACTORS):
            found[recipe.name] = min(known, key=lambda rate: known[rate])
    return found


def write(store: Store) -> Page:
    models, best = runs_of(store, BASE, *ALL), best_rates(store)
    table = Table(
        "Validation loss by learning rate", ["router", *(f"{rate:g}" for rate in rates()), "best", "used"]
    )
    for recipe in METHODS:
        losses = [mean_of(models[at(recipe, rate).name], lambda row: row.loss) for rate in rates()]
        table.add(
            recipe.label,
            *("–" if mean is None else f"{mean.value:.4f}" for mean in losses),
            f"{best[recipe.name]:g}" if recipe.name in best else "–",
            f"{RATES.get(recipe.name, DEFAULT_RATE):g}",
        )
    return Page(
        claims=[],
        tables=[table],
        notes=[
            "`small`, 1000 steps of 32 × 512 tokens, one seed. The rate of κ is five times that of the weights. Rates "
            "of GrMoE, softmax and vMF were searched before, with four values or more: "
            "`results/learning-rates-small.json`.",
        ],
    )


STUDY = ModelStudy(
    name="learning-rates",
    title="Learning rates",
    where="not in the paper",
    groups=(Group(BASE, ALL, SEEDS),),
    write=write,
)
