"""Expert Choice (Zhou et al. 2022): each expert takes its favourite tokens, so load is equal by construction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grmoe import checks
from grmoe.routing.base import Router, linear_weight
from grmoe.routing.selection import Dense


class ExpertChoiceRouter(Router):
    """ℓ = αWx; expert e takes the ⌊capacity_factor·T/N⌋ tokens (at least one) of largest g_e.

    A token may be taken by several experts or by none. The choice looks at all tokens of the batch, later
    ones included: in a causal language model this leaks, use it to compare, not to generate.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        capacity_factor: float = 1.0,
        generator: torch.Generator | None = None,
        **router: Any,
    ) -> None:
        super().__init__(dim, num_experts, selection=Dense(), **router)
        self.capacity_factor = checks.finite("capacity_factor", capacity_factor, above=0)
        self.weight = linear_weight(num_experts, dim, generator)

    def gate(self, x: Tensor, token_ids: Tensor | None) -> Tensor:
        return self.alpha_value * (x @ self.weight.to(x.dtype).T + self.log_prior.to(x.dtype))

    def select(self, probs: Tensor) -> Tensor:
        probs_TN = probs.reshape(-1, self.num_experts)
        tokens = len(probs_TN)
        capacity = min(tokens, max(1, int(self.capacity_factor * tokens / self.num_experts)))
        if tokens == 0:
            return torch.zeros_like(probs, dtype=torch.bool)
        # topk ranks NaN above everything: a NaN token would push a good one out.
        ranked_TN = torch.where(torch.isnan(probs_TN), -1.0, probs_TN)
        taken = ranked_TN.topk(capacity, dim=0).indices
        mask_TN = torch.zeros_like(probs_TN, dtype=torch.bool).scatter(0, taken, True)
        return (mask_TN & ~torch.isnan(probs_TN)).view(probs.shape)
