"""Experts per token at any (α, τ) from one pass of the trained model: where to measure, not what.

A gate's logits are affine in α, ℓ = a + α·b, for the same input. Turning the dial of one layer moves the inputs of the
next, so these figures are predictions: they place the settings that are then really measured.

Legend: T tokens, N experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grmoe.dial.text import Text
from grmoe.layer import MoE
from grmoe.model import GrmoeForCausalLM

TOKENS = 2048  # enough for a mean number of experts to a percent
STEPS = 30  # of a bisection
ALPHAS = (1e-2, 1e2)  # where α is looked for


@torch.no_grad()
def layer_inputs(model: GrmoeForCausalLM, text: Text, tokens: int) -> list[Tensor]:
    """What each MoE layer sees on the first windows of a text, at the model's present setting: (T, D) each."""
    layers = moe_layers(model)
    seen: list[list[Tensor]] = [[] for _ in layers]
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0].detach()))
        for layer, kept in zip(layers, seen, strict=True)
    ]
    rows = max(1, tokens // (text.rows_WS.shape[1] - 1))
    try:
        for row_S in text.rows_WS[:rows]:
            model.model(input_ids=row_S[None, :-1].to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        model.reset_routing_metrics()
    return [torch.cat([x.flatten(0, -2) for x in kept]) for kept in seen]


def moe_layers(model: GrmoeForCausalLM) -> list[MoE]:
    return [m for m in model.modules() if isinstance(m, MoE)]


class Gates:
    """Predicted experts per token of every layer."""

    def __init__(self, model: GrmoeForCausalLM, text: Text, cap: int) -> None:
        self.cap = cap
        before = model.alpha
        self.layers: list[tuple[Tensor, Tensor]] = []  # a, b of each
        inputs = layer_inputs(model, text, TOKENS)
        with torch.no_grad():
            for layer, x_TD, alpha in zip(moe_layers(model), inputs, before, strict=True):
                ends = []
                for value in (0.0, 1.0):
                    layer.router.alpha = value
                    ends.append(layer.router.gate(x_TD.float(), None))
                layer.router.alpha = alpha
                self.layers.append((ends[0], ends[1] - ends[0]))

    def experts(self, layer: int, alpha: float, tau: float) -> float:
        """1 + how many of the first cap − 1 experts leave the mass below τ, the mean over tokens."""
        a_TN, b_TN = self.layers[layer]
        top_TK = torch.softmax(a_TN + alpha * b_TN, -1).topk(self.cap, dim=-1).values
        return 1 + float((top_TK.cumsum(-1)[:, :-1] < tau).sum(-1).double().mean())

    def tau_for(self, alphas: Sequence[float], experts: float) -> float:
        """τ at which all layers together compute `experts` on average; more mass takes more experts."""
        low, high = 0.0, 1.0
        for _ in range(STEPS):
            middle = (low + high) / 2
            mean = sum(self.experts(i, a, middle) for i, a in enumerate(alphas)) / len(self.layers)
            low, high = (middle, high) if mean < experts else (low, middle)
        return high

    def alpha_for(self, layer: int, tau: float, experts: float) -> float:
        """α at which one layer computes `experts` at this τ; sharper gates take fewer."""
        low, high = ALPHAS
        for _ in range(STEPS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.experts(layer, middle, tau) > experts else (low, middle)
        return high
