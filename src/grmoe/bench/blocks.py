"""MoE blocks that compute the same thing: ours in every form, and those of other libraries.

All blocks of a `Setting` get the same tokens and the same expert weights. The other libraries get the usual softmax
gate. Errors are measured against fp64, on fewer tokens with an uneven load: one expert gets nothing, one gets most.

Legend: T tokens, D model width, N experts, K experts per token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from grmoe.bench.measure import SEED, relative_error
from grmoe.bench.shapes import LayerShape, default_rank
from grmoe.experts import Dispatch, ExpertWeights
from grmoe.experts.reference import reference_experts
from grmoe.kernels.combine import combine_weights
from grmoe.layer import MoE
from grmoe.routing import GrassmannRouter, Router, Selection, SoftmaxRouter, TopK

CHECKED_TOKENS = 2048
STARVED, FAVOURED = -8.0, 3.0  # shifts of the first and the last expert's logit; logits spread by about one

Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Block:
    """A whole MoE block: router and experts."""

    call: Call
    parameters: list[nn.Parameter]
    errors: Callable[[], dict[str, float]]
    module: nn.Module | None = None
    served: Call | None = None  # the same block in eval mode, for the forward alone; None: the call itself

    def forward(self, x_TD: Tensor) -> Tensor:
        with torch.no_grad():
            return (self.call if self.served is None else self.served)(x_TD)

    def both(self, x_TD: Tensor, grad_TD: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the input and of every parameter, given the gradient of the output."""
        return torch.autograd.grad(self.call(x_TD), [x_TD, *self.parameters], grad_TD)


