"""Soft MoE (Puigcerver et al. 2024): experts compute slots, weighted means of all tokens of a sequence.

Legend: T tokens of a sequence, N experts, P slots per expert, D model width; `...` sequences.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.routing.base import Router
from grmoe.routing.buffers import for_backward
from grmoe.routing.result import Routing, SlotMixing
from grmoe.routing.selection import Dense


class SlotRouter(Router):
    """Tokens are mixed into slots by softmax(L) over tokens, and slots back into tokens by softmax(αL) over slots. A
    subclass gives the slot logits L.

    Input (..., T, D): each leading index is one sequence, mixed on its own. The gate of a token is its weight on each
    expert's slots. Like Expert Choice it sees the whole sequence and is not causal.

    slots: slots per expert, the same for every sequence. Default 1.
    max_tokens: in place of `slots`. A sequence of T tokens then uses ⌊T/N⌋ slots per expert (at least one), that is one
        expert row per token; ⌊max_tokens/N⌋ slots are learned.
    """

    reads_prior: ClassVar[bool] = False
    own_choice: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        slots: int | None = None,
        max_tokens: int | None = None,
        **router: Any,
    ) -> None:
        super().__init__(dim, num_experts, selection=Dense(), **router)
        if max_tokens is None:
            self.slots = checks.positive_int("slots", 1 if slots is None else slots)
        else:
            checks.require(slots is None, f"slots must be None with max_tokens, got {slots!r}")
            self.slots = max(1, checks.positive_int("max_tokens", max_tokens) // num_experts)
        self.follows_length = max_tokens is not None

    def slot_logits(self, x: Tensor) -> Tensor:
        """L (..., T, N·P) for sequences x (..., T, D), with P = `slots_for(T)`; an expert's slots are neighbours."""
        raise NotImplementedError(f"{type(self).__name__} must define slot_logits()")

    def slots_for(self, tokens: int) -> int:
        """P, the slots per expert that a sequence of `tokens` tokens uses."""
        return min(self.slots, max(1, tokens // self.num_experts)) if self.follows_length else self.slots

    def experts_per_token(self, tokens: int) -> float:
        return self.num_experts * self.slots_for(tokens) / tokens

    def route(self, x: Tensor, token_ids: Tensor | None) -> Routing:
        checks.require(x.ndim >= 2, f"x must have shape (..., tokens, {self.dim}), got {tuple(x.shape)}")
        logits = self.slot_logits(x)
        finite = torch.isfinite(logits).all(-1, keepdim=True)
        # A NaN token is mixed into no slot; its own weights on the slots stay NaN.
        to_slots = torch.softmax(torch.where(finite, logits, -1e30), dim=-2)
        scaled = for_backward(self.alpha_value) * logits
        from_slots = torch.softmax(scaled, dim=-1)
        shape = (self.num_experts, -1)
        mixing = SlotMixing(to_slots.unflatten(-1, shape), from_slots.unflatten(-1, shape))
        probs = mixing.from_slots.sum(-1)
        return Routing(
            logits=torch.logsumexp(scaled.unflatten(-1, shape), dim=-1),
            probs=probs,
            selected=torch.ones_like(probs, dtype=torch.bool),
            weights=probs,
            aux_loss=probs.new_zeros(()),
            slots=mixing,
        )


class SoftMoERouter(SlotRouter):
    """Slot logits L = (x/‖x‖)Φ·s, Φ with columns of length one and s a learned scale. See `SlotRouter`."""

    def __init__(
        self, dim: int, num_experts: int, *, generator: torch.Generator | None = None, **router: Any
    ) -> None:
        super().__init__(dim, num_experts, **router)
        phi = torch.randn(dim, num_experts * self.slots, generator=generator)
        self.phi = nn.Parameter(phi / phi.norm(dim=0))
        # ‖x‖ and ‖Φ‖ are one, so logits have size 1/√d: the learned scale starts where they have size one.
        self.log_scale = nn.Parameter(torch.tensor(float(dim)).log() / 2)

    def slot_logits(self, x: Tensor) -> Tensor:
        unit = x / x.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
        phi: Tensor = self.phi
        if (used := self.slots_for(x.shape[-2])) < self.slots:
            phi = phi.unflatten(-1, (self.num_experts, self.slots))[..., :used].flatten(-2)
        phi = phi / phi.square().sum(0, keepdim=True).clamp(min=1e-12).sqrt()
        return self.log_scale.exp().to(x.dtype) * (unit @ phi.to(x.dtype))
