"""The Mixture-of-Experts layer: router → selection → dispatch → experts → combine, each seam replaceable.

Legend: T tokens (all leading dimensions together), D model width, N experts, P slots of an expert (Soft MoE).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.experts import BACKENDS, Dispatch, ExpertWeights, pick_backend
from grmoe.experts.weights import Activation
from grmoe.routing import GrassmannRouter, Router, Routing, SlotMixing, TopK


class MoE(nn.Module):
    """N feed-forward experts behind a router.

    router: any `Router`; by default a `GrassmannRouter` of rank dim // num_experts with top-2 selection.
    activation: "swiglu" (width `hidden` after the gate) or "gelu".
    backend: "reference" (a loop, any dtype), "grouped" (grouped GEMMs), or "auto".
    shared_experts: that many experts every token goes through, beside the routed ones and with weight one.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        router: Router | None = None,
        *,
        activation: Activation = "swiglu",
        backend: Literal["auto", "reference", "grouped"] = "auto",
        shared_experts: int = 0,
    ) -> None:
        super().__init__()
        if router is None:
            rank = max(1, dim // num_experts)
            router = GrassmannRouter(dim, num_experts, rank, selection=TopK(min(2, num_experts)))
        same = (router.dim, router.num_experts) == (dim, num_experts)
        got = f"({router.dim}, {router.num_experts})"
        checks.require(
            same, f"router must be built for (dim, num_experts) = ({dim}, {num_experts}), got {got}"
        )
        self.router = router
        self.backend = checks.one_of("backend", backend, ("auto", *BACKENDS))
        self.experts = ExpertWeights(dim, hidden, num_experts, activation)
        checks.positive_int("shared_experts", shared_experts, at_least=0)
        # k experts of width I with weight one are one expert of width k·I.
        self.shared = ExpertWeights(dim, shared_experts * hidden, 1, activation) if shared_experts else None

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Output of the layer, shaped and typed as x."""
        return self.run(x, token_ids)[0]

    def run(self, x: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, Routing]:
        """Output and what the router decided (its `aux_loss`, probabilities, selection)."""
        routing = self.router(x, token_ids)
        y = self.mix(x, routing.slots) if routing.slots is not None else self.compute(x, routing)
        if self.shared is not None:
            up, down = self.shared.up[0].to(x.dtype), self.shared.down_proj[0].to(x.dtype)
            y = y + self.shared.activate(x @ up.T) @ down.T
        return y, routing

    def compute(self, x: Tensor, routing: Routing) -> Tensor:
        """The routed experts for a selection: also the way to replay one, as activation checkpointing needs."""
        x_TD = x.reshape(-1, x.shape[-1])
        shape = (len(x_TD), self.router.num_experts)
        weights_TN, selected_TN = routing.weights.reshape(shape), routing.selected.reshape(shape)
        dispatch = Dispatch.build(weights_TN, selected_TN, self.router.most_experts())
        return pick_backend(self.backend, x_TD)(x_TD, dispatch, self.experts).view(x.shape)

    def mix(self, x: Tensor, slots: SlotMixing) -> Tensor:
        """Soft MoE: experts run on slots, weighted means of a sequence's tokens."""
        # A NaN token has dispatch weight zero, but 0·NaN is NaN.
        finite = torch.isfinite(x).all(-1, keepdim=True)
        clean = torch.where(finite, x, 0.0)
        inputs = torch.einsum("...tnp,...td->...npd", slots.dispatch.to(x.dtype), clean)
        N, P, D = inputs.shape[-3:]
        rows_AD = inputs.reshape(-1, N, P, D).transpose(0, 1).reshape(-1, D)
        each = len(rows_AD) // N
        expert = torch.arange(len(rows_AD), device=x.device) // max(1, each)
        selected = expert.unsqueeze(-1) == torch.arange(N, device=x.device)
        dispatch = Dispatch.build(selected.to(torch.float32), selected, 1)
        out_AD = pick_backend(self.backend, rows_AD)(rows_AD, dispatch, self.experts)
        outputs = out_AD.view(N, -1, P, D).transpose(0, 1).view(inputs.shape)
        return torch.einsum("...tnp,...npd->...td", slots.combine.to(x.dtype), outputs)
