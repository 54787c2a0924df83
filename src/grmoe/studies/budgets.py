"""One model for every budget: random budgets beside models that were trained for one number of experts per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grmoe.studies import halving
from grmoe.studies.judging import (
    MIN_SEEDS,
    about_at_most,
    all_of,
    at_most,
    changed,
    in_doubt,
    never,
    not_worse,
    show_count,
)
from grmoe.studies.language_model import BASE
from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.recipes import (
    BUDGETS,
    GATES,
    RECIPES,
    SOFTMAX_BUDGET,
    Recipe,
    base_of,
    on_fine,
)
from grmoe.studies.models.store import Run, Store
from grmoe.studies.models.summary import (
    VALIDATION,
    difference,
    mean,
    mean_of,
    model_table,
    rows_by_seed,
    short_name,
    show_mean,
    texts_of,
)
from grmoe.studies.page import OWN, Claim, Page, Verdict
from grmoe.tables import Table

WHERE = "Section 6.4.2"
SEEDS, RECIPE_SEEDS = 5, 3  # of specialists and the default recipe, and of the other recipes
FINE = base_of("fine", 2500)  # 32 narrow experts, eight per token
MARGIN, FINE_MARGIN = 0.005, 0.010  # nats to the specialist
MOST_CV = 0.10
LITTLE = 0.011  # nats, what the paper's α = 2 costs
ELASTIC = "With random budgets in training, which the paper does not have."

_GRMOE, _SOFTMAX = RECIPES["grmoe"], RECIPES["softmax-bias"]
_DEFAULT, *_OTHERS = BUDGETS


@dataclass(frozen=True)
class Family:
    """A gate: its model with random budgets, and its specialists by experts per token, the full budget first."""

    label: str
    elastic: Recipe
    specialists: dict[int, Recipe]

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        return (*self.specialists.values(), self.elastic)


def _fine(label: str, method: str, elastic: Recipe, prefix: str) -> Family:
    full = GATES["fine"][method]
    few = {
        k: full.plus(f"{prefix}-{k}", f"{full.label}, top-{k}", f"model.num_experts_per_tok={k}")
        for k in (4, 2, 1)
    }
    return Family(label, on_fine(elastic, method), {8: full, **few})


COARSE = (
    Family("GrMoE", _DEFAULT, {2: _GRMOE, 1: RECIPES["grmoe-one"]}),
    Family("softmax", SOFTMAX_BUDGET, {2: _SOFTMAX, 1: RECIPES["softmax-one"]}),
)
NARROW = (
    _fine("GrMoE", "grmoe", _DEFAULT, "fine"),
    _fine("softmax", "softmax-bias", SOFTMAX_BUDGET, "softmax-fine"),
)


def _recipes_of(families: Sequence[Family]) -> tuple[Recipe, ...]:
    return tuple(recipe for family in families for recipe in family.recipes)


Models = Mapping[str, Sequence[Run]]


def write(store: Store) -> Page:
    models = runs_of(store, BASE, *_recipes_of(COARSE), *_OTHERS)
    fine = runs_of(store, FINE, *_recipes_of(NARROW))
    texts = texts_of(run for runs in models.values() for run in runs) or [VALIDATION]
    return Page(
        claims=[
            *_one_for_all(models, COARSE, WHERE, "two of eight experts", MARGIN),
            *_one_for_all(fine, NARROW, OWN, "eight of 32 experts", FINE_MARGIN),
            _load(models),
            _other_text(models, texts),
        ],
        tables=[
            *(_pairs(models, text) for text in texts),
            _recipes(models),
            _half_by_seed(models, texts),
            _loads(models),
            _beside_specialists(fine),
            _by_gate(models, fine, texts),
        ],
        notes=[
            "A model with random budgets computes, for each token, as many experts as a random share of the "
            "probability needs. A specialist was trained with one number of experts. Differences are paired by seed.",
            "Fine-grained: 32 experts of a quarter of the width, eight per token (preset `small-fine`).",
        ],
    )


def _one_for_all(
    models: Models, families: Sequence[Family], where: str, full: str, margin: float
) -> list[Claim]:
    """Against each specialist within a margin, and at the full budget not worse than the plain model."""
    found = []
    for family in families:
        gaps = {
            f"top-{count}": difference(
                models[family.elastic.name],
                models[recipe.name],
                setting=f"top-{count}",
                other_setting=f"top-{count}",
            )
            for count, recipe in family.specialists.items()
        }
        place = where if family.elastic is _DEFAULT else OWN
        found += [
            Claim(
                place,
                f"One model replaces models trained for one budget ({full}): {family.label} at {setting}",
                show_mean(gap, 4, "+"),
                about_at_most(gap, margin) if place == OWN else changed(about_at_most(gap, margin)),
                f"{ELASTIC} Its loss minus the specialist's: it holds if the mean is at most {margin} and the interval "
                f"excludes twice as much. {in_doubt(gap)}",
            )
            for setting, gap in gaps.items()
        ]
        whole = next(iter(gaps.values()))
        found.append(
            Claim(
                OWN,
                f"Random budgets cost nothing at the full budget ({full}): {family.label}",
                show_mean(whole, 4, "+"),
                not_worse(whole, margin),
                f"It holds if the whole interval is below {margin}, and fails if it is above zero. {in_doubt(whole)}",
            )
        )
    return found


def _load(models: Models) -> Claim:
    runs = models["token-mass"]
    cv = {s: mean_of(runs, lambda row: row.load_cv, setting=s) for s in ("top-2", "top-1")}
    # By seed: two budgets of one model are not two trials.
    of_seed: dict[int, bool] = {}
    for setting in cv:
        for seed, row in rows_by_seed(runs, setting=setting).items():
            of_seed[seed] = of_seed.get(seed, False) or row.collapsed
    lost = sum(of_seed.values()), len(of_seed)
    verdict = never(lost) if len(runs) >= MIN_SEEDS else Verdict.OPEN
    if verdict is Verdict.HOLDS:
        verdict = Verdict.HOLDS if all(m and m.value <= MOST_CV for m in cv.values()) else Verdict.FAILS
    return Claim(
        OWN,
        f"The load stays even at every budget: CV at most {MOST_CV:g}, no expert collapses",
        "; ".join(f"{s}: CV {show_mean(m, 3)}" for s, m in cv.items()) + f"; collapsed {show_count(lost)}",
        verdict,
        "On validation text, another mixture than the training text. `grmoe dial` can even it out per budget.",
    )


def _other_text(models: Models, texts: Sequence[str]) -> Claim:
    runs = models["token-mass"]
    costs = {t: difference(runs, runs, t, "top-1", "top-2") for t in texts}
    verdict = all_of(at_most(cost, LITTLE) for cost in costs.values()) if len(texts) > 1 else Verdict.OPEN
    return Claim(
        WHERE,
        "Fewer experts cost little: +1.1 % of perplexity at α = 2 (18.1 → 18.3), 1.8 effective experts in place of 3.1",
        "; ".join(
            f"{short_name(text)}: {show_mean(cost, 4, '+')}"
            for text, cost in costs.items()
            if cost is not None
        ),
        changed(verdict),
        f"{ELASTIC} Its loss with one expert minus that with two. On every text the whole interval must be at most "
        f"{LITTLE}, which is stricter than for [α itself](post-hoc.md).",
    )


def _pairs(models: Models, text: str) -> Table:
    names = ("grmoe", "token-mass", "grmoe-one", "softmax-bias", "softmax-token-mass", "softmax-one")
    lines = [
        (f"{RECIPES[name].label}: computed at {setting}", models[name], setting)
        for setting in ("top-2", "top-1")
        for name in names
        if rows_by_seed(models[name], text, setting) or not models[name]
    ]
    return model_table(
        f"Random budgets beside one budget, {short_name(text)}; difference to GrMoE at top-2",
        lines,
        (models["grmoe"], "top-2"),
        text,
        "trained",
    )


def _by_gate(models: Models, fine: Models, texts: Sequence[str]) -> Table:
    """Whether one of the two gates is better once both have learned with random budgets."""
    table = Table(
        "Random budgets: loss of GrMoE minus that of softmax, by seed",
        ["experts", "computed at", "seeds", *map(short_name, texts)],
        left=2,
    )
    for name, found, (ours, theirs) in (("eight", models, COARSE), ("32 narrow", fine, NARROW)):
        for count in ours.specialists:
            at = f"top-{count}"
            gaps = [
                difference(found[ours.elastic.name], found[theirs.elastic.name], text, at, at)
                for text in texts
            ]
            seeds = max((gap.seeds for gap in gaps if gap is not None), default=0)
            table.add(name, at, str(seeds), *(show_mean(gap, 4, "+") for gap in gaps))
    return table


def _recipes(models: Models) -> Table:
    """Seeds differ by more than recipes, so each recipe is compared with the default on its own seeds."""
    table = Table(
        "Ways to draw the budget: loss minus that of the default at as many experts, by seed",
        ["recipe", "seeds", "top-2", "mass 0.5", "top-1", "own top-1 minus own top-2", "load CV at top-1"],
    )
    for recipe in (_GRMOE, *BUDGETS, SOFTMAX_BUDGET):
        runs = models[recipe.name]
        gaps = (
            None if recipe is _DEFAULT else difference(runs, models[_DEFAULT.name], VALIDATION, s, s)
            for s in ("top-2", "mass 0.5", "top-1")
        )
        table.add(
            "full budgets only" if recipe is _GRMOE else recipe.label,
            str(len(runs)),
            *(show_mean(gap, 4, "+") for gap in gaps),
            show_mean(mean(halving.costs(runs, 2, VALIDATION).values()), 4, "+"),
            show_mean(mean_of(runs, lambda row: row.load_cv, setting="top-1"), 3),
        )
    return table


def _half_by_seed(models: Models, texts: Sequence[str]) -> Table:
    table = Table(
        "Half of the experts, by seed: loss at top-1 minus that at top-2",
        ["trained", "text", "by seed", "mean"],
        left=3,
    )
    for recipe in (_GRMOE, _DEFAULT, RECIPES["token-mass-led-0.03"], _SOFTMAX, SOFTMAX_BUDGET):
        for text in texts:
            found = halving.costs(models[recipe.name], 2, text)
            if found:
                table.add(
                    recipe.label,
                    text,
                    " ".join(f"{cost:+.4f}" for _, cost in sorted(found.items())),
                    show_mean(mean(found.values()), 4, "+"),
                )
    return table


def _loads(models: Models) -> Table:
    table = Table(
        "Load of the model with random budgets", ["text", "computed at", "load CV", "least loaded expert"], 2
    )
    runs = models["token-mass"]
    for text in texts_of(runs):
        for setting in ("top-2", "mass 0.5", "top-1"):
            rows = list(rows_by_seed(runs, text, setting).values())
            if rows:
                cv = mean_of(runs, lambda row: row.load_cv, text, setting)
                table.add(text, setting, show_mean(cv, 3), f"{min(row.min_load for row in rows):.2f}")
    return table


def _beside_specialists(fine: Models) -> Table:
    """Both gates, budget by budget: random budgets, the specialist, and the plain model with fewer experts."""
    full = max(NARROW[0].specialists)
    lines: list[tuple[str, Sequence[Run], str | None]] = []
    for count in NARROW[0].specialists:
        for family in NARROW:
            rows = {
                f"{family.label}, random budgets: computed at top-{count}": family.elastic,
                family.specialists[count].label: family.specialists[count],
            }
            if count < full:
                rows[f"{family.specialists[full].label}, plain: computed at top-{count}"] = (
                    family.specialists[full]
                )
            lines += [(label, fine[recipe.name], f"top-{count}") for label, recipe in rows.items()]
    return model_table(
        "32 narrow experts, eight per token; difference to GrMoE at top-8", lines, (fine["grmoe"], "top-8")
    )


STUDY = ModelStudy(
    name="budgets",
    title="One model, every budget",
    where=WHERE,
    groups=(
        Group(BASE, _recipes_of(COARSE), SEEDS),
        # As many plain models as `promise` has with random budgets: what these cost is a matter of .003 nats.
        Group(BASE, (_GRMOE,), SEEDS, first=SEEDS),
        Group(BASE, tuple(_OTHERS), RECIPE_SEEDS),
        Group(FINE, _recipes_of(NARROW), SEEDS),
    ),
    write=write,
)
