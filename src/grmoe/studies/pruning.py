"""Trained models with experts left out, by each method of `grmoe prune`: what it costs, and what a certificate says.

Results: results/pruning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grmoe.studies.judging import MIN_SEEDS, all_of, any_of, at_most, below, changed, in_doubt
from grmoe.studies.measured import read_measured
from grmoe.studies.measuring import Kind
from grmoe.studies.model_study import Group
from grmoe.studies.models.recipes import RECIPES
from grmoe.studies.models.summary import Mean, mean, show_mean
from grmoe.studies.page import OWN, Claim, Verdict
from grmoe.studies.scaling import BASE
from grmoe.studies.study import Place
from grmoe.tables import Table
from grmoe.terminal import Progress

WHERE = "Conclusion"
GRMOE = RECIPES["grmoe"]
EXPERTS = 6  # of 8, after pruning
CRITERIA = ("fisher drop", "overlap drop", "overlap merge")  # those that look at subspaces
NEAR = 0.01  # nats per token that "preserves quality" allows
OURS = "With our prior, scaling and hinge."
PRUNED = Group(BASE, (GRMOE,), 3)


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """One method of `grmoe prune` on one model."""

    seed: int
    method: str
    experts: int
    loss: float
    """Nats per token on validation text."""
    trained: float
    """Loss before pruning."""
    divergence: float
    """From the trained predictions, nats per token."""
    beaten: int
    """Random drops of ten that have a higher loss."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What certificate drop guarantees in one layer of one model; means over tokens."""

    seed: int
    block: int
    bound: float
    error: float
    output: float


def read_pruning(results: Path) -> tuple[list[Pruned], list[Bound]]:
    """Empty lists if nothing was pruned."""
    found = read_measured(results, PRUNING, PRUNED)[GRMOE.name]
    rows = [Pruned(seed=one.seed, **row) for one in found for row in one.body["rows"]]
    return rows, [Bound(seed=one.seed, **bound) for one in found for bound in one.body["bounds"]]


def prune_run(folder: Path, place: Place, progress: Progress) -> Mapping[str, Any]:
    """All methods on one trained run."""
    from grmoe.prune import Plan, run

    body = run(Plan(model=folder, experts=EXPERTS, tokens=place.tokens, checkpoint="last"), progress).body
    rows = [
        {
            "method": o.method, "experts": o.experts, "loss": o.texts[0].loss, "trained": body.texts[0].loss,
            "divergence": o.divergence or 0.0, "beaten": body.beaten(o, "random drop", 0),
        }
        for o in body.ranked
    ]  # fmt: skip
    return {"rows": rows, "bounds": [asdict(c) for c in body.certificates]}


PRUNING = Kind("pruning", prune_run)


def claims(rows: Sequence[Pruned], bounds: Sequence[Bound]) -> list[Claim]:
    return [
        _redundant(rows),
        _preserves(rows),
        _guarantees(bounds),
        _chooses(rows, "certificate drop", "Certificates choose"),
        _chooses(rows, "fisher drop", "Fisher information chooses"),
    ]


def _of_method(rows: Sequence[Pruned], method: str) -> dict[int, Pruned]:
    return {row.seed: row for row in rows if row.method == method}


def _gap(rows: Sequence[Pruned], method: str) -> Mean | None:
    """Loss minus that of dropping the least loaded experts."""
    mine, theirs = _of_method(rows, method), _of_method(rows, "load drop")
    return mean(row.loss - theirs[seed].loss for seed, row in mine.items() if seed in theirs)


def _cost(rows: Sequence[Pruned], method: str) -> Mean | None:
    """Loss minus that before pruning."""
    return mean(row.loss - row.trained for row in _of_method(rows, method).values())


