"""What the paper leaves open: an entropy term, α learned or annealed, Grassmannian Soft MoE, mixture of depths, heads
chosen by the gate, each beside its plain counterpart; and models of the plain recipe, pruned after their training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grmoe.studies import pruning
from grmoe.studies.judging import any_of, at_most, below, changed
from grmoe.studies.measured import measurements, read_measured
from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.recipes import RECIPES, Recipe
from grmoe.studies.models.store import Run, Store
from grmoe.studies.models.summary import Mean, difference, model_table, show_mean
from grmoe.studies.page import Claim, Page, Verdict
from grmoe.studies.pruning import PRUNED, PRUNING, read_pruning
from grmoe.studies.queue import Needs
from grmoe.studies.scaling import BASE
from grmoe.studies.study import Place, State

SEEDS = 3
GRMOE, ONE, SOFT = pruning.GRMOE, RECIPES["grmoe-one"], RECIPES["soft-moe"]
CONCLUSION, LIMITATIONS = "Conclusion", "Limitations"
NEAR = pruning.NEAR  # nats per token that "as good as" allows
OURS = pruning.OURS


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


class Future(ModelStudy):
    """Trains the models, and prunes those of the plain recipe."""

    def state(self, results: Path) -> State:
        before, pruned = super().state(results), read_measured(results, PRUNING, PRUNED)[GRMOE.name]
        return State(before.done + len(pruned), before.total + PRUNED.seeds)

    def needs(self, place: Place) -> Needs:
        return replace(super().needs(place), measurements=measurements(PRUNING, PRUNED, place))


def write(store: Store) -> Page:
    models = runs_of(store, BASE, *ALL)
    pruned = read_pruning(store.folder.parent)
    tables = []
    for part in PARTS.values():
        plain = models[part.plain.name]
        lines = [(f"{part.plain.label} (plain)", plain, None)]
        if part is PARTS["depth"]:
            lines.append((ONE.label, models[ONE.name], None))
        lines += [(recipe.label, models[recipe.name], None) for recipe in part.recipes]
        tables.append(model_table(part.title, lines, (plain, None)))
    return Page(
        claims=[*_claims(models), *pruning.claims(*pruned)],
        tables=[*tables, *pruning.tables(*pruned)],
        notes=[
            "`small`, 1250 steps of 32 × 512 tokens, three seeds, full budgets. Differences are loss minus that of the "
            "plain recipe, by seed. What each part computes: docs/explanation/beyond.md.",
            "The paper suggests these directions and gives no numbers. A claim here is our reading of its sentence. Of "
            "several variants of one idea, one may win by chance: with an interval of 95 %, once in forty for each "
            "variant.",
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
            changed(any_of(below(gap) for gap in entropy.values())),
            f"Holds if some target and weight lower the loss. {OURS}",
        ),
        Claim(
            LIMITATIONS,
            "Optimising α in training, or raising it over time, could improve the subspaces that are learned",
            _show(alpha),
            changed(any_of(below(gap) for gap in alpha.values())),
            f"Holds if some schedule lowers the loss. {OURS}",
        ),
        Claim(
            "Appendix, Comparison with Soft MoE",
            "Soft MoE with Grassmannian affinities could have the benefits of both",
            _show(soft),
            Verdict.UNTESTABLE,
            "Both forms look at later tokens, so a lower loss would not make a better language model. Their form is "
            "our reading of the sentence.",
        ),
        Claim(
            CONCLUSION,
            "The gate could be applied to mixture of depths",
            show_mean(depth, 4, "+") if depth else "",
            changed(at_most(depth, NEAR)),
            "Loss of eight identity experts at top-2 minus that of top-1, which computes as many experts. It holds if "
            f"this is at most {NEAR:g} nats. {OURS}",
        ),
        Claim(
            CONCLUSION,
            "The gate could be applied to attention head selection",
            _show(heads),
            changed(at_most(half, NEAR)),
            f"Holds if half the heads cost at most {NEAR:g} nats. {OURS}",
        ),
    ]


STUDY = Future(
    name="future",
    title="What the paper leaves open",
    where=f"{CONCLUSION}, {LIMITATIONS}, Appendix, Comparison with Soft MoE",
    groups=(Group(BASE, ALL, SEEDS),),
    write=write,
)
