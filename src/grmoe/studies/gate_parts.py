"""Which part of GrMoE makes the difference: one part at a time, beside the gates that the study of gates compares.

With two of eight experts per token: the subspace, the flatter gate, the weights, what evens out the load. Part of the
page of `grmoe.studies.gates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grmoe.model import preset
from grmoe.studies.judging import below, changed, in_doubt
from grmoe.studies.many import Family
from grmoe.studies.models.recipes import GATES, Recipe, best_rate
from grmoe.studies.models.store import Run
from grmoe.studies.models.summary import Mean, difference, mean, mean_of, rows_by_seed, show_mean
from grmoe.studies.page import OWN, Claim
from grmoe.tables import Table

Models = Mapping[str, Sequence[Run]]

PART_SEEDS = 3
FLAT_SEEDS = 2  # of softmax with an entropy term: far worse than any difference between gates
GRMOE, SOFTMAX, Z_LOSS, VMF = (GATES["two"][name] for name in ("grmoe", "softmax-bias", "softmax-z", "vmf"))
# Targets of the entropy term, as shares of log N.
TARGETS = (0.5, 0.65, 0.8)
NEAR = 0.15  # nats between two entropies that count as equal
_RENORMALISED = "model.norm_topk_prob=true"


def _flat(target: float) -> Recipe:
    return SOFTMAX.plus(
        f"softmax-entropy-{target:g}", f"{SOFTMAX.label}, entropy near {target:g}·log N",
        "routing.entropy_weight=0.1", f"routing.entropy_target={target:g}",
    )  # fmt: skip


def _rank(share: int) -> Recipe:
    rank = (preset("small").router_rank or 0) // share
    return GRMOE.plus(f"grmoe-rank-{rank}", f"GrMoE, rank {rank}", f"model.router_rank={rank}")


FLAT = tuple(_flat(target) for target in TARGETS)
SOFTMAX_RENORMALISED = SOFTMAX.plus("softmax-renormalised", f"{SOFTMAX.label}, renormalised", _RENORMALISED)
GRMOE_RENORMALISED = GRMOE.plus("grmoe-renormalised", "GrMoE, renormalised", _RENORMALISED)
HALF, QUARTER = _rank(2), _rank(4)
KAPPA = GRMOE.plus(
    "grmoe-kappa-5x", "GrMoE, κ at five times the rate of the weights",
    f"optim.kappa_lr={5 * best_rate('two', 'grmoe'):g}",
)  # fmt: skip
LINEAR = GRMOE.plus("grmoe-linear", "GrMoE, linear term", "model.router_options.linear=true")
# Three ways to even out the load: the prior, the leading term, both. Switch's loss is the softmax gate's third way.
_LED = "routing.leading_weight=0.01"
BOTH = GRMOE.plus("grmoe-led", "GrMoE, prior and leading term", _LED)
LED_ALONE = GRMOE.plus(
    "grmoe-uniform-led", "GrMoE, leading term alone", "model.router_options.prior=uniform", _LED
)
VMF_LED = VMF.plus("vmf-led", f"{VMF.label} and leading term", _LED)
TO_ZERO = GRMOE.plus("grmoe-floor-0", "GrMoE, rates fall to zero", "optim.floor=0")
# Softmax gates by how flat they are. The one with the entropy nearest to GrMoE's is compared with it.
BY_ENTROPY = (SOFTMAX, Z_LOSS, *FLAT)
PARTS = (
    SOFTMAX_RENORMALISED,
    GRMOE_RENORMALISED,
    HALF,
    QUARTER,
    KAPPA,
    LINEAR,
    BOTH,
    LED_ALONE,
    VMF_LED,
    TO_ZERO,
)
ROWS = (GRMOE, SOFTMAX, Z_LOSS, VMF, *FLAT, *PARTS)


def entropy(runs: Sequence[Run]) -> Mean | None:
    """Of the gate on validation text, nats."""
    return mean(row.entropy for row in rows_by_seed(runs).values() if row.entropy is not None)


def matched(parts: Models) -> Recipe | None:
    """The softmax recipe that is nearest to GrMoE in entropy; None if it is not near, or not all are measured."""
    wanted = entropy(parts[GRMOE.name])
    found = {recipe: entropy(parts[recipe.name]) for recipe in BY_ENTROPY}
    apart = {r: abs(h.value - wanted.value) for r, h in found.items() if h is not None and wanted is not None}
    if len(apart) < len(BY_ENTROPY):
        return None
    best = min(apart, key=lambda recipe: apart[recipe])
    return best if apart[best] <= NEAR else None


def claims(parts: Models) -> list[Claim]:
    grmoe, same = parts[GRMOE.name], matched(parts)
    flat = None if same is None else difference(grmoe, parts[same.name])
    sum_to_one = difference(parts[GRMOE_RENORMALISED.name], parts[SOFTMAX_RENORMALISED.name])
    rank = difference(grmoe, parts[QUARTER.name])
    if same is None:
        which = f"No softmax model with a gate entropy within {NEAR:g} nats of GrMoE's yet."
    else:
        which = (
            f"Loss minus that of {same.label}, the softmax gate nearest in entropy: "
            f"{show_mean(entropy(parts[same.name]), 2)} nats; GrMoE has {show_mean(entropy(grmoe), 2)}. "
            f"{in_doubt(flat)}"
        )
    return [
        Claim(
            OWN,
            "The gain is more than a flatter gate: GrMoE is below softmax at its own gate entropy",
            show_mean(flat, 4, "+"),
            below(flat),
            which,
        ),
        Claim(
            OWN,
            "The gain does not depend on the form of the weights: GrMoE is below softmax with renormalised weights too",
            show_mean(sum_to_one, 4, "+"),
            below(sum_to_one),
            f"Loss of GrMoE minus that of softmax, both renormalised. {in_doubt(sum_to_one)}",
        ),
        Claim(
            "Table 5",
            "The subspace matters: GrMoE is below GrMoE at a quarter of its rank",
            show_mean(rank, 4, "+"),
            changed(below(rank)),
            f"Loss minus that of {QUARTER.label}, by seed. {in_doubt(rank)} With our prior, scaling and hinge.",
        ),
    ]


def family(parts: Models) -> Family:
    """Every change of GrMoE that was tried, minus GrMoE."""
    return {
        recipe.label: difference(parts[recipe.name], parts[GRMOE.name])
        for recipe in PARTS
        if recipe not in (SOFTMAX_RENORMALISED, VMF_LED)
    }


def tables(parts: Models) -> list[Table]:
    return [
        parts_table("Parts of the gate, two of eight experts per token", parts, ROWS),
        _gains(parts),
    ]


def parts_table(title: str, parts: Models, recipes: Sequence[Recipe]) -> Table:
    """The first two recipes are GrMoE and softmax as they are: the others are compared with them."""
    table = Table(
        title, ["gate", "seeds", "loss", "gate entropy", "minus GrMoE", f"minus {SOFTMAX.label}", "load CV"]
    )
    for recipe in recipes:
        runs = parts[recipe.name]
        gaps = (None if recipe is other else difference(runs, parts[other.name]) for other in recipes[:2])
        table.add(
            recipe.label,
            str(len(runs)),
            show_mean(mean_of(runs, lambda row: row.loss), 4),
            show_mean(entropy(runs), 2),
            *(show_mean(gap, 4, "+") for gap in gaps),
            show_mean(mean_of(runs, lambda row: row.load_cv), 3),
        )
    return table


def _gains(parts: Models) -> Table:
    table = Table(
        "Which part makes the difference", ["part", "loss of", "minus loss of", "difference"], left=3
    )
    same = matched(parts)
    steps: list[tuple[str, Recipe | None, Recipe | None]] = [
        ("all of it", GRMOE, SOFTMAX),
        ("the flatter gate", same, SOFTMAX),
        ("what a flatter gate leaves", GRMOE, same),
        ("directions in place of rows", VMF, SOFTMAX),
        ("subspaces in place of directions", GRMOE, VMF),
        ("the second half of the rank", GRMOE, HALF),
        ("the last three quarters of the rank", GRMOE, QUARTER),
        ("the rate of κ", GRMOE, KAPPA),
        ("no linear term", GRMOE, LINEAR),
        ("the prior alone in place of prior and leading term", GRMOE, BOTH),
        ("the prior in place of the leading term", GRMOE, LED_ALONE),
        ("rates that end at a tenth, not at zero", GRMOE, TO_ZERO),
        ("weights as they are, GrMoE", GRMOE, GRMOE_RENORMALISED),
        ("weights as they are, softmax", SOFTMAX, SOFTMAX_RENORMALISED),
        ("all of it, with renormalised weights", GRMOE_RENORMALISED, SOFTMAX_RENORMALISED),
    ]
    for part, one, other in steps:
        if one is not None and one is other:
            table.add(part, one.label, other.label, "none: it has the entropy of GrMoE as it is")
            continue
        gap = None if one is None or other is None else difference(parts[one.name], parts[other.name])
        labels = [r.label if r is not None else "softmax at the entropy of GrMoE" for r in (one, other)]
        table.add(part, *labels, show_mean(gap, 4, "+"))
    return table
