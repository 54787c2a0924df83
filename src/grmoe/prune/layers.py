"""One MoE layer that is being pruned: its tokens, its load, and the smaller layer for a layout.

Legend: T tokens, N experts, G groups of a layout, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from grmoe.experts import ExpertWeights
from grmoe.experts.bounds import output_gains
from grmoe.layer import MoE
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.routing import layer_inputs, moe_layers
from grmoe.probe.windows import Text
from grmoe.prune.gates import combine_weights, reduce_router
from grmoe.prune.units import Match, average, match_units, outputs, resized
from grmoe.routing import Router

TOKENS = 4096  # calibration tokens on which a layer's experts are compared

# Groups of experts. Each group becomes one expert; experts in no group are dropped.
Layout = tuple[tuple[int, ...], ...]


def all_experts(num_experts: int) -> Layout:
    """The layout that changes nothing."""
    return tuple((e,) for e in range(num_experts))


def merge(layout: Layout, a: int, b: int) -> Layout:
    """The layout in which groups a and b (indices into the layout) are one."""
    rest = [group for g, group in enumerate(layout) if g not in (a, b)]
    return tuple(sorted([*rest, tuple(sorted(layout[a] + layout[b]))]))


def drop(layout: Layout, g: int) -> Layout:
    """The layout without group g."""
    return layout[:g] + layout[g + 1 :]


class PrunableLayer:
    """An MoE layer of a model, with what it sees and computes on calibration text as trained.

    load_N: each expert's share of the combine weights over all tokens. With top-k that is nearly its share of tokens.
    """

    def __init__(self, layer: MoE, block: int, x_TD: Tensor) -> None:
        self.layer, self.block, self.x_TD = layer, block, x_TD
        self.router: Router = layer.router
        self.experts: ExpertWeights = layer.experts
        self.num_experts = layer.router.num_experts
        self.load_N = combine_weights(self.router, x_TD).double().mean(0).cpu()
        self._matches: dict[tuple[int, int], Match] = {}

    @cached_property
    def gain_N(self) -> Tensor:
        """Bounds on the experts' outputs, (N,) fp64: see `grmoe.experts.bounds`."""
        return output_gains(self.experts)

    def small_router(self, layout: Layout) -> Router:
        """The router for a layout."""
        load_N = self.load_N.clamp(min=1e-12).to(self.x_TD.device)
        return reduce_router(self.router, self._ordered(layout), load_N, self.x_TD)

    @torch.no_grad()
    def small_experts(self, layout: Layout) -> ExpertWeights:
        """The experts for a layout. Unmerged experts are copied bit for bit."""
        groups = self._ordered(layout)
        firsts = [group[0] for group in groups]
        up, down = self.experts.up[firsts].clone(), self.experts.down_proj[firsts].clone()
        for g, group in enumerate(groups):
            if len(group) > 1:
                load = self.load_N[group].clamp(min=1e-12)
                matches = [self._match(group[0], e) for e in group[1:]]
                up[g], down[g] = average(self.experts, group, (load / load.sum()).tolist(), matches)
        return resized(self.experts, up, down)

    def install(self, layout: Layout) -> None:
        """Put the smaller layer into the model. `all_experts` puts the original back."""
        if layout == all_experts(self.num_experts):
            self.layer.router, self.layer.experts = self.router, self.experts
        else:
            self.layer.router = self.small_router(layout)
            self.layer.experts = self.small_experts(layout)

    @torch.no_grad()
    def output(self) -> Tensor:
        """Output of the routed experts as trained, (T, D)."""
        return combine(combine_weights(self.router, self.x_TD), outputs(self.experts, self.x_TD))

    def _ordered(self, layout: Layout) -> list[list[int]]:
        """Groups with their most loaded expert first. Its hidden units give the order for the merged expert."""
        return [sorted(group, key=lambda e: -float(self.load_N[e])) for group in layout]

    def _match(self, first: int, other: int) -> Match:
        if (first, other) not in self._matches:
            self._matches[first, other] = match_units(self.experts, first, other)
        return self._matches[first, other]


def prunable_layers(model: GrmoeForCausalLM, text: Text) -> list[PrunableLayer]:
    """All MoE layers of a model, with their inputs on some windows of a text."""
    inputs = layer_inputs(model, text.some(TOKENS).inputs_WS)
    return [
        PrunableLayer(layer, block, x_TD)
        for layer, block, x_TD in zip(moe_layers(model), model.config.moe_layers, inputs, strict=True)
    ]


def install(layers: Sequence[PrunableLayer], layouts: Sequence[Layout]) -> None:
    """Put one layout into each layer."""
    for layer, layout in zip(layers, layouts, strict=True):
        layer.install(layout)


def combine(weights_TN: Tensor, f_NTD: Tensor) -> Tensor:
    """Σ_n w_n f_n(x) per token, (T, D)."""
    return torch.einsum("tn,ntd->td", weights_TN.float(), f_NTD)
