"""Predict experts per token at any (α, τ) from one pass of the trained model.

A gate's logits are affine in α for the same input (`grmoe.probe.gates`). A new α in one layer moves the inputs of the
next, so these numbers are predictions. They only decide which settings are measured.

Legend: T tokens, K cap.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from grmoe.dial.setting import Norms
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.gates import AffineGate, affine_gates
from grmoe.probe.windows import Text

TOKENS = 2048  # gives the mean number of experts to about one percent
STEPS = 30  # of a bisection
ALPHAS = (1e-2, 1e2)  # range of the search for α


class Gates:
    """Predicted experts per token of every layer under the mass rule."""

    def __init__(self, model: GrmoeForCausalLM, text: Text, cap: int) -> None:
        self.cap = cap
        self.layers = affine_gates(model, text.first(TOKENS).inputs_WS)

    def times(self, norms: Norms) -> Gates:
        """The same for experts chosen by gate × norm: softmax(ℓ + log n)."""
        other = copy.copy(self)
        other.layers = [
            AffineGate(g.a_TN + g.a_TN.new_tensor(n).log(), g.b_TN)
            for g, n in zip(self.layers, norms, strict=True)
        ]
        return other

    def experts(self, layer: int, alpha: float, tau: float) -> float:
        """Mean over tokens of 1 + #{j < cap : the j most probable experts hold less than τ}."""
        top_TK = self.layers[layer].probs(alpha).topk(self.cap, dim=-1).values
        return 1 + float((top_TK.cumsum(-1)[:, :-1] < tau).sum(-1).double().mean())

    def tau_for(self, alphas: Sequence[float], experts: float) -> float:
        """τ at which the layers compute `experts` on average. A larger τ needs more experts."""
        low, high = 0.0, 1.0
        for _ in range(STEPS):
            middle = (low + high) / 2
            mean = sum(self.experts(i, a, middle) for i, a in enumerate(alphas)) / len(self.layers)
            low, high = (middle, high) if mean < experts else (low, middle)
        return high

    def alpha_for(self, layer: int, tau: float, experts: float) -> float:
        """α at which one layer computes `experts` at this τ. A larger α needs fewer experts."""
        low, high = ALPHAS
        for _ in range(STEPS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.experts(layer, middle, tau) > experts else (low, middle)
        return high
