"""Near ties: choices that rounding could change.

Logits and gates computed in a batch differ in their last bits from those of a batch of one. A choice is *clear* when
it leads by more than `MARGIN`. A choice that is not clear is a near tie, and the sequence is computed again alone.

Legend: B sequences, N experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grmoe.routing import Router, Routing

# Absolute for gate probabilities; for logits a share of the largest one. In fp32 a batch changes both by about 1e-6
# (benchmarks/rounding.py). The margin is well above that, and still so small that near ties are rare.
MARGIN = 3e-5


def clear_experts(router: Router, routing: Routing) -> Tensor:
    """(B,) True where a change of MARGIN in the gates selects the same experts for all tokens of a sequence.

    Two things can change a selection. The order of the last kept and the first dropped expert: their gap tells. A
    threshold on a probability or a sum of them: selecting again with slightly larger and smaller gates tells.
    """
    probs, selected = choosing_gate(router, routing), routing.selected
    last_kept = torch.where(selected, probs, torch.inf).amin(-1)
    first_dropped = torch.where(selected, -torch.inf, probs).amax(-1)
    clear = last_kept - first_dropped > MARGIN
    for factor in (1 - MARGIN, 1 + MARGIN):
        clear &= (router.select(probs * factor) == selected).all(-1)
    return clear.flatten(1).all(-1)


def choosing_gate(router: Router, routing: Routing) -> Tensor:
    """The gate that chose the experts, with the bias of the choice. A routing holds the gate of the weights, which may
    have an α of their own.

    ℓ = α·score, so the logits of the choice are those of the weights times α / weight_alpha, up to rounding. With
    weight_alpha = 0 the result is NaN, so that no choice is clear.
    """
    budget, logits = router.budget, routing.logits
    if not budget.weighs_apart:
        return budget.rank(logits, routing.probs)
    logits = router.alpha_value / budget.weight_alpha * logits
    return budget.rank(logits, torch.softmax(logits, -1))