def _redundant(rows: Sequence[Pruned]) -> Claim:
    gap, cost = _gap(rows, "overlap merge"), _cost(rows, "overlap merge")
    return Claim(
        WHERE,
        "Subspace overlap identifies redundant experts, which can be merged without retraining",
        f"{show_mean(gap, 4, '+')}; to the trained model {show_mean(cost, 4, '+')}" if gap else "",
        changed(all_of([at_most(cost, NEAR), below(gap)])),
        f"Loss with {EXPERTS} of 8 experts minus that of dropping the least loaded ones, by seed. {in_doubt(gap)} It "
        "holds if merging is better than that, and costs at most "
        f"{NEAR:g} nats: what was redundant is not missed. {OURS}",
    )


def _preserves(rows: Sequence[Pruned]) -> Claim:
    costs = {method: cost for method in CRITERIA if (cost := _cost(rows, method)) is not None}
    return Claim(
        WHERE,
        "Subspace-aware criteria, Fisher information among them, can preserve quality in pruning",
        "; ".join(
            f"{method}: {show_mean(cost, 4, '+')} ({round(100 * math.expm1(cost.value))} % of perplexity)"
            for method, cost in costs.items()
        ),
        changed(any_of(at_most(costs.get(method), NEAR) for method in CRITERIA)),
        f"Loss with {EXPERTS} of 8 experts minus that of the trained model, by seed. It holds if one is at most "
        f"{NEAR:g} nats. The paper says it of other work, at high compression. {OURS}",
    )


def _guarantees(bounds: Sequence[Bound]) -> Claim:
    ratios = [bound.bound / bound.error for bound in bounds if bound.error]
    sizes = [bound.bound / bound.output for bound in bounds if bound.output]
    verdict = Verdict.OPEN
    if len({bound.seed for bound in bounds}) >= MIN_SEEDS:
        kept = all(bound.error <= bound.bound < bound.output for bound in bounds)
        verdict = Verdict.HOLDS if kept else Verdict.FAILS
    return Claim(
        WHERE,
        "Certificates guarantee what pruning costs",
        f"the bound is {min(ratios):.0f} to {max(ratios):.0f} times the error, and {min(sizes):.0f} to "
        f"{max(sizes):.0f} times the output"
        if ratios and sizes
        else "",
        changed(verdict),
        "The certified change of a layer's output must not be below the measured one. It must also be below the output "
        "itself: dropping the whole layer changes no more. Means over tokens; every layer of every model decides. The "
        "paper says it of other work; the certificate is ours, of one layer at a time.",
    )


def _chooses(rows: Sequence[Pruned], method: str, who: str) -> Claim:
    gap = _gap(rows, method)
    return Claim(
        OWN,
        f"{who} better experts to drop than the load does",
        show_mean(gap, 4, "+") if gap else "",
        below(gap),
        f"Loss with {EXPERTS} of 8 experts minus that of dropping the least loaded ones, by seed. {in_doubt(gap)}",
    )


def tables(rows: Sequence[Pruned], bounds: Sequence[Bound]) -> list[Table]:
    return [_method_table(rows), _bound_table(bounds)] if rows else []


def _method_table(rows: Sequence[Pruned]) -> Table:
    table = Table(
        f"Pruned from 8 to {EXPERTS} experts in every layer",
        ["method", "seeds", "loss minus trained", "KL from trained", "random drops beaten"],
    )
    for method in dict.fromkeys(row.method for row in sorted(rows, key=lambda row: row.method)):
        own = _of_method(rows, method).values()
        beaten = f"{sum(row.beaten for row in own)} of {10 * len(own)}"
        table.add(
            method,
            str(len(own)),
            show_mean(_cost(rows, method), 4, "+"),
            show_mean(mean(row.divergence for row in own), 4),
            beaten,
        )
    return table


def _bound_table(bounds: Sequence[Bound]) -> Table:
    """The certified bound beside what was measured, by layer."""
    table = Table(
        "What certificate drop guarantees: ‖y − ŷ‖ of a layer, means over tokens and seeds",
        ["block", "seeds", "certified", "measured", "‖y‖"],
    )
    for block in sorted({bound.block for bound in bounds}):
        own = [bound for bound in bounds if bound.block == block]
        numbers = (mean(getattr(b, name) for b in own) for name in ("bound", "error", "output"))
        table.add(str(block), str(len(own)), *(show_mean(number, 3) for number in numbers))
    return table
