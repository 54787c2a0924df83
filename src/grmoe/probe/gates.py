"""Gates at any α from one pass of the model: logits are affine in α, ℓ = a + α·b, for the same input.

Turning the dial of one layer moves the inputs of the next, so gates of later layers are predictions.

Legend: T tokens, N experts, D model width, W windows, S tokens per window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grmoe.model import GrmoeForCausalLM
from grmoe.probe.routing import layer_inputs, moe_layers
from grmoe.routing import Router


@dataclass(frozen=True)
class AffineGate:
    """ℓ = a + α·b. a: what the dial leaves alone (the prior of some routers)."""

    a_TN: Tensor
    b_TN: Tensor

    def probs(self, alpha: float | Tensor) -> Tensor:
        return torch.softmax(self.a_TN + alpha * self.b_TN, dim=-1)


@torch.no_grad()
def affine_gate(router: Router, x_TD: Tensor) -> AffineGate:
    """One router's gate for these inputs. Its α stays as it was."""
    alpha = router.alpha
    ends = []
    try:
        for value in (0.0, 1.0):
            router.alpha = value
            ends.append(router.gate(x_TD.float(), None))
    finally:
        router.alpha = alpha
    return AffineGate(ends[0], ends[1] - ends[0])


def affine_gates(model: GrmoeForCausalLM, ids_WS: Tensor) -> list[AffineGate]:
    """The gates of all MoE layers, on the inputs they have at the model's present setting."""
    inputs = layer_inputs(model, ids_WS)
    return [affine_gate(layer.router, x_TD) for layer, x_TD in zip(moe_layers(model), inputs, strict=True)]
