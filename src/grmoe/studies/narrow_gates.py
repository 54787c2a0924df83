"""Narrow experts: what a linear gate has and subspaces have not. Part of the page of `grmoe.studies.gates`.

The energy of a token in a subspace is that of its negative. A linear term in the gate tells the two apart. With 32
experts the penalty on overlaps reads a sample of the pairs of experts; here it reads all of them too.
"""

from __future__ import annotations

from grmoe.runs.config_groups import RoutingConfig
from grmoe.studies.gate_parts import Models, parts_table
from grmoe.studies.judging import below, in_doubt
from grmoe.studies.many import Family
from grmoe.studies.models.recipes import BUDGETS, GATES, SOFTMAX_BUDGET, Recipe, on_fine
from grmoe.studies.models.store import TRAINING
from grmoe.studies.models.summary import VALIDATION, difference, mean_of, show_mean
from grmoe.studies.page import OWN, Claim
from grmoe.tables import Table

GRMOE, SOFTMAX = (GATES["fine"][name] for name in ("grmoe", "softmax-bias"))
# The same with random budgets, as the study of budgets has them.
ELASTIC, ELASTIC_SOFTMAX = on_fine(BUDGETS[0], "grmoe"), on_fine(SOFTMAX_BUDGET, "softmax-bias")
_LINEAR, _PAIRS = "model.router_options.linear=true", "routing.overlap_pairs=all"
_FLAT = "model.router_kappa=1"
LINEAR = GRMOE.plus("grmoe-linear", "GrMoE, linear term", _LINEAR)
PAIRS = GRMOE.plus("grmoe-pairs", "GrMoE, all pairs", _PAIRS)
BOTH = GRMOE.plus("grmoe-linear-pairs", "GrMoE, linear term and all pairs", _LINEAR, _PAIRS)
# Softmax and vMF have flatter gates here. Is that why they are ahead? κ at the start makes this gate flatter or
# sharper, with everything else equal. If flatness is the reason, loss must rise from κ = 1 over 2 (`BOTH`) to 4.
FLATTER = GRMOE.plus("grmoe-linear-pairs-kappa-1", f"{BOTH.label}, κ starts at 1", _LINEAR, _PAIRS, _FLAT)
FLAT = GRMOE.plus("grmoe-kappa-1", "GrMoE, κ starts at 1", _FLAT)
SHARPER = GRMOE.plus(
    "grmoe-linear-pairs-kappa-4", f"{BOTH.label}, κ starts at 4", _LINEAR, _PAIRS, "model.router_kappa=4"
)
# The penalty is a sum over pairs: 992 here and 56 with eight experts. This weight makes the sum as heavy as there.
LIGHTER = GRMOE.plus(
    "grmoe-linear-pairs-light", f"{BOTH.label}, a light penalty", _LINEAR, _PAIRS,
    f"routing.overlap_weight={RoutingConfig().overlap_weight * 56 / 992:.2g}",
)  # fmt: skip
ELASTIC_BOTH = ELASTIC.plus(
    "token-mass-linear-pairs", "GrMoE, random budgets, linear term and all pairs", _LINEAR, _PAIRS
)

# Trained with eight experts per token, the flat gate is far worse with one. Random budgets could repair that.
ELASTIC_FLAT = ELASTIC.plus("token-mass-kappa-1", "GrMoE, random budgets, κ starts at 1", _FLAT)
ELASTIC_FLATTER = ELASTIC.plus(
    "token-mass-linear-pairs-kappa-1", f"{ELASTIC_BOTH.label}, κ starts at 1", _LINEAR, _PAIRS, _FLAT
)

PARTS, SEEDS = (LINEAR, BOTH, FLATTER, ELASTIC, ELASTIC_SOFTMAX, ELASTIC_BOTH, ELASTIC_FLATTER), 5
TRIED, TRIED_SEEDS = (PAIRS, FLAT, SHARPER, LIGHTER, ELASTIC_FLAT), 3
PLAIN = (GRMOE, SOFTMAX, LINEAR, PAIRS, FLAT, BOTH, FLATTER, SHARPER, LIGHTER)
RANDOM = {
    "GrMoE, random budgets": ELASTIC,
    "Softmax + bias, random budgets": ELASTIC_SOFTMAX,
    **{recipe.label: recipe for recipe in (ELASTIC_BOTH, ELASTIC_FLAT, ELASTIC_FLATTER)},
}
ROWS = (*PLAIN, *RANDOM.values())
_NAMES = {recipe.name: label for label, recipe in RANDOM.items()}  # as the table calls them
COUNTS = (8, 4, 2, 1)  # experts per token


def claims(models: Models) -> list[Claim]:
    both = "With narrow experts a linear term and all pairs in the penalty"
    random = "make GrMoE with random budgets better"
    flat = "With narrow experts a flatter gate (κ from 1, not from 2)"
    return [
        _below(models, BOTH, SOFTMAX, f"{both} bring GrMoE below softmax"),
        _below(models, BOTH, GRMOE, f"{both} make GrMoE better"),
        _below(models, ELASTIC_BOTH, ELASTIC, f"{both} {random}"),
        _below(models, FLATTER, BOTH, f"{flat} is better"),
        _below(models, FLAT, GRMOE, f"{flat} and nothing else is better"),
        _below(models, BOTH, SHARPER, "With narrow experts a sharper gate (κ from 4, not from 2) is worse"),
        _below(models, ELASTIC_FLATTER, ELASTIC, f"{both} {random} if κ starts at 1"),
    ]


def _below(models: Models, recipe: Recipe, other: Recipe, text: str) -> Claim:
    gap = difference(models[recipe.name], models[other.name])
    ours, theirs = (_NAMES.get(each.name, each.label) for each in (recipe, other))
    why = f"Loss of “{ours}” minus that of “{theirs}”, by seed. {in_doubt(gap)}"
    return Claim(OWN, text, show_mean(gap, 4, "+"), below(gap), why)


def family(models: Models) -> Family:
    """Every change of GrMoE that was tried, minus GrMoE, with full and with random budgets."""
    pairs = [(recipe, GRMOE) for recipe in PLAIN if recipe not in (GRMOE, SOFTMAX)]
    pairs += [(recipe, ELASTIC) for recipe in RANDOM.values() if recipe not in (ELASTIC, ELASTIC_SOFTMAX)]
    return {
        recipe.label.removeprefix("GrMoE, "): difference(models[recipe.name], models[other.name])
        for recipe, other in pairs
    }


def tables(models: Models) -> list[Table]:
    title = "eight of 32 narrow experts per token"
    return [parts_table(f"Parts of the gate, {title}", models, PLAIN), _by_budget(models)]


def _by_budget(models: Models) -> Table:
    """Loss at each number of experts per token, whatever the model was trained with; load at the full budget."""
    table = Table(
        "32 narrow experts: loss by experts per token, with full and with random budgets in training",
        [
            "gate",
            "seeds",
            *(f"top-{count}" for count in COUNTS),
            f"load CV at top-{COUNTS[0]}",
            "load CV on training text",
        ],
    )
    for label, recipe in {**{recipe.label: recipe for recipe in PLAIN}, **RANDOM}.items():
        runs = models[recipe.name]
        losses = (mean_of(runs, lambda row: row.loss, setting=f"top-{count}") for count in COUNTS)
        loads = (
            mean_of(runs, lambda row: row.load_cv, t, f"top-{COUNTS[0]}") for t in (VALIDATION, TRAINING)
        )
        table.add(
            label,
            str(len(runs)),
            *(show_mean(loss, 4) for loss in losses),
            *(show_mean(cv, 3) for cv in loads),
        )
    return table
