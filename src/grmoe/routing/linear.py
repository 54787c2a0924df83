"""Routers with one weight row per expert: the common base of softmax, Switch and Expert Choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grmoe.routing.base import Router
from grmoe.routing.buffers import for_backward
from grmoe.routing.fused import GateOperands


def linear_weight(num_experts: int, dim: int, generator: torch.Generator | None) -> nn.Parameter:
    """Gate rows from N(0, 1/d): logits of order one on RMS-normed tokens."""
    return nn.Parameter(torch.randn(num_experts, dim, generator=generator) / dim**0.5)


class LinearRouter(Router):
    """ℓ = α(Wx + b), b the log-prior."""

    def __init__(
        self, dim: int, num_experts: int, *, generator: torch.Generator | None = None, **router: Any
    ) -> None:
        super().__init__(dim, num_experts, **router)
        self.weight = linear_weight(num_experts, dim, generator)

    def gate(self, x: Tensor, token_ids: Tensor | None) -> Tensor:
        return for_backward(self.alpha_value) * (x @ self.weight.to(x.dtype).T + self.log_prior.to(x.dtype))

    def gate_operands(self) -> GateOperands | None:
        return GateOperands(self.weight, self.log_prior)
