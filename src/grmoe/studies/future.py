"""What the paper leaves open: an entropy term, α learned or annealed, Grassmannian Soft MoE, mixture of depths, heads
chosen by the gate, and pruning by certificate and by Fisher information. Each beside its plain counterpart.

Models of the plain recipe are pruned after their training: results/pruning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grmoe.studies.judging import below, in_doubt, not_above
from grmoe.studies.measured import measurements, read_measured
from grmoe.studies.measuring import Kind
from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.recipes import RECIPES, Recipe
from grmoe.studies.models.store import Run, Store
from grmoe.studies.models.summary import Mean, difference, mean, model_table, show_mean
from grmoe.studies.page import Claim, Page, Verdict
from grmoe.studies.queue import Needs
from grmoe.studies.scaling import BASE
from grmoe.studies.study import Place, State
from grmoe.tables import Table
from grmoe.terminal import Progress

SEEDS = 3
GRMOE, ONE, SOFT = RECIPES["grmoe"], RECIPES["grmoe-one"], RECIPES["soft-moe"]
CONCLUSION, LIMITATIONS = "Conclusion", "Limitations"
EXPERTS = 6  # of 8, after pruning
NEAR = 0.01  # nats per token that "as good as" allows


def _soft(name: str, label: str, *settings: str) -> Recipe:
    """Soft MoE with subspaces, trained as Soft MoE is."""
    others = tuple(s for s in SOFT.settings if not s.startswith("model.router="))
    return Recipe(name, label, (*others, "model.router=grassmann_soft_moe", *settings))


def _entropy(weight: float, target: float) -> Recipe:
    return GRMOE.plus(
        f"entropy-{target:g}-weight-{weight:g}", f"target {target:g}·log N, weight {weight:g}",
        f"routing.entropy_weight={weight:g}", f"routing.entropy_target={target:g}",
    )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Variants beside their plain counterpart."""

    title: str
    plain: Recipe
    recipes: tuple[Recipe, ...]


PARTS = {
    "entropy": Part(
        "An entropy term with a target", GRMOE,
        (*(_entropy(0.01, target) for target in (0.25, 0.5, 0.75)), _entropy(0.1, 0.5)),
    ),
    "alpha": Part(
        "α learned, or rising over the training", GRMOE,
        (
            GRMOE.plus("alpha-learned", "learned, one per layer", "alpha.schedule=learned"),
            *(
                GRMOE.plus(f"alpha-from-{low:g}", f"from {low:g} to 1", "alpha.schedule=anneal", f"alpha.low={low:g}")
                for low in (0.25, 0.5)
            ),
        ),
    ),
    "soft": Part(
        "Grassmannian Soft MoE beside Soft MoE", SOFT,
        (
            _soft("grassmann-soft-moe", "subspaces of rank 1"),
            _soft("grassmann-soft-moe-rank-4", "subspaces of rank 4", "model.router_options.slot_rank=4"),
        ),
    ),
    "depth": Part(
        "Mixture of depths: identity experts beside the eight others", GRMOE,
        tuple(
            GRMOE.plus(f"identity-{count}", f"{count} identity experts", f"model.identity_experts={count}")
            for count in (2, 4, 8)
        ),
    ),
    "heads": Part(
        "Attention heads chosen per token, of eight", GRMOE,
        tuple(
            GRMOE.plus(f"heads-{count}", f"{count} heads", f"model.attention_heads_per_token={count}")
            for count in (2, 4, 8)
        ),
    ),
}  # fmt: skip
# With eight identity experts beside eight others, a balanced gate computes one of two choices.
HALF = PARTS["depth"].recipes[-1]
ALL = (*dict.fromkeys(r for part in PARTS.values() for r in (part.plain, *part.recipes)), ONE)

Models = Mapping[str, Sequence[Run]]


# -- pruning ---------------------------------------------------------------------------------------------------


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
PRUNED = Group(BASE, (GRMOE,), SEEDS)


class Future(ModelStudy):
    """Trains the models, and prunes those of the plain recipe."""

    def state(self, results: Path) -> State:
        before, pruned = super().state(results), read_measured(results, PRUNING, PRUNED)[GRMOE.name]
        return State(before.done + len(pruned), before.total + SEEDS)

    def needs(self, place: Place) -> Needs:
        return replace(super().needs(place), measurements=measurements(PRUNING, PRUNED, place))


# -- the page --------------------------------------------------------------------------------------------------


