"""Switch routing (Fedus et al. 2022): top-1, an expert takes at most its capacity, a load-balancing loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grmoe import checks
from grmoe.routing.base import Router, Routing, linear_weight
from grmoe.routing.selection import TopK
from grmoe.routing.softmax import load_balancing_loss


class SwitchRouter(Router):
    """ℓ = αWx, top-1; tokens past ⌈capacity_factor·T/N⌉ of an expert, in token order, are dropped.

    A dropped token has no selected expert and zero weight: the layer passes it on through the residual.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        capacity_factor: float = 1.25,
        load_loss: float = 0.01,
        generator: torch.Generator | None = None,
        **router: Any,
    ) -> None:
        super().__init__(dim, num_experts, selection=TopK(1, renormalize=False), **router)
        self.capacity_factor = checks.finite("capacity_factor", capacity_factor, above=0)
        self.load_loss = checks.finite("load_loss", load_loss, at_least=0)
        self.weight = linear_weight(num_experts, dim, generator)

    def gate(self, x: Tensor, token_ids: Tensor | None) -> Tensor:
        return self.alpha_value * (x @ self.weight.to(x.dtype).T + self.log_prior.to(x.dtype))

    def select(self, probs: Tensor) -> Tensor:
        wanted_TN = self.selection(probs).reshape(-1, self.num_experts)
        capacity = math.ceil(self.capacity_factor * len(wanted_TN) / self.num_experts)
        # A NaN token must not use up a place.
        wanted_TN = wanted_TN & torch.isfinite(probs).all(-1).reshape(-1, 1)
        place_TN = wanted_TN.long().cumsum(0)
        return (wanted_TN & (place_TN <= capacity)).view(probs.shape)

    def losses(self, routing: Routing) -> Tensor:
        # The loss sees what the router asked for, before tokens were dropped.
        return self.load_loss * load_balancing_loss(routing.probs, self.selection(routing.probs))
