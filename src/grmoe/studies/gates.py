"""Gates at equal experts per token: is GrMoE the better gate, and which part of it makes the difference?

Five gates with two of eight experts per token, with one of eight, and with eight of 32 narrow ones. Then one part of
GrMoE at a time (`gate_parts`), what narrow experts ask of a gate (`narrow_gates`), and how much any gate can gain
(`gate_room`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grmoe.studies import gate_parts, gate_room, halving, many, narrow_gates
from grmoe.studies.judging import below_on, in_doubt
from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.recipes import EQUAL, GATES, SETTINGS, Setting, base_of
from grmoe.studies.models.store import Run, Store
from grmoe.studies.models.summary import (
    VALIDATION,
    Mean,
    difference,
    model_table,
    short_name,
    texts_of,
)
from grmoe.studies.page import OWN, Claim, Page, Verdict

STEPS = 2500
SEEDS = 5
BASELINES = EQUAL[1:]

FULL_BUDGET: dict[Setting, int] = {"two": 2, "fine": 8}  # experts per token, where there is a half

Models = Mapping[str, Sequence[Run]]

# -- the page ----------------------------------------------------------------------------------------------------------


def write(store: Store) -> Page:
    claims, tables = [], []
    others: dict[str, Mean | None] = {}
    halves: dict[str, Mean | None] = {}
    for setting in SETTINGS:
        models = _models(store, setting)
        texts = texts_of(run for runs in models.values() for run in runs) or [VALIDATION]
        claims += [_better(setting, method, models, texts) for method in BASELINES]
        tables += [
            model_table(
                f"{SETTINGS[setting].capitalize()}: loss on {short_name(text)}; difference to GrMoE by seed",
                [(GATES[setting][method].label, models[method], None) for method in EQUAL],
                (models["grmoe"], None),
                text,
                "router",
            )
            for text in texts
        ]
        labels = {
            method: f"{GATES['two'][method].label} ({SETTINGS[setting].removesuffix(' experts per token')})"
            for method in BASELINES
        }
        others |= {label: difference(models["grmoe"], models[method]) for method, label in labels.items()}
        full = FULL_BUDGET.get(setting)
        if full is not None:
            halves |= {
                label: halving.gap(models["grmoe"], models[method], full) for method, label in labels.items()
            }
            claims += [
                halving.claim(
                    GATES["two"][method].label,
                    models["grmoe"],
                    models[method],
                    full,
                    texts,
                    SETTINGS[setting],
                )
                for method in BASELINES
            ]
            labelled = {method: (GATES[setting][method].label, models[method]) for method in EQUAL}
            title = (
                f"{SETTINGS[setting].capitalize()}: what half of them cost, top-{full // 2} minus top-{full}"
            )
            tables.append(halving.table(title, labelled, full, texts))
    parts = runs_of(store, base_of("two", STEPS), *gate_parts.ROWS)
    narrow = runs_of(store, base_of("fine", STEPS), *narrow_gates.ROWS)
    room = runs_of(store, base_of("two", STEPS), *gate_room.ROWS)
    fine = runs_of(store, base_of("fine", STEPS), *gate_room.FINE_ROWS)
    return Page(
        claims=[
            *claims,
            *gate_parts.claims(parts),
            *narrow_gates.claims(narrow),
            *gate_room.claims(room, fine),
        ],
        tables=[
            *tables,
            *gate_parts.tables(parts),
            *narrow_gates.tables(narrow),
            *gate_room.tables(room, fine),
            many.table(
                "Many comparisons at once, on validation text",
                {
                    "GrMoE minus another gate": others,
                    "what half of the experts cost GrMoE, minus what they cost another gate": halves,
                    "a change of GrMoE, two of eight experts": gate_parts.family(parts),
                    "a change of GrMoE, narrow experts": narrow_gates.family(narrow),
                    "a gate minus one that learns nothing": gate_room.family(room, fine),
                },
            ),
        ],
        notes=[
            "Presets `small` and `small-fine`, 2500 steps of 32 × 512 tokens, full budgets, weights not renormalised, "
            "each method at its own best learning rate in each setting.",
            "The entropy term is the mean over tokens of (H − target)² with weight 0.1. Like a z-loss, its gradient "
            "reaches the tokens as well as the gate, so it may change more than the gate. It upsets the balance of "
            "the load (see its CV), and so says little about a flat gate.",
            "Two gates with equal losses may be equally good, or the choice of experts may hardly matter. So one table "
            "has gates that learn nothing: a hash of the token's id, and GrMoE with the subspaces and κ that it "
            "started with. Their experts learn like all others. The prior of GrMoE goes on balancing the load there, "
            "and the layers before the gate can move tokens between its subspaces.",
            "Every interval and every verdict is of one comparison. Where nothing differs, one of twenty such "
            "intervals excludes zero all the same. “Many comparisons at once” looks at all of a kind together: with "
            "Holm's rule the chance that any of those left is a mistake is at most 5 %. Comparisons with fewer than "
            "three seeds are left out.",
            "A negative difference is a lower loss. It is over the seeds that both models have: to GrMoE with "
            "subspaces as drawn, three, however many the other gate has. Parts of a gain need not add up, because they "
            "act on each other.",
        ],
    )


def _models(store: Store, setting: Setting) -> dict[str, list[Run]]:
    """Models by method."""
    base = base_of(setting, STEPS)
    return {method: store.runs(base, recipe) for method, recipe in GATES[setting].items()}


def _better(setting: Setting, method: str, models: Models, texts: Sequence[str]) -> Claim:
    shown, verdict = below_on(models["grmoe"], models[method], texts)
    if texts == [VALIDATION] and verdict is Verdict.HOLDS:
        verdict = Verdict.OPEN
    return Claim(
        OWN,  # the paper's softmax and vMF have no balancing, and its Switch is top-1
        f"GrMoE is the better gate with {SETTINGS[setting]}: below {GATES['two'][method].label}",
        shown,
        verdict,
        "Loss minus the baseline's, by seed. It holds if every interval is below zero, on validation text and on "
        f"others. {in_doubt(difference(models['grmoe'], models[method]), 'On validation text')}",
    )


STUDY = ModelStudy(
    name="gates",
    title="Gates at equal experts per token",
    where="Table 2, and settings that the paper does not have",
    groups=(
        *(Group(base_of(setting, STEPS), tuple(GATES[setting].values()), SEEDS) for setting in SETTINGS),
        Group(base_of("two", STEPS), gate_parts.FLAT, gate_parts.FLAT_SEEDS),
        Group(base_of("two", STEPS), gate_parts.PARTS, gate_parts.PART_SEEDS),
        Group(base_of("fine", STEPS), narrow_gates.PARTS, narrow_gates.SEEDS),
        Group(base_of("fine", STEPS), narrow_gates.TRIED, narrow_gates.TRIED_SEEDS),
        Group(base_of("two", STEPS), (gate_room.HASH,), gate_room.HASH_SEEDS),
        Group(base_of("two", STEPS), (gate_room.FIXED, gate_room.NO_CHOICE), gate_room.SEEDS),
        Group(base_of("fine", STEPS), (gate_room.FIXED_FINE,), gate_room.SEEDS),
    ),
    write=write,
)
