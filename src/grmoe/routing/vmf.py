"""The von Mises–Fisher gate: one direction per expert, the paper's rank-one ablation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.routing.base import Router
from grmoe.routing.buffers import for_backward
from grmoe.routing.linear import linear_weight


class VMFRouter(Router):
    """ℓ_e = α(κ_e w_eᵀx/(‖w_e‖‖x‖) + b_e), the vMF posterior with a shared normaliser.

    It is signed; the Grassmann gate of rank one is not.

    kappa: initial concentration. The default √d gives logits of order one, because cosines in d dimensions have size
        1/√d.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        kappa: float | None = None,
        generator: torch.Generator | None = None,
        **router: Any,
    ) -> None:
        super().__init__(dim, num_experts, **router)
        start = math.sqrt(dim) if kappa is None else checks.finite("kappa", kappa, above=0)
        self.weight = linear_weight(num_experts, dim, generator)
        self.log_kappa = nn.Parameter(torch.full((num_experts,), math.log(start)))

    def gate(self, x: Tensor, token_ids: Tensor | None) -> Tensor:
        direction = self.weight / self.weight.norm(dim=-1, keepdim=True)
        norm2 = x.square().sum(-1, keepdim=True).clamp(min=1e-12)
        cosine = x @ direction.to(x.dtype).T / norm2.sqrt()
        # Padding routes by the prior, with no gradient; a NaN token stays NaN.
        cosine = torch.where(norm2 <= 1e-12, 0.0, cosine)
        scores = self.log_kappa.exp().to(x.dtype) * cosine
        return for_backward(self.alpha_value) * (scores + self.log_prior.to(x.dtype))

    def geometry_figures(self) -> dict[str, Tensor]:
        kappa = self.log_kappa.exp()
        return {"kappa_min": kappa.min(), "kappa_max": kappa.max()}
