"""A certified bound on how far a layer's output moves when experts are dropped, from weights alone.

    ‖y − ŷ‖ ≤ Σ_e |w_e − ŵ_e|·B_e(x),        B_e(x) = gain_e·‖x‖^power ≥ ‖f_e(x)‖

y = Σ w_e f_e(x) is the trained layer and ŷ = Σ ŵ_e f_e(x) the pruned one, on the same token. A dropped expert has
ŵ_e = 0, and the weights of the others change because they share its mass. No expert is computed. The bound holds for
every token, up to the layer's own rounding. It says nothing about later layers: their tokens differ from those of the
trained model.

Legend: T tokens, N experts, G groups of a layout, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grmoe.experts.bounds import POWER
from grmoe.prune.gates import combine_weights
from grmoe.prune.layers import Layout, PrunableLayer, combine, drop
from grmoe.prune.units import outputs


@dataclass(frozen=True, kw_only=True)
class Certified:
    """A layer with experts dropped, as means over the calibration tokens."""

    block: int
    bound: float
    """Certified: ‖y − ŷ‖ is not larger."""
    error: float
    """‖y − ŷ‖ as it is."""
    output: float
    """‖y‖, to compare with."""


@torch.no_grad()
def drop_bound(layer: PrunableLayer, layout: Layout) -> Tensor:
    """The bound for each calibration token, (T,) fp64. Every group of the layout must be one expert."""
    apart_TN = (_dropped_weights(layer, layout) - combine_weights(layer.router, layer.x_TD).double()).abs()
    power = POWER[layer.experts.activation]
    return (apart_TN * layer.gain_N).sum(-1) * layer.x_TD.double().norm(dim=-1) ** power


@torch.no_grad()
def certified(layer: PrunableLayer, layout: Layout) -> Certified:
    """The bound beside the true change, which computes every expert on every token."""
    f_NTD, trained_TD = outputs(layer.experts, layer.x_TD), layer.output()
    pruned_TD = combine(_dropped_weights(layer, layout), f_NTD)
    return Certified(
        block=layer.block,
        bound=float(drop_bound(layer, layout).mean()),
        error=float((trained_TD - pruned_TD).norm(dim=-1).mean()),
        output=float(trained_TD.norm(dim=-1).mean()),
    )


def certificate_drop(layer: PrunableLayer, layout: Layout) -> Layout:
    """Drop the group with the smallest mean bound."""
    candidates = [drop(layout, g) for g in range(len(layout))]
    return min(candidates, key=lambda candidate: float(drop_bound(layer, candidate).mean()))


def _dropped_weights(layer: PrunableLayer, layout: Layout) -> Tensor:
    """ŵ of the pruned layer for all trained experts, (T, N) fp64: zero for those that were dropped."""
    kept = [e for (e,) in layout]
    weights_TG = combine_weights(layer.small_router(layout), layer.x_TD).double()
    return weights_TG.new_zeros(len(weights_TG), layer.num_experts).index_copy(
        1, torch.tensor(kept, device=weights_TG.device), weights_TG
    )
