"""Expert Choice (Zhou et al. 2022): each expert takes its favourite tokens, so load is equal by construction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grmoe import checks
from grmoe.routing.linear import LinearRouter
from grmoe.routing.selection import Dense


class ExpertChoiceRouter(LinearRouter):
    """ℓ = αWx; expert e takes the ⌊capacity_factor·T/N⌋ tokens (at least one) with the largest g_e.

    A token may be taken by several experts or by none; on average `capacity_factor` experts compute it. The choice
    looks at all tokens of the batch, later ones included. In a causal language model this leaks: use it to compare,
    not to generate.
    """

    def __init__(self, dim: int, num_experts: int, *, capacity_factor: float = 1.0, **router: Any) -> None:
        super().__init__(dim, num_experts, selection=Dense(), **router)
        self.capacity_factor = checks.finite("capacity_factor", capacity_factor, above=0)

    def capacity(self, tokens: int) -> int:
        """Tokens each expert takes."""
        # 0.58·100/2 is 29, and a little less in floating point.
        return min(tokens, max(1, int(self.capacity_factor * tokens / self.num_experts + 1e-9)))

    def experts_per_token(self, tokens: int) -> float:
        return self.num_experts * self.capacity(tokens) / tokens

    def select(self, probs: Tensor) -> Tensor:
        probs_TN = probs.reshape(-1, self.num_experts)
        if len(probs_TN) == 0:
            return torch.zeros_like(probs, dtype=torch.bool)
        # topk ranks NaN above everything: a NaN token would push a good one out.
        ranked_TN = torch.where(torch.isnan(probs_TN), -1.0, probs_TN)
        taken = ranked_TN.topk(self.capacity(len(probs_TN)), dim=0).indices
        mask_TN = torch.zeros_like(probs_TN, dtype=torch.bool).scatter(0, taken, True)
        return (mask_TN & ~torch.isnan(probs_TN)).view(probs.shape)
