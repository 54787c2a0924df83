"""κ of the paper's literal gate, from stored models, and what a value of κ says if it hardly left its start.

The paper states learned values of κ. It states neither where κ starts, nor the length of the tokens that κ multiplies.
The literal gate decides such a claim first. All its κ start at one value, so a model that has the paper's spread has
learned it. A model that misses it refutes the paper only where κ has left its start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from grmoe.studies.judging import changed, with_change
from grmoe.studies.language_model import BASE
from grmoe.studies.models.recipes import RECIPES
from grmoe.studies.models.store import Store
from grmoe.studies.page import Verdict

LITERAL = RECIPES["grmoe-paper"]
START = 1.5  # its κ before training
LEFT = 2.0  # a κ beyond this factor has left its start
REASON = (
    f"The paper's literal gate decides first, without an amortiser. There κ starts at {START:g}. The paper states no "
    "start and no length of its tokens, and trains 40 to 60 times as many steps. So if every κ of the literal gate "
    f"stays within a factor of {LEFT:g} of its start, the start decides, and a miss refutes nothing."
)

Layer = Sequence[float]
"""The smallest and the largest κ of an MoE layer."""
Kappas = Sequence[Sequence[Layer]]
"""Seeds × layers."""


def literal_kappas(results: Path) -> Kappas:
    return [run.kappa for run in Store(results).runs(BASE, LITERAL) if run.kappa is not None]


def starts_decide(kappas: Kappas) -> bool:
    """Whether no κ of the literal gate has left its start."""
    ends = [end for layers in kappas for layer in layers for end in layer]
    return all(START / LEFT <= end <= START * LEFT for end in ends)


def by_start(literal: Verdict, ours: Verdict, kappas: Kappas) -> Verdict:
    """Of a claim about values of κ, from its verdicts for the literal gate and for ours. Both lack the paper's
    amortiser, so that it holds with a change at best."""
    found = changed(with_change(literal, ours))
    return Verdict.UNTESTABLE if found is Verdict.FAILS and starts_decide(kappas) else found


def count_within(layers: Sequence[Layer], low: float, high: float, experts: int) -> tuple[int, int]:
    """How many experts of a model have a κ from low to high: (at least, at most), from the ends of each layer."""
    least = most = 0
    for ends in layers:
        inside = sum(low <= end <= high for end in ends)
        apart = max(ends) < low or min(ends) > high
        least += experts if inside == 2 else inside
        most += 0 if apart else experts if inside == 2 else experts - 2 + inside
    return least, most


def span(kappas: Kappas) -> str:
    """The smallest and the largest κ."""
    ends = [end for layers in kappas for layer in layers for end in layer]
    return f"{min(ends, default=math.nan):.2f} to {max(ends, default=math.nan):.2f}"
