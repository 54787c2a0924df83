"""The Mixture-of-Experts layer: router → selection → dispatch → experts → combine, each seam replaceable.

Legend: T tokens (all leading dimensions together), D model width, N experts, P slots of an expert (Soft MoE).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.experts import BACKENDS, Dispatch, ExpertWeights, pick_backend
from grmoe.experts.bounds import POWER, output_gains
from grmoe.experts.weights import Activation
from grmoe.routing import (
    GrassmannRouter,
    HashRouter,
    Router,
    Routing,
    Selection,
    SlotMixing,
    SoftMoERouter,
    TopK,
)


@dataclass(frozen=True)
class Truncation:
    """What computing only the selected experts cost each token; tensors shaped like the tokens."""

    dropped: Tensor  # ε, the gate's mass on experts not computed
    bound: Tensor  # on ‖y − ŷ‖ against the dense sum; the error itself under `exact`; ∞ where not `holds`
    holds: Tensor  # False for a token with NaN or Inf on the way


class Dispatcher(Protocol):
    """Runs experts that are not all in this process."""

    def __call__(self, x_TD: Tensor, dispatch: Dispatch, experts: ExpertWeights, backend: str) -> Tensor: ...


class MoE(nn.Module):
    """N feed-forward experts behind a router.

    router: any `Router`; by default a `GrassmannRouter` of rank dim // num_experts with top-2 selection.
    selection: which experts a token gets: of the default router, or in place of what `router` came with.
    activation: "swiglu" (width `hidden` after the gate) or "gelu".
    backend: "reference" (a loop, any dtype), "grouped" (grouped GEMMs), "triton" (our kernels, CUDA), or "auto", the
        fastest that runs on the tokens' device, dtype and shape. The gate follows: the first two leave the router
        to PyTorch.
    shared_experts: that many experts every token goes through, beside the routed ones and with weight one.
    experts: weights of these sizes, in place of new ones.
    dispatcher: attribute. None runs the experts here, `grmoe.parallel.experts.ExpertParallel` in many processes.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        router: Router | None = None,
        *,
        selection: Selection | None = None,
        activation: Activation = "swiglu",
        backend: Literal["auto", "reference", "grouped", "triton"] = "auto",
        shared_experts: int = 0,
        experts: ExpertWeights | None = None,
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
        if selection is not None:
            kind = type(router).__name__
            checks.require(
                _takes_selection(router), f"selection must be None for a {kind}, which makes its own choice"
            )
            router.selection = selection
        self.router = router
        self.backend = checks.one_of("backend", backend, ("auto", *BACKENDS))
        if backend != "auto":
            router.backend = "triton" if backend == "triton" else "reference"
        self.experts = ExpertWeights(dim, hidden, num_experts, activation) if experts is None else experts
        shape, kind = tuple(self.experts.down_proj.shape), self.experts.activation
        checks.require(
            (shape, kind) == ((num_experts, dim, hidden), activation),
            f"experts must be {num_experts} of {dim} × {hidden}, {activation}, got {shape}, {kind}",
        )
        checks.positive_int("shared_experts", shared_experts, at_least=0)
        self.dispatcher: Dispatcher | None = None
        # k experts of width I with weight one are one expert of width k·I.
        self.shared = ExpertWeights(dim, shared_experts * hidden, 1, activation) if shared_experts else None

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Output of the layer, shaped and typed as x."""
        return self.run(x, token_ids)[0]

    def run(self, x: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, Routing]:
        """Output and what the router decided (its `aux_loss`, probabilities, selection)."""
        # Cast first: the router then sees in training what it sees in a model that is served in 16 bits.
        x = as_autocast(x)
        routing = self.router(x, token_ids)
        y = self.mix(x, routing.slots) if routing.slots is not None else self.compute(x, routing)
        if self.shared is not None:
            y = y + _expert(self.shared, 0, x)
        return y, routing

    def compute(self, x: Tensor, routing: Routing) -> Tensor:
        """The routed experts for a selection: also the way to replay one, as activation checkpointing needs."""
        x_TD = x.reshape(-1, x.shape[-1])
        shape = (len(x_TD), self.router.num_experts)
        weights_TN, selected_TN = routing.weights.reshape(shape), routing.selected.reshape(shape)
        return self._run_experts(x_TD, weights_TN, selected_TN, self.router.most_experts()).view(x.shape)

    def _run_experts(self, x_TD: Tensor, weights_TN: Tensor, selected_TN: Tensor, most: int) -> Tensor:
        backend = pick_backend(self.backend, x_TD, self.experts.hidden)
        dispatch = Dispatch.build(weights_TN, selected_TN, most, kernels=backend == "triton")
        if self.dispatcher is not None:
            return self.dispatcher(x_TD, dispatch, self.experts, backend)
        return BACKENDS[backend](x_TD, dispatch, self.experts)

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
        out_AD = self._run_experts(rows_AD, selected.to(torch.float32), selected, 1)
        outputs = out_AD.view(N, -1, P, D).transpose(0, 1).view(inputs.shape)
        return torch.einsum("...tnp,...npd->...td", slots.combine.to(x.dtype), outputs)

    @torch.no_grad()
    def truncation(
        self,
        x: Tensor,
        routing: Routing | None = None,
        y: Tensor | None = None,
        gain_N: Tensor | None = None,
        exact: bool = False,
    ) -> Truncation:
        """Dropped mass ε and a bound on ‖y − ŷ‖: ŷ the routed output, y = Σ_e g_e f_e the dense sum.

        Renormalised ŷ = Σ_kept g_e f_e/(1−ε), so y = (1−ε)ŷ + Σ_dropped g_e f_e; take ŷ off and the norm:
            ‖y − ŷ‖ ≤ Σ_dropped g_e B_e(x) + ε‖ŷ‖,      B_e(x) = gain_e‖x‖^power ≥ ‖f_e(x)‖.
        Without renormalising ŷ = Σ_kept g_e f_e, and the first sum alone remains. Shared experts cancel. Valid for
        every x; the layer's own rounding comes on top.

        routing, y: as `run` returned them for this x. Without, the layer runs again: metrics do not count it, but a
            router with noise draws anew.
        gain_N: `experts.bounds.output_gains(self.experts)`, for callers that measure many batches.
        exact: compute every expert on every token and put ‖y − ŷ‖ itself into `bound`. Costs a dense forward.
        """
        checks.require(y is None or routing is not None, "y must come with the routing that led to it")
        if routing is None:
            routing = self._route_unrecorded(x)
        checks.require(
            routing.slots is None, "truncation must have a selection to measure, Soft MoE has none"
        )
        g_N, N = routing.probs, self.router.num_experts
        renormalize = self.router.selection.renormalize
        dropped_N = torch.where(routing.selected, 0.0, g_N)
        dropped = dropped_N.sum(-1)
        if exact:
            wide = x.to(g_N.dtype)
            # y − ŷ = Σ_e c_e f_e with c the gate on dropped experts, −ε·weight on kept ones. No difference of sums:
            # nothing cancels, and nothing dropped is exactly zero.
            c_N = dropped_N - dropped.unsqueeze(-1) * routing.weights if renormalize else dropped_N
            error = torch.zeros_like(wide)
            with torch.autocast(device_type=x.device.type, enabled=False):
                for e in range(N):
                    error += c_N[..., e : e + 1] * _expert(self.experts, e, wide)
            bound = error.norm(dim=-1)
        else:
            gain_N = output_gains(self.experts) if gain_N is None else gain_N
            checks.require(gain_N.shape == (N,), f"gain_N must have shape ({N},), got {tuple(gain_N.shape)}")
            length = x.to(g_N.dtype).norm(dim=-1) ** POWER[self.experts.activation]
            bound = (dropped_N * gain_N.to(g_N.dtype)).sum(-1) * length
            if renormalize:
                bound = bound + dropped * self._routed_norm(x, routing, y)
        holds = torch.isfinite(bound)
        return Truncation(dropped, torch.where(holds, bound, math.inf), holds)

    def _route_unrecorded(self, x: Tensor) -> Routing:
        record, self.router.record = self.router.record, False
        try:
            routing: Routing = self.router(x)
        finally:
            self.router.record = record
        return routing

    def _routed_norm(self, x: Tensor, routing: Routing, y: Tensor | None) -> Tensor:
        """‖ŷ‖ without the shared experts, rounded up where they are subtracted."""
        if y is None:
            return self.compute(x, routing).to(routing.probs.dtype).norm(dim=-1)
        total = y.to(routing.probs.dtype)
        if self.shared is None:
            return total.norm(dim=-1)
        # The sum ŷ + shared was rounded to y's dtype; in bf16 that is visible.
        rounding = torch.finfo(y.dtype).eps * total.norm(dim=-1)
        return (total - _expert(self.shared, 0, x)).norm(dim=-1) + rounding


def as_autocast(x: Tensor) -> Tensor:
    """Tokens in the precision a linear layer would compute in: our experts are no operator autocast knows."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _expert(weights: ExpertWeights, e: int, x: Tensor) -> Tensor:
    """f_e(x) for all tokens."""
    up, down = weights.up[e].to(x.dtype), weights.down_proj[e].to(x.dtype)
    return weights.activate(x @ up.T) @ down.T


def _takes_selection(router: Router) -> bool:
    """Whether `router.selection` alone decides. Switch and Expert Choice look at capacity, Soft MoE selects
    nothing, and a hash has one expert, all others having probability zero."""
    return type(router).select is Router.select and not isinstance(router, HashRouter | SoftMoERouter)