def write(store: Store) -> Page:
    models = runs_of(store, BASE, *ALL)
    rows, bounds = read_pruning(store.folder.parent)
    tables = []
    for part in PARTS.values():
        plain = models[part.plain.name]
        lines = [(f"{part.plain.label} (plain)", plain, None)]
        if part is PARTS["depth"]:
            lines.append((ONE.label, models[ONE.name], None))
        lines += [(recipe.label, models[recipe.name], None) for recipe in part.recipes]
        tables.append(model_table(part.title, lines, (plain, None)))
    return Page(
        claims=[*_claims(models), *_pruning_claims(rows)],
        tables=[*tables, *([_pruning_table(rows), _bound_table(bounds)] if rows else [])],
        notes=[
            "`small`, 1250 steps of 32 × 512 tokens, three seeds, full budgets. Differences are loss minus that of the "
            "plain recipe, by seed. What each part computes: docs/explanation/beyond.md.",
            "The paper suggests these directions and gives no numbers. A claim here is our reading of its sentence. Of "
            "several variants of one idea, one may win by chance: with an interval of 95 %, once in forty.",
            "Soft MoE and its Grassmannian form look at later tokens, so their losses do not compare with those of the "
            "causal models. Heads that are not chosen are computed all the same.",
        ],
    )


def _gaps(models: Models, part: Part) -> dict[str, Mean | None]:
    """Loss of each variant minus that of the plain recipe."""
    return {r.label: difference(models[r.name], models[part.plain.name]) for r in part.recipes}


def _show(gaps: Mapping[str, Mean | None]) -> str:
    if all(gap is None for gap in gaps.values()):
        return ""
    return "; ".join(f"{label}: {show_mean(gap, 4, '+')}" for label, gap in gaps.items())


def any_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Of "it can be done": holds if one variant does it, fails if all were measured and none does."""
    found = list(verdicts)
    if Verdict.HOLDS in found:
        return Verdict.HOLDS
    return Verdict.OPEN if Verdict.OPEN in found or not found else Verdict.FAILS


def _claims(models: Models) -> list[Claim]:
    entropy, alpha, soft = (_gaps(models, PARTS[name]) for name in ("entropy", "alpha", "soft"))
    heads = _gaps(models, PARTS["heads"])
    depth = difference(models[HALF.name], models[ONE.name])
    half = heads["4 heads"]
    return [
        Claim(
            CONCLUSION,
            "Entropy-aware objectives could improve the subspaces that are learned",
            _show(entropy),
            any_of(below(gap) for gap in entropy.values()),
            "Holds if some target and weight lower the loss.",
        ),
        Claim(
            LIMITATIONS,
            "Optimising α in training, or raising it over time, could improve the subspaces that are learned",
            _show(alpha),
            any_of(below(gap) for gap in alpha.values()),
            "Holds if some schedule lowers the loss.",
        ),
        Claim(
            "Appendix, Comparison with Soft MoE",
            "Soft MoE with Grassmannian affinities could have the benefits of both",
            _show(soft),
            any_of(below(gap) for gap in soft.values()),
            "Holds if subspaces of some rank lower the loss of Soft MoE.",
        ),
        Claim(
            CONCLUSION,
            "The gate could be applied to mixture of depths",
            show_mean(depth, 4, "+") if depth else "",
            below(depth),
            "Loss of eight identity experts at top-2 minus that of top-1, which computes as many experts. "
            f"{in_doubt(depth)}",
        ),
        Claim(
            CONCLUSION,
            "The gate could be applied to attention head selection",
            _show(heads),
            not_above(half, NEAR),
            f"Holds if half the heads are within {NEAR:g} nats of all of them. {in_doubt(half)}",
        ),
    ]


def _of_method(rows: Sequence[Pruned], method: str) -> dict[int, Pruned]:
    return {row.seed: row for row in rows if row.method == method}


def _pruning_gap(rows: Sequence[Pruned], method: str, other: str) -> Mean | None:
    mine, theirs = _of_method(rows, method), _of_method(rows, other)
    return mean(row.loss - theirs[seed].loss for seed, row in mine.items() if seed in theirs)


def _pruning_claims(rows: Sequence[Pruned]) -> list[Claim]:
    found = []
    for method, text in (
        ("certificate drop", "Certificates guide pruning"),
        ("fisher drop", "Fisher information guides pruning"),
    ):
        gap = _pruning_gap(rows, method, "load drop")
        found.append(
            Claim(
                CONCLUSION,
                f"{text} that preserves quality",
                show_mean(gap, 4, "+") if gap else "",
                below(gap),
                f"Loss with {EXPERTS} of 8 experts minus that of dropping the least loaded ones. {in_doubt(gap)}",
            )
        )
    overlap = _pruning_gap(rows, "overlap merge", "load drop")
    found.append(
        Claim(
            CONCLUSION,
            "Subspace overlap identifies redundant experts, which can be merged without retraining",
            show_mean(overlap, 4, "+") if overlap else "",
            below(overlap),
            f"Loss with {EXPERTS} of 8 experts minus that of dropping the least loaded ones. {in_doubt(overlap)}",
        )
    )
    return found


def _pruning_table(rows: Sequence[Pruned]) -> Table:
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
            show_mean(mean(row.loss - row.trained for row in own), 4, "+"),
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


STUDY = Future(
    name="future",
    title="What the paper leaves open",
    where=f"{CONCLUSION}, {LIMITATIONS}, Appendix, Comparison with Soft MoE",
    groups=(Group(BASE, ALL, SEEDS),),
    write=write,
)
