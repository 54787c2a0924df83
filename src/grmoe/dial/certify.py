"""What is provably true of the chosen setting on the tokens it was measured on, and how loose the proof is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grmoe.certificates import entropy_bounds
from grmoe.dial.gates import layer_inputs, moe_layers
from grmoe.dial.setting import Setting, apply
from grmoe.dial.text import Text
from grmoe.experts.bounds import output_gains
from grmoe.layer import MoE
from grmoe.model import GrmoeForCausalLM

TOKENS = 1024


@dataclass(frozen=True)
class LayerCertificate:
    """Of one MoE layer, means over tokens unless said otherwise. y is the dense sum at the same α, ŷ what is computed.

    The bound holds for any token; `exact` is the error itself, for which every expert was computed.
    """

    layer: int
    tokens: int
    experts: float
    dropped_mean: float  # ε, the gate's mass on experts not computed
    dropped_max: float
    entropy_lower: float
    entropy: float
    entropy_upper: float
    output: float  # ‖ŷ‖
    exact: float  # ‖y − ŷ‖
    bound: float  # on it
    holds: bool  # the bound's hypothesis, of every token

    @property
    def looseness(self) -> float:
        """How many times the true error the bound is."""
        return self.bound / self.exact if self.exact else float("nan")


def certify(model: GrmoeForCausalLM, setting: Setting, text: Text) -> list[LayerCertificate]:
    """The model is left at `setting`."""
    apply(model, setting)
    inputs = layer_inputs(model, text, TOKENS)
    blocks = model.config.moe_layers
    return [
        _certify(layer, block, x_TD)
        for layer, block, x_TD in zip(moe_layers(model), blocks, inputs, strict=True)
    ]


@torch.no_grad()
def _certify(layer: MoE, block: int, x_TD: torch.Tensor) -> LayerCertificate:
    with layer.router.uncounted():
        y_TD, routing = layer.run(x_TD)
    # The shared experts are no part of the truncation, nor of what it is compared with.
    routed_TD = layer.compute(x_TD, routing)
    bounded = layer.truncation(x_TD, routing, y_TD, output_gains(layer.experts))
    exact = layer.truncation(x_TD, routing, y_TD, exact=True)
    band = entropy_bounds(routing.logits)
    entropy_T = -torch.xlogy(routing.probs, routing.probs).sum(-1)

    def mean(values: torch.Tensor) -> float:
        return float(values.double().mean())

    return LayerCertificate(
        layer=block,
        tokens=len(x_TD),
        experts=mean(routing.selected.sum(-1)),
        dropped_mean=mean(bounded.dropped),
        dropped_max=float(bounded.dropped.max()),
        entropy_lower=mean(band.lower.bound),
        entropy=mean(entropy_T),
        entropy_upper=mean(band.upper.bound),
        output=mean(routed_TD.norm(dim=-1)),
        exact=mean(exact.bound),
        bound=mean(bounded.bound),
        holds=bool(bounded.holds.all()),
    )
