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
# Rounding moves a gate by a share of its logits. Those of the default gate stay below this size. A gate of raw tokens
# may have logits of hundreds: its margin grows with them.
USUAL_LOGIT = 32.0


def clear_experts(router: Router, routing: Routing) -> Tensor:
    """(B,) True where a change of MARGIN in the gates selects the same experts for all tokens of a sequence.

    A token with logits ℓ beyond USUAL_LOGIT has the margin MARGIN·max|ℓ|/USUAL_LOGIT.

    Two things can change a selection. The order of the last kept and the first dropped expert: their gap tells. A
    threshold on a probability or a sum of them: selecting again with slightly larger and smaller gates tells.
    """
    probs, selected = choosing_gate(router, routing), routing.selected
    largest = choosing_logits(router, routing).abs().amax(-1)
    margin = MARGIN * (largest / USUAL_LOGIT).clamp(min=1.0)
    last_kept = torch.where(selected, probs, torch.inf).amin(-1)
    first_dropped = torch.where(selected, -torch.inf, probs).amax(-1)
    clear = last_kept - first_dropped > margin
    for factor in (1 - margin, 1 + margin):
        clear &= (router.select(probs * factor.unsqueeze(-1)) == selected).all(-1)
    return clear.flatten(1).all(-1)


def choosing_gate(router: Router, routing: Routing) -> Tensor:
    """The gate that chose the experts, with the bias of the choice. A routing holds the gate of the weights, which may
    have an α of their own."""
    budget = router.budget
    if not budget.weighs_apart:
        return budget.rank(routing.logits, routing.probs)
    logits = choosing_logits(router, routing)
    return budget.rank(logits, torch.softmax(logits, -1))


def choosing_logits(router: Router, routing: Routing) -> Tensor:
    """The logits of the choice, without its bias.

    ℓ = α·score, so they are those of the weights times α / weight_alpha, up to rounding. With weight_alpha = 0 they
    are NaN, so that no choice is clear.
    """
    if not router.budget.weighs_apart:
        return routing.logits
    return router.alpha_value / router.budget.weight_alpha * routing.logits
