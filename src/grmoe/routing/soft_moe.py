"""Soft MoE (Puigcerver et al. 2024): experts process slots, weighted means of all tokens of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.routing.base import Router, Routing, SlotMixing
from grmoe.routing.selection import Dense


class SoftMoERouter(Router):
    """Slot logits L = (x/‖x‖)Φ·s; dispatch = softmax over tokens, combine = softmax(αL) over slots.

    Input (..., T, D): each leading index is one sequence, mixed on its own. The gate of a token is its combine
    mass on each expert's slots. Like Expert Choice it sees the whole sequence and is not causal.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        slots: int = 1,
        generator: torch.Generator | None = None,
        **router: Any,
    ) -> None:
        super().__init__(dim, num_experts, selection=Dense(), **router)
        self.slots = checks.positive_int("slots", slots)
        phi = torch.randn(dim, num_experts * slots, generator=generator)
        self.phi = nn.Parameter(phi / phi.norm(dim=0))
        # ‖x‖ and ‖Φ‖ are one, so logits have size 1/√d: start the learned scale where they have size one.
        self.log_scale = nn.Parameter(torch.tensor(float(dim)).log() / 2)

    def route(self, x: Tensor, token_ids: Tensor | None) -> Routing:
        checks.require(x.ndim >= 2, f"x must have shape (..., tokens, {self.dim}), got {tuple(x.shape)}")
        logits = self._slot_logits(x)  # (..., T, N·slots)
        finite = torch.isfinite(logits).all(-1, keepdim=True)
        # A NaN token is mixed into no slot; its own combine weights stay NaN.
        dispatch = torch.softmax(torch.where(finite, logits, -1e30), dim=-2)
        combine = torch.softmax(self.alpha_value * logits, dim=-1)
        shape = (self.num_experts, self.slots)
        mixing = SlotMixing(dispatch.unflatten(-1, shape), combine.unflatten(-1, shape))
        probs = mixing.combine.sum(-1)
        gate_logits = torch.logsumexp((self.alpha_value * logits).unflatten(-1, shape), dim=-1)
        selected = torch.ones_like(probs, dtype=torch.bool)
        return Routing(gate_logits, probs, selected, probs, probs.new_zeros(()), mixing)

    def _slot_logits(self, x: Tensor) -> Tensor:
        unit = x / x.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
        phi = self.phi / self.phi.square().sum(0, keepdim=True).clamp(min=1e-12).sqrt()
        return self.log_scale.exp().to(x.dtype) * (unit @ phi.to(x.dtype))
