"""What it costs to compute half of the experts that a model was trained with: the dial without any preparation.

A model learns with K experts per token and is then computed with K/2. Part of the page of `grmoe.studies.gates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grmoe.studies.judging import below, in_doubt
from grmoe.studies.models.store import Run
from grmoe.studies.models.summary import VALIDATION, Mean, mean, rows_by_seed, short_name, show_mean
from grmoe.studies.page import OWN, Claim
from grmoe.tables import Table


def costs(runs: Sequence[Run], full: int, text: str = VALIDATION) -> dict[int, float]:
    """By seed: loss with half of the experts minus loss with all `full`."""
    half, whole = (rows_by_seed(runs, text, f"top-{count}") for count in (full // 2, full))
    return {seed: row.loss - whole[seed].loss for seed, row in half.items() if seed in whole}


def gap(ours: Sequence[Run], theirs: Sequence[Run], full: int, text: str = VALIDATION) -> Mean | None:
    """Our cost minus theirs, by seed. None where they share no seed."""
    mine, other = costs(ours, full, text), costs(theirs, full, text)
    return mean(cost - other[seed] for seed, cost in mine.items() if seed in other)


def claim(
    label: str, ours: Sequence[Run], theirs: Sequence[Run], full: int, texts: Sequence[str], setting: str
) -> Claim:
    """Of "half of the experts cost GrMoE less than this baseline". Validation text decides; others are shown."""
    gaps = {text: gap(ours, theirs, full, text) for text in texts}
    return Claim(
        OWN,  # the paper computes no softmax model with fewer experts than it was trained with
        f"Half of the experts cost GrMoE less, without random budgets ({setting}): less than {label}",
        "; ".join(f"{short_name(text)}: {show_mean(g, 4, '+')}" for text, g in gaps.items() if g is not None),
        below(gaps[VALIDATION]),
        f"What top-{full // 2} costs over top-{full}, minus the baseline's, by seed. Validation text decides. "
        f"{in_doubt(gaps[VALIDATION])}",
    )


def table(
    title: str, models: Mapping[str, tuple[str, Sequence[Run]]], full: int, texts: Sequence[str]
) -> Table:
    """By method: what half of the experts cost on each text. The first method is the one others are compared with.

    models: (label, models) by method.
    """
    (first, (_, ours)), *_ = models.items()
    found = Table(title, ["trained with", "seeds", *map(short_name, texts), "validation, minus the first"])
    for method, (label, runs) in models.items():
        by_text = [mean(costs(runs, full, text).values()) for text in texts]
        less = None if method == first else gap(runs, ours, full)
        found.add(
            label, str(len(runs)), *(show_mean(cost, 4, "+") for cost in by_text), show_mean(less, 4, "+")
        )
    return found
