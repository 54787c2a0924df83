"""One MoE layer on the table: its tokens, its load, and the layer it becomes under a layout.

Legend: T tokens, N experts, G groups of a layout, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grmoe.dial.gates import layer_inputs, moe_layers
from grmoe.dial.text import Text
from grmoe.experts import ExpertWeights
from grmoe.layer import MoE
from grmoe.model import GrmoeForCausalLM
from grmoe.prune.gates import reduce_router, route
from grmoe.prune.units import Match, average, match_units, outputs, resized
from grmoe.routing import Router

TOKENS = 4096  # of calibration text that a layer's experts are compared on

# Groups of experts, each of which becomes one; experts in no group are dropped.
Layout = tuple[tuple[int, ...], ...]


def whole(num_experts: int) -> Layout:
    return tuple((e,) for e in range(num_experts))


def merged(layout: Layout, a: int, b: int) -> Layout:
    """Groups a and b (places in the layout) become one."""
    rest = [group for g, group in enumerate(layout) if g not in (a, b)]
    return tuple(sorted([*rest, tuple(sorted(layout[a] + layout[b]))]))


def dropped(layout: Layout, g: int) -> Layout:
    return layout[:g] + layout[g + 1 :]


class Site:
    """An MoE layer of a model, with what it sees and does on calibration text as trained.

    load_N: the share of the combine weights each expert has over all tokens. With top-k nearly its share of the tokens;
    a load without selection, too.
    """

    def __init__(self, layer: MoE, block: int, x_TD: Tensor) -> None:
        self.layer, self.block, self.x_TD = layer, block, x_TD
        self.router: Router = layer.router
        self.experts: ExpertWeights = layer.experts
        self.num_experts = layer.router.num_experts
        self.load_N = route(self.router, x_TD).double().mean(0).cpu()
        self._matches: dict[tuple[int, int], Match] = {}

    def gate(self, layout: Layout) -> Router:
        """The router under a layout."""
        load_N = self.load_N.clamp(min=1e-12).to(self.x_TD.device)
        return reduce_router(self.router, self._ordered(layout), load_N, self.x_TD)

    @torch.no_grad()
    def weights(self, layout: Layout) -> ExpertWeights:
        """The experts under a layout. What is not merged is copied to the bit."""
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
        """Put the layer under a layout into its model; `whole` puts the original back."""
        if layout == whole(self.num_experts):
            self.layer.router, self.layer.experts = self.router, self.experts
        else:
            self.layer.router, self.layer.experts = self.gate(layout), self.weights(layout)

    @torch.no_grad()
    def output(self) -> Tensor:
        """What the routed experts give as trained, (T, D): the thing to stay close to."""
        return combine(route(self.router, self.x_TD), outputs(self.experts, self.x_TD))

    def _ordered(self, layout: Layout) -> list[list[int]]:
        """The heaviest member first: its units give the order."""
        return [sorted(group, key=lambda e: -float(self.load_N[e])) for group in layout]

    def _match(self, first: int, other: int) -> Match:
        if (first, other) not in self._matches:
            self._matches[first, other] = match_units(self.experts, first, other)
        return self._matches[first, other]


def sites(model: GrmoeForCausalLM, text: Text) -> list[Site]:
    found = layer_inputs(model, text, TOKENS)
    return [
        Site(layer, block, x_TD)
        for layer, block, x_TD in zip(moe_layers(model), model.config.moe_layers, found, strict=True)
    ]


def install(found: Sequence[Site], layouts: Sequence[Layout]) -> None:
    for site, layout in zip(found, layouts, strict=True):
        site.install(layout)


def combine(weights_TN: Tensor, f_NTD: Tensor) -> Tensor:
    return torch.einsum("tn,ntd->td", weights_TN.float(), f_NTD)
