"""What is proved about the chosen setting on calibration tokens, and how loose the proof is.

Legend: T tokens, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grmoe.certificates import entropy_bounds
from grmoe.experts.bounds import output_gains
from grmoe.layer import MoE
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.routing import layer_inputs, moe_layers
from grmoe.probe.windows import Text

TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class LayerCertificate:
    """One MoE layer. y is the sum over all experts at the same α, ŷ the sum over the selected ones.

    Numbers are means over tokens unless stated otherwise. The bound holds for every token.
    """

    layer: int
    """Block of the model, counted from zero."""
    tokens: int
    experts_per_token: float
    dropped_mean: float
    """ε, the gate's mass on experts that are not computed."""
    dropped_max: float
    entropy_lower: float
    entropy: float
    entropy_upper: float
    output: float
    """‖ŷ‖."""
    exact: float
    """‖y − ŷ‖, measured by computing every expert."""
    bound: float
    """Proved upper bound on ‖y − ŷ‖."""
    holds: bool
    """Whether the hypothesis of the bound holds for every token."""
    looseness: float
    """bound / exact; NaN where nothing is dropped."""


def certify(model: GrmoeForCausalLM, text: Text) -> list[LayerCertificate]:
    """Certificates of every MoE layer at the model's present setting."""
    inputs = layer_inputs(model, text.some(TOKENS).inputs_WS)
    layers = zip(moe_layers(model), model.config.moe_layers, inputs, strict=True)
    return [_certify(layer, block, x_TD) for layer, block, x_TD in layers]


@torch.no_grad()
def _certify(layer: MoE, block: int, x_TD: Tensor) -> LayerCertificate:
    with layer.router.uncounted():
        y_TD, routing = layer.run(x_TD)
    routed_TD = layer.compute(x_TD, routing)  # without shared experts, which truncation does not touch
    bounded = layer.truncation(x_TD, routing, y_TD, output_gains(layer.experts))
    exact = layer.truncation(x_TD, routing, y_TD, exact=True)
    band = entropy_bounds(routing.logits)
    bound, error = _mean(bounded.bound), _mean(exact.bound)
    return LayerCertificate(
        layer=block,
        tokens=len(x_TD),
        experts_per_token=_mean(routing.computed.sum(-1)),
        dropped_mean=_mean(bounded.dropped),
        dropped_max=float(bounded.dropped.max()),
        entropy_lower=_mean(band.lower.bound),
        entropy=_mean(-torch.xlogy(routing.probs, routing.probs).sum(-1)),
        entropy_upper=_mean(band.upper.bound),
        output=_mean(routed_TD.norm(dim=-1)),
        exact=error,
        bound=bound,
        holds=bool(bounded.holds.all()),
        looseness=bound / error if error else float("nan"),
    )


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
