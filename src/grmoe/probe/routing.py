"""What the routers of a model see and decide, taken from its forward passes by hooks.

Legend: T tokens, N experts, D model width, W windows, S tokens per window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from grmoe.layer import MoE
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.windows import batch_rows
from grmoe.routing import Routing, RoutingMetrics, routers, uncounted
from grmoe.routing.counting import read_all
from grmoe.routing.metrics import COLLAPSE_FRACTION

DROPPED = -1  # the leading expert of a token that no expert computes
PAPER_SHARE = 0.01  # of the tokens; an expert with less has collapsed by the paper's rule


def moe_layers(model: nn.Module) -> list[MoE]:
    """All MoE layers of a model, in the order of its blocks."""
    return [m for m in model.modules() if isinstance(m, MoE)]


@dataclass(frozen=True, kw_only=True)
class RoutingFigures:
    """What the routers of a model did since the last reset. Means over MoE layers, unless it says otherwise."""

    layer_experts: tuple[float, ...]
    """Experts computed per token, by layer."""
    entropy: float
    """Of the gate, nats."""
    effective_experts_entropy: float
    """exp(H) per layer, then the mean."""
    effective_experts_inverse: float
    """1/Σg² per token, then the mean."""
    load_cv: float = math.nan
    """Standard deviation over mean of the tokens that experts receive."""
    min_load: float = math.nan
    """The smallest load over all experts and layers, as a share of the fair load."""
    collapsed: bool = False
    """In some layer an expert receives less than a tenth of its fair load."""
    collapsed_paper: bool = False
    """In some layer an expert receives less than 1 % of the tokens."""
    leading_cv: float = math.nan
    """Standard deviation over mean of the tokens that experts lead."""
    starved: tuple[int, ...] = ()
    """Experts that receive less than a tenth of their fair load, by layer."""
    starved_paper: tuple[int, ...] = ()
    """Experts that receive less than 1 % of the tokens, by layer."""

    @property
    def experts_per_token(self) -> float:
        return fmean(self.layer_experts)


def routing_figures(model: nn.Module) -> RoutingFigures:
    """Read the routers' counters, without the costly figures about frames. Waits for the device."""
    layers = read_all([router.counter for router in routers(model)])
    return RoutingFigures(
        layer_experts=tuple(m.experts_per_token for m in layers),
        entropy=fmean(m.entropy for m in layers),
        effective_experts_entropy=fmean(m.effective_experts_entropy for m in layers),
        effective_experts_inverse=fmean(m.effective_experts_inverse for m in layers),
        load_cv=fmean(m.load_cv for m in layers),
        min_load=min(
            m.min_load * len(m.load) / m.experts_per_token if m.tokens else math.nan for m in layers
        ),
        collapsed=any(m.collapsed for m in layers),
        collapsed_paper=any(m.collapsed_paper for m in layers),
        leading_cv=fmean(m.leading_cv for m in layers),
        starved=tuple(_starved(m)[0] for m in layers),
        starved_paper=tuple(_starved(m)[1] for m in layers),
    )


def _starved(metrics: RoutingMetrics) -> tuple[int, int]:
    """Experts below (a tenth of the fair load, 1 % of the tokens).

    A flag says that there is one. Where every seed has one, only their number can still grow.
    """
    if not metrics.tokens:
        return 0, 0
    # From counts, as the flags are, because equal whole numbers stay equal under rounding.
    received = [round(share * metrics.tokens) for share in metrics.load]
    limits = COLLAPSE_FRACTION * sum(received) / len(received), PAPER_SHARE * metrics.tokens
    few, few_paper = (sum(count < limit for count in received) for limit in limits)
    return few, few_paper


@contextmanager
def recorded(model: nn.Module, inputs: list[Tensor] | None = None) -> Iterator[list[Routing]]:
    """Yield a list that holds the `Routing` of every MoE layer after a forward pass; clear it before the next.

    The routers' metrics stay as they were. inputs: a list that gets the tokens each router saw; clear it as well.
    """
    seen: list[Routing] = []

    def record(_: nn.Module, args: tuple[Tensor, ...], out: Routing) -> None:
        seen.append(out)
        if inputs is not None:
            inputs.append(args[0])

    hooks = [router.register_forward_hook(record) for router in routers(model)]
    try:
        with uncounted(model):
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


def leading_expert(routing: Routing) -> Tensor:
    """The expert of the largest combine weight, (...); DROPPED where none computes the token (paper: top-1)."""
    weights = torch.where(routing.selected, routing.weights, -1.0)
    return torch.where(routing.selected.any(-1), weights.argmax(-1), DROPPED)


@torch.no_grad()
def layer_inputs(model: GrmoeForCausalLM, ids_WS: Tensor) -> list[Tensor]:
    """What each MoE layer sees for these tokens at the model's present setting: (T, D) per layer."""
    layers = moe_layers(model)
    seen: list[list[Tensor]] = [[] for _ in layers]
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0].detach()))
        for layer, kept in zip(layers, seen, strict=True)
    ]
    try:
        for part_WS in ids_WS.to(model.device).split(batch_rows(ids_WS.shape[1], model.device)):
            model.model(input_ids=part_WS.contiguous(), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        model.reset_routing_metrics()
    return [torch.cat([x.flatten(0, -2) for x in kept]) for kept in seen]
