"""How much a gate can gain at this size: gates that learn nothing, and experts that there is nothing to choose from.

Two gates with equal losses may be equally good, or the choice of experts may hardly matter. A gate that learns nothing
tells which. Part of the page of `grmoe.studies.gates`.
"""

from __future__ import annotations

from collections.abc import Sequence

from grmoe.studies.gate_parts import Models
from grmoe.studies.judging import below, in_doubt
from grmoe.studies.many import Family
from grmoe.studies.models.recipes import EQUAL, GATES, RECIPES, Recipe
from grmoe.studies.models.store import Run
from grmoe.studies.models.summary import difference, mean_of, show_mean
from grmoe.studies.page import OWN, Claim
from grmoe.tables import Table

_AS_DRAWN = ("optim.frames_lr=0", "optim.kappa_lr=0")
GRMOE, FINE = GATES["two"]["grmoe"], GATES["fine"]["grmoe"]
HASH = RECIPES["hash"]
FIXED = GRMOE.plus("grmoe-fixed", "GrMoE, subspaces and κ as drawn", *_AS_DRAWN)
FIXED_FINE = FINE.plus(FIXED.name, FIXED.label, *_AS_DRAWN)
# As many parameters as are computed. All experts get all tokens.
NO_CHOICE = GRMOE.plus("grmoe-two-of-two", "GrMoE, two experts and no others", "model.num_experts=2")

HASH_SEEDS = 5
SEEDS = 3
ROWS = (FIXED, NO_CHOICE, HASH, *GATES["two"].values(), *GATES["one"].values())
FINE_ROWS = (FIXED_FINE, FINE)


def claims(wide: Models, narrow: Models) -> list[Claim]:
    """wide: models with eight experts. narrow: with 32."""
    one = GATES["one"]["grmoe"]
    return [
        _below(
            f"With one expert per token the choice matters: {one.label} is below {HASH.label}, which learns nothing",
            wide[one.name], wide[HASH.name],
        ),
        _below(
            "With two of eight experts the gate has to learn: GrMoE is below itself with subspaces and κ as drawn",
            wide[GRMOE.name], wide[FIXED.name],
        ),
        _below(
            "With 32 narrow experts the gate has to learn: GrMoE is below itself with subspaces and κ as drawn",
            narrow[FINE.name], narrow[FIXED_FINE.name],
        ),
        _below(
            "Six more experts to choose from help: two of eight are below two of two",
            wide[GRMOE.name], wide[NO_CHOICE.name],
        ),
    ]  # fmt: skip


def _below(text: str, ours: Sequence[Run], theirs: Sequence[Run]) -> Claim:
    gap = difference(ours, theirs)
    return Claim(
        OWN, text, show_mean(gap, 4, "+"), below(gap), f"Loss minus the other's, by seed. {in_doubt(gap)}"
    )


def family(wide: Models, narrow: Models) -> Family:
    """The last column of the table."""
    return {
        f"{recipe.label} ({name})": difference(models[recipe.name], models[fixed.name])
        for name, models, learned, fixed in _rows(wide, narrow)
        for recipe in learned
    }


def tables(wide: Models, narrow: Models) -> list[Table]:
    found = Table(
        "What a gate can gain: gates that learn, beside one that learns nothing",
        ["experts per token", "gate", "seeds", "loss", "minus the one that learns nothing"],
        left=2,
    )
    for name, models, learned, fixed in _rows(wide, narrow):
        _add(found, name, models, learned, fixed)
    return [found]


def _rows(wide: Models, narrow: Models) -> list[tuple[str, Models, list[Recipe], Recipe]]:
    """(experts per token, models, recipes, the one that learns nothing)."""
    return [
        ("one of eight", wide, [GATES["one"][method] for method in EQUAL], HASH),
        ("two of eight", wide, [NO_CHOICE, *(GATES["two"][method] for method in EQUAL)], FIXED),
        ("eight of 32", narrow, [FINE], FIXED_FINE),
    ]


def _add(table: Table, name: str, models: Models, learned: Sequence[Recipe], fixed: Recipe) -> None:
    for recipe in (fixed, *learned):
        runs = models[recipe.name]
        gap = None if recipe is fixed else difference(runs, models[fixed.name])
        table.add(
            "two of two" if recipe is NO_CHOICE else name,
            recipe.label,
            str(len(runs)),
            show_mean(mean_of(runs, lambda row: row.loss), 4),
            show_mean(gap, 4, "+"),
        )
