"""Switch routing (Fedus et al. 2022): top-1, a capacity per expert, a load-balancing loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grmoe import checks
from grmoe.routing.linear import LinearRouter
from grmoe.routing.result import Routing
from grmoe.routing.selection import TopK
from grmoe.routing.softmax import load_balancing_loss


class SwitchRouter(LinearRouter):
    """ℓ = αWx, top-1. Tokens past an expert's first ⌈capacity_factor·T/N⌉, in token order, are dropped.

    A dropped token has no selected expert and zero weight: only the residual carries it on.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        capacity_factor: float = 1.25,
        load_loss: float = 0.01,
        **router: Any,
    ) -> None:
        super().__init__(dim, num_experts, selection=TopK(1), **router)
        self.capacity_factor = checks.finite("capacity_factor", capacity_factor, above=0)
        self.load_loss = checks.finite("load_loss", load_loss, at_least=0)

    def capacity(self, tokens: int) -> int:
        """Tokens each expert takes at most."""
        # 1.1·100/10 is 11, and a little more in floating point.
        return math.ceil(self.capacity_factor * tokens / self.num_experts - 1e-9)

    def experts_per_token(self, tokens: int) -> float:
        return min(1.0, self.num_experts * self.capacity(tokens) / tokens)

    def select(self, probs: Tensor) -> Tensor:
        wanted_TN = self.selection(probs).reshape(-1, self.num_experts)
        # A NaN token must not use up a place.
        wanted_TN = wanted_TN & torch.isfinite(probs).all(-1).reshape(-1, 1)
        place_TN = wanted_TN.long().cumsum(0)
        # By `shape`: `len` would fix the number of tokens in torch.export.
        return (wanted_TN & (place_TN <= self.capacity(wanted_TN.shape[0]))).view(probs.shape)

    def losses(self, routing: Routing) -> Tensor:
        # The loss counts what the gate asked for, before tokens were dropped.
        return self.load_loss * load_balancing_loss(routing.probs, self.selection(routing.probs))