class Setting:
    """The tokens and weights of one shape, and the blocks that use them."""

    def __init__(
        self,
        shape: LayerShape,
        rank: int | None,
        device: torch.device,
        dtype: torch.dtype,
        selection: Selection | None = None,
    ) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        T, D, N = shape.tokens, shape.dim, shape.experts
        torch.manual_seed(SEED)
        with torch.device(device):
            self.x_TD = torch.randn(T, D).to(dtype).requires_grad_()
            self.grad_TD = torch.randn(T, D).to(dtype)
            self.experts = ExpertWeights(D, shape.width, N).to(dtype)
            # The other libraries scale the kept weights back to sum one.
            self.softmax = SoftmaxRouter(D, N, shape.top_k, selection=TopK(shape.top_k, renormalize=True))
            self.gate_ND = nn.Parameter(self.softmax.weight.detach().to(dtype))
        rank = default_rank(D, N) if rank is None else rank
        # Frames are drawn on the CPU.
        self.grassmann = GrassmannRouter(D, N, rank, selection=selection or TopK(shape.top_k)).to(device)

    @cached_property
    def experts64(self) -> ExpertWeights:
        return copy.deepcopy(self.experts).double()

    # -- ours ------------------------------------------------------------------------------------------

    def ours(self, backend: str = "auto", router: Router | None = None, compiled: bool = False) -> Block:
        """Our layer, with the Grassmann gate unless another router is given."""
        router = copy.deepcopy(router or self.grassmann)  # a layer tells its router which backend to use
        moe = self.layer(router, backend)

        def prepared(layer: MoE) -> Call:
            # Only one shape is timed: a graph for all shapes would be slower.
            return torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer

        def errors() -> dict[str, float]:
            probe = self.layer(skewed(router), backend)
            return self.errors(probe, prepared(probe))

        served = self.layer(copy.deepcopy(router), backend).eval()
        return Block(prepared(moe), list(moe.parameters()), errors, moe, prepared(served))

    def gate(self, rank: int | None = None, **options: Any) -> GrassmannRouter:
        """Another Grassmann gate with the same frames, or with their first `rank` directions. Its further weights are
        random: zeros would do nothing."""
        frames = self.grassmann.frames.detach()[..., :rank].cpu()
        options = {"selection": self.grassmann.selection, "init": frames, **options}
        router = GrassmannRouter(self.shape.dim, self.shape.experts, frames.shape[2], **options)
        known = dict(self.grassmann.named_parameters())
        torch.manual_seed(SEED)
        for name, weight in router.named_parameters():
            if name not in known:
                nn.init.normal_(weight, std=0.02)
        return router.to(self.device)

    def layer(self, router: Router, backend: str = "auto") -> MoE:
        """A layer around the shared experts."""
        name: Any = backend  # from BACKENDS at run time; the signature lists them
        with torch.device(self.device):
            moe = MoE(self.shape.dim, self.shape.width, self.shape.experts, router, backend=name)
        moe.experts = self.experts
        return moe

    def errors(self, moe: MoE, call: Call, x_TD: Tensor | None = None) -> dict[str, float]:
        """Errors of the output and of every gradient, against the reference in fp64 with the same selection."""
        x_TD = (self.x_TD if x_TD is None else x_TD)[:CHECKED_TOKENS].detach().requires_grad_()
        grad_TD = self.grad_TD[: len(x_TD)]
        named = dict(moe.router.named_parameters()) | dict(moe.experts.named_parameters())
        y_TD = call(x_TD)
        gradients = torch.autograd.grad(y_TD, [x_TD, *named.values()], grad_TD)

        x64_TD = x_TD.detach().double().requires_grad_()
        moe64, y64_TD = self._exact(moe, x_TD, x64_TD)
        named64 = dict(moe64.router.named_parameters()) | dict(moe64.experts.named_parameters())
        gradients64 = torch.autograd.grad(y64_TD, [x64_TD, *named64.values()], grad_TD.double())
        pairs = zip(["x", *named], gradients, gradients64, strict=True)
        return {"y": relative_error(y_TD, y64_TD)} | {name: relative_error(a, b) for name, a, b in pairs}

    @torch.no_grad()
    def output_error(self, moe: MoE) -> dict[str, float]:
        """Of the output in eval mode, for forms that have no backward."""
        x_TD = self.x_TD[:CHECKED_TOKENS].detach()
        y_TD = moe.eval()(x_TD)
        return {"y": relative_error(y_TD, self._exact(moe, x_TD, x_TD.double())[1])}

    def _exact(self, moe: MoE, x_TD: Tensor, x64_TD: Tensor) -> tuple[MoE, Tensor]:
        """The same layer in fp64 and its output, with the selection that `moe` makes."""
        with torch.no_grad():
            selected_TN = moe.router(x_TD).selected
        moe64 = self.layer(as_reference(moe.router), "reference")
        moe64.experts = self.experts64
        return moe64, routed(moe64, x64_TD, selected_TN)

    # -- other libraries ----------------------------------------------------------------------------------------

    def hugging_face(self, experts: str = "grouped_mm") -> Block:
        """`OlmoeSparseMoeBlock` on PyTorch's grouped GEMMs: its fastest form without other libraries' kernels.

        experts: the implementation. "batched_mm" may be faster for a few tokens.
        """
        olmoe: Any = import_module("transformers.models.olmoe.modeling_olmoe")
        shape = self.shape
        config = olmoe.OlmoeConfig(
            hidden_size=shape.dim,
            intermediate_size=shape.width,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            norm_topk_prob=True,
            num_attention_heads=1,  # unused here, but it must divide hidden_size
        )
        config._experts_implementation = experts
        with torch.device("meta"):
            block: Any = olmoe.OlmoeSparseMoeBlock(config)
        block.gate.weight = self.gate_ND
        block.experts.gate_up_proj = self.experts.gate_up_proj
        block.experts.down_proj = self.experts.down_proj

        def call(x_TD: Tensor) -> Tensor:
            y = block(x_TD.unsqueeze(0))
            return (y[0] if isinstance(y, tuple) else y).squeeze(0)  # a tuple before transformers 5

        named = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
        return Block(call, named, lambda: self.peer_errors(call, named), block)

    def liger(self) -> Block:
        fused: Any = import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
        up, down = self.experts.up, self.experts.down_proj

        def call(x_TD: Tensor) -> Tensor:
            weight_TK, expert_TK = softmax_gate(x_TD, self.gate_ND, self.shape.top_k)
            y_TD: Tensor = fused.apply(x_TD, up, down, expert_TK.to(torch.int32), weight_TK)
            return y_TD

        parameters = [self.gate_ND, *self.experts.parameters()]
        return Block(call, parameters, lambda: self.peer_errors(call, parameters))

    def scattermoe(self) -> Block:
        mlp: Any = import_module("scattermoe.mlp")
        shape = self.shape
        with torch.device("meta"):
            experts = mlp.GLUMLP(shape.dim, shape.width, shape.experts, shape.top_k)
        gate, up = self.experts.up.detach().chunk(2, dim=1)
        experts.experts.weight = nn.Parameter(torch.cat([up, gate], dim=1))  # its gate comes second
        experts.output_experts.weight = self.experts.down_proj

        def call(x_TD: Tensor) -> Tensor:
            weight_TK, expert_TK = softmax_gate(x_TD, self.gate_ND, shape.top_k)
            y_TD: Tensor = experts(x_TD, weight_TK, expert_TK)
            return y_TD

        parameters = [self.gate_ND, experts.experts.weight, experts.output_experts.weight]
        return Block(call, parameters, lambda: self.peer_errors(call, parameters, swapped_halves))

    def peer_errors(
        self,
        call: Call,
        parameters: Sequence[Tensor] = (),
        layout: Callable[[Tensor], Tensor] = lambda gradient: gradient,
    ) -> dict[str, float]:
        """Errors against fp64 of the output, and of the gradients of `parameters` if the block has any.

        parameters: gate, first and second matrices of the experts. layout: from its first matrices to ours.
        The reference computes the experts that the softmax gate chose.
        """
        K = self.shape.top_k
        x_TD, expert_TK = self.skewed_tokens()
        y_TD = call(x_TD) if parameters else torch.no_grad()(call)(x_TD)
        up64, down64 = self.experts64.up, self.experts64.down_proj
        x64_TD, gate64_ND = (t.detach().double().requires_grad_() for t in (x_TD, self.gate_ND))
        probs_TN = torch.softmax(x64_TD @ gate64_ND.T, -1)
        chosen_TK = probs_TN.gather(1, expert_TK)
        weights_TN = torch.zeros_like(probs_TN).scatter(1, expert_TK, chosen_TK / chosen_TK.sum(-1, True))
        dispatch = Dispatch.build(weights_TN, weights_TN > 0, K)
        y64_TD = reference_experts(x64_TD, dispatch, self.experts64)
        errors = {"y": relative_error(y_TD, y64_TD)}
        if not parameters:
            return errors
        grad_TD = self.grad_TD[: len(x_TD)]
        d_x, d_gate, d_up, d_down = torch.autograd.grad(y_TD, [x_TD, *parameters], grad_TD)
        leaves64 = [x64_TD, gate64_ND, up64, down64]
        gradients64 = torch.autograd.grad(y64_TD, leaves64, grad_TD.double())
        names = ("x", "weight", "gate_up_proj", "down_proj")
        pairs = zip(names, (d_x, d_gate, layout(d_up), d_down), gradients64, strict=True)
        return errors | {name: relative_error(a, b) for name, a, b in pairs}

    def skewed_tokens(self) -> tuple[Tensor, Tensor]:
        """Tokens that starve the first expert of the softmax gate and favour the last; the experts it chooses, (T, K).

        Tokens with a tie between a chosen expert and another are left out. Libraries break ties differently.
        """
        N, K = self.shape.experts, self.shape.top_k
        with torch.no_grad():
            shift_N = torch.zeros(N, device=self.device)
            shift_N[0], shift_N[-1] = STARVED, FAVOURED
            # A softmax gate without bias is skewed through its input: Wc = shift.
            c_D = torch.linalg.pinv(self.gate_ND.float()) @ shift_N
            x_TD = (self.x_TD[:CHECKED_TOKENS] + c_D).to(self.dtype)
            if K < N:
                logits_TN = nn.functional.linear(x_TD, self.gate_ND).sort(-1, descending=True).values
                clear_T = logits_TN[:, K - 1] > logits_TN[:, K]
                x_TD = x_TD[clear_T | ~clear_T.any()]  # of one token with a tie something must remain
            _, expert_TK = softmax_gate(x_TD, self.gate_ND, K)
        return x_TD.requires_grad_(), expert_TK


