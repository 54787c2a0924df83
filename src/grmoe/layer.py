"""The Mixture-of-Experts layer: router → selection → dispatch → experts → combine. Each part can be replaced.

Legend: T tokens (all leading dimensions together), D model width, N experts, P slots per expert (Soft MoE).
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
from grmoe.experts.one_token import one_token_experts, takes_one
from grmoe.experts.weights import Activation, with_weights_at_hand
from grmoe.kernels.runtime import autocast_dtype
from grmoe.routing import (
    GrassmannRouter,
    Router,
    Routing,
    Selection,
    SlotMixing,
    TopK,
)


@dataclass(frozen=True)
class Truncation:
    """The error of computing only the selected experts, per token; tensors shaped like the tokens."""

    dropped: Tensor
    """ε, the gate's mass on experts not computed."""
    bound: Tensor
    """Bound on ‖y − ŷ‖ against the dense sum; with `exact` the error itself; ∞ where not `holds`."""
    holds: Tensor
    """False for a token with NaN or Inf in its computation."""


class ExpertTransport(Protocol):
    """Runs the rows of a dispatch list through experts that are spread over several processes."""

    def __call__(self, x_TD: Tensor, dispatch: Dispatch, experts: ExpertWeights, backend: str) -> Tensor: ...


class MoE(nn.Module):
    """N feed-forward experts behind a router.

    router: any `Router`. Its identity experts come on top of `num_experts`. Default:
        a `GrassmannRouter` of rank dim // num_experts with top-2 selection.
    selection: which experts a token gets. Replaces the router's own selection.
    activation: "swiglu" (width `hidden` after the gate) or "gelu".
    backend: "reference" (a loop, any dtype), "grouped" (grouped GEMMs), "triton" (our kernels, CUDA), or "auto": the
        fastest that runs on the tokens' device, dtype and shape. See `use_backend` for the router's part.
    shared_experts: number of experts that compute every token with weight one, beside the routed ones.
    experts: weights of these sizes, in place of new ones.
    transport: attribute. None runs the experts in this process, `grmoe.parallel.experts.ExpertParallel` in several.
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
        for name, size in (("dim", dim), ("hidden", hidden), ("num_experts", num_experts)):
            checks.positive_int(name, size)
        checks.require(
            router is None or isinstance(router, Router),
            f"router must be a Router, such as GrassmannRouter({dim}, {num_experts}, rank), or None, got {router!r}",
        )
        checks.require(
            selection is None or (hasattr(selection, "max_experts") and not isinstance(selection, type)),
            f"selection must be a policy such as TopK(2), or None, got {selection!r}",
        )
        checks.require(
            experts is None or isinstance(experts, ExpertWeights),
            f"experts must be ExpertWeights or None, got {experts!r}",
        )
        if router is None:
            rank = max(1, dim // num_experts)
            router = GrassmannRouter(dim, num_experts, rank, selection=TopK(min(2, num_experts)))
        sizes = (router.dim, router.num_experts - router.identity_experts)
        wanted = (dim, num_experts)
        checks.require(
            sizes == wanted, f"router must be built for (dim, num_experts) = {wanted}, got {sizes}"
        )
        checks.require(
            not router.identity_experts or router.takes_selection,
            f"identity must be 0 for a {type(router).__name__}, which makes its own choice",
        )
        if selection is not None:
            router.selection = selection
        self.router = router
        self.backend = checks.one_of("backend", backend, ("auto", *BACKENDS))
        if backend != "auto":  # with "auto" the router keeps its own backend
            self.use_backend(backend)
        self.experts = ExpertWeights(dim, hidden, num_experts, activation) if experts is None else experts
        shape, kind = tuple(self.experts.down_proj.shape), self.experts.activation
        checks.require(
            (shape, kind) == ((num_experts, dim, hidden), activation),
            f"experts must be {num_experts} of {dim} × {hidden}, {activation}, got {shape}, {kind}",
        )
        checks.positive_int("shared_experts", shared_experts, at_least=0)
        self.transport: ExpertTransport | None = None
        # k experts of width I with weight one equal one expert of width k·I.
        self.shared = ExpertWeights(dim, shared_experts * hidden, 1, activation) if shared_experts else None

    def use_backend(self, name: str) -> None:
        """Set the backend of experts and router: "reference" and "grouped" leave the gate to PyTorch as well, "triton"
        requires its kernel, and with any other name the router chooses."""
        self.backend = name
        gates: dict[str, Literal["reference", "triton"]] = {
            "reference": "reference",
            "grouped": "reference",
            "triton": "triton",
        }
        self.router.backend = gates.get(name, "auto")

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Output of the layer, with the shape and dtype of x."""
        return self.run(x, token_ids)[0]

    def run(self, x: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, Routing]:
        """The output, and the router's decision (its `aux_loss`, probabilities and selection)."""
        # Cast first, so that the router sees the same tokens in training and in a model served in 16 bits.
        x = as_autocast(x)
        routing = self.router(x, token_ids)
        y = self.mix(x, routing.slots) if routing.slots is not None else self.compute(x, routing)
        if (shared := self.shared) is not None:
            y = y + with_weights_at_hand(shared, lambda: _expert(shared, 0, x))
        return y, routing

    def compute(self, x: Tensor, routing: Routing) -> Tensor:
        """The routed experts for a given routing. Activation checkpointing replays one this way."""
        x_TD = x.reshape(-1, x.shape[-1])
        shape = (x_TD.shape[0], self.router.num_experts)
        weights_TN, selected_TN = routing.weights.reshape(shape), routing.selected.reshape(shape)
        if self.router.identity_experts:  # they have no weights, and nothing is sent to them
            computed = self.router.num_experts - self.router.identity_experts
            weights_TN, selected_TN = (t[:, :computed].contiguous() for t in (weights_TN, selected_TN))
        return self._run_experts(x_TD, weights_TN, selected_TN, self.router.max_experts()).view(x.shape)

    def _run_experts(self, x_TD: Tensor, weights_TN: Tensor, selected_TN: Tensor, max_experts: int) -> Tensor:
        backend, own = pick_backend(self.backend, x_TD), isinstance(self.experts, ExpertWeights)
        if backend == "triton" and self.transport is None and own and takes_one(x_TD):
            gates = (weights_TN, selected_TN)
            return with_weights_at_hand(
                self.experts, lambda: one_token_experts(x_TD, *gates, self.experts, max_experts)
            )
        dispatch = Dispatch.build(weights_TN, selected_TN, max_experts, kernels=backend == "triton")
        if self.transport is not None:
            return self.transport(x_TD, dispatch, self.experts, backend)
        if not own:  # wrapped by an adapter
            return self.experts(x_TD, dispatch, BACKENDS[backend])
        return with_weights_at_hand(self.experts, lambda: BACKENDS[backend](x_TD, dispatch, self.experts))

    def mix(self, x: Tensor, slots: SlotMixing) -> Tensor:
        """Soft MoE: experts compute slots, weighted means of a sequence's tokens."""
        # A NaN token has weight zero in every slot, but 0·NaN is NaN.
        finite = torch.isfinite(x).all(-1, keepdim=True)
        clean = torch.where(finite, x, 0.0)
        inputs = torch.einsum("...tnp,...td->...npd", slots.to_slots.to(x.dtype), clean)
        N, P, D = inputs.shape[-3:]
        rows_AD = inputs.reshape(-1, N, P, D).transpose(0, 1).reshape(-1, D)
        each = rows_AD.shape[0] // N
        expert = torch.arange(rows_AD.shape[0], device=x.device) // max(1, each)
        selected = expert.unsqueeze(-1) == torch.arange(N, device=x.device)
        out_AD = self._run_experts(rows_AD, selected.to(torch.float32), selected, 1)
        outputs = out_AD.view(N, -1, P, D).transpose(0, 1).view(inputs.shape)
        return torch.einsum("...tnp,...npd->...td", slots.from_slots.to(x.dtype), outputs)

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

        Renormalised, ŷ = Σ_kept g_e f_e/(1−ε), so y = (1−ε)ŷ + Σ_dropped g_e f_e. Subtract ŷ and take the norm:
            ‖y − ŷ‖ ≤ Σ_dropped g_e B_e(x) + ε‖ŷ‖,      B_e(x) = gain_e‖x‖^power ≥ ‖f_e(x)‖.
        Without renormalising, ŷ = Σ_kept g_e f_e, and only the first sum remains. Shared experts cancel. The bound
        holds for every x, up to the layer's own rounding.

        routing, y: as `run` returned them for this x. Without them the layer runs again. Metrics do not count that run,
            but a router with noise draws new noise.
        gain_N: `experts.bounds.output_gains(self.experts)`, for callers that measure many batches.
        exact: compute every expert on every token and return ‖y − ŷ‖ itself as `bound`. Costs a dense forward.
        """
        checks.require(y is None or routing is not None, "y must come with the routing it was computed with")
        if routing is None:
            with self.router.uncounted():
                routing = self.router(x)
        assert routing is not None
        checks.require(routing.slots is None, "truncation needs a selection to measure, Soft MoE has none")
        g_N, N = routing.probs, self.router.num_experts - self.router.identity_experts
        renormalize = self.router.selection.renormalize
        dropped_N = torch.where(routing.selected, 0.0, g_N)
        dropped = dropped_N.sum(-1)
        if exact:
            wide = x.to(g_N.dtype)
            # y − ŷ = Σ_e c_e f_e with c_e = g_e on dropped experts and −ε·weight_e on kept ones. Without a difference
            # of two sums nothing cancels, and the error is exactly zero where nothing was dropped.
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
            bound = (dropped_N[..., :N] * gain_N.to(g_N.dtype)).sum(-1) * length
            if renormalize:
                bound = bound + dropped * self._routed_norm(x, routing, y)
        holds = torch.isfinite(bound)
        return Truncation(dropped, torch.where(holds, bound, math.inf), holds)

    def _routed_norm(self, x: Tensor, routing: Routing, y: Tensor | None) -> Tensor:
        """‖ŷ‖ without the shared experts; rounded up where they must be subtracted."""
        if y is None:
            return self.compute(x, routing).to(routing.probs.dtype).norm(dim=-1)
        total = y.to(routing.probs.dtype)
        if self.shared is None:
            return total.norm(dim=-1)
        # The sum ŷ + shared was rounded to y's dtype, which matters in bf16.
        rounding = torch.finfo(y.dtype).eps * total.norm(dim=-1)
        return (total - _expert(self.shared, 0, x)).norm(dim=-1) + rounding


def as_autocast(x: Tensor) -> Tensor:
    """Tokens in the precision a linear layer would compute in, because autocast does not cast for our experts."""
    return x.to(autocast_dtype(x))


def _expert(weights: ExpertWeights, e: int, x: Tensor) -> Tensor:
    """f_e(x) for all tokens."""
    up, down = weights.up[e].to(x.dtype), weights.down_proj[e].to(x.dtype)
    return weights.activate(x @ up.T) @ down.T