def swapped_halves(gradient_NID: Tensor) -> Tensor:
    """The first matrices of experts with the two halves of SwiGLU in the other order."""
    return torch.cat(gradient_NID.chunk(2, dim=1)[::-1], dim=1)


def softmax_gate(x_TD: Tensor, weight_ND: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The softmax gate of OLMoE, Mixtral and Qwen: (weights in the model's dtype, experts), both (T, K)."""
    logits_TN = nn.functional.linear(x_TD, weight_ND)
    probs_TN = nn.functional.softmax(logits_TN, dim=-1, dtype=torch.float)
    weight_TK, expert_TK = torch.topk(probs_TN, top_k, dim=-1)
    weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
    return weight_TK.to(x_TD.dtype), expert_TK


def routed(moe: MoE, x_TD: Tensor, selected_TN: Tensor) -> Tensor:
    """The layer with a given selection, weighted by its own gate."""
    routing = moe.router(x_TD)
    weights_TN = combine_weights(routing.logits, routing.probs, selected_TN, moe.router.selection.renormalize)
    return moe.compute(x_TD, replace(routing, selected=selected_TN, weights=weights_TN))


def skewed(router: Router) -> Router:
    """A copy that starves the first expert and favours the last."""
    router = copy.deepcopy(router)
    router.log_prior[0], router.log_prior[-1] = STARVED, FAVOURED
    return router


def as_reference(router: Router) -> Router:
    """A copy in fp64 on the reference backend."""
    router = copy.deepcopy(router).double()
    router.backend = "reference"
    return router
