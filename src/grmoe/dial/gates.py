"""Predict experts per token at any (α, τ) from one pass of the trained model.

A gate's logits are affine in α for the same input (`grmoe.probe.gates`). A new α in one layer moves the inputs of the
next, so these numbers are predictions. They only decide which settings are measured.

Legend: T tokens, K cap.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grmoe.dial.setting import Norms
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.gates import AffineGate, affine_gates
from grmoe.probe.windows import Text
from grmoe.routing.curve import NO_WEIGHT, LayerNumbers
from grmoe.routing.selection import largest

TOKENS = 2048  # gives the mean number of experts to about one percent
STEPS = 30  # of a bisection
ALPHAS = (1e-2, 1e2)  # range of the search for α


class Gates:
    """Predicted experts per token of every layer under the rules "mass" and "at_least"."""

    def __init__(self, model: GrmoeForCausalLM, text: Text, cap: int) -> None:
        self.cap = cap
        self.layers = affine_gates(model, text.some(TOKENS).inputs_WS)

    def times(self, norms: Norms) -> Gates:
        """The same for experts chosen by gate × norm: softmax(ℓ + log n)."""
        return self.biased([[math.log(n) for n in layer] for layer in norms])

    def biased(self, bias: Sequence[Sequence[float] | None]) -> Gates:
        """The same with a bias for each expert of each layer; None: without."""
        other = copy.copy(self)
        other.layers = [
            gate if b is None else AffineGate(gate.a_TN + gate.a_TN.new_tensor(b), gate.b_TN)
            for gate, b in zip(self.layers, bias, strict=True)
        ]
        return other

    def count(self, numbers: Sequence[LayerNumbers]) -> float:
        """Experts per token with these numbers, a mean over layers."""
        gates = self.biased([n.bias for n in numbers]).layers
        chosen = (
            largest(gate.probs(n.alpha), n.tau, n.cap).sum(-1).double().mean()
            for gate, n in zip(gates, numbers, strict=True)
        )
        return float(torch.stack([*chosen]).mean())

    def experts(self, layer: int, alpha: float, tau: float) -> float:
        """Mean over tokens of 1 + #{j < cap : the j most probable experts hold less than τ}."""
        return float(self._experts(layer, alpha, tau))

    def tau_for(self, alphas: Sequence[float], experts: float) -> float:
        """τ at which the layers compute `experts` on average. A larger τ needs more experts.

        As τ grows past what some token's first experts hold, this token gets one more. So τ lies just above the n-th
        smallest of these masses, where n experts are needed beyond one per token.
        """
        masses = [self._held(i, alpha) for i, alpha in enumerate(alphas)]
        tokens = sum(map(len, masses))
        held = torch.cat([m.flatten() for m in masses])
        needed = math.ceil((experts - 1) * tokens - 1e-6)
        if needed > len(held):
            return 1.0
        nth = held.kthvalue(max(1, needed)).values
        return min(1.0, float(nth.nextafter(nth.new_ones(()))))

    def weight_for(self, alphas: Sequence[float], experts: float) -> float:
        """The weight that as many experts have at least as make `experts` per token on average.

        The most probable expert of a token is always computed. Of the others, up to the cap, those with the largest
        weights of all tokens are.
        """
        more = [
            self.layers[i].probs(alpha).topk(self.cap, dim=-1).values[:, 1:] for i, alpha in enumerate(alphas)
        ]
        tokens, weights = sum(map(len, more)), torch.cat([m.flatten() for m in more])
        count = round((experts - 1) * tokens)
        if count < 1:
            return 1.0
        return max(NO_WEIGHT, float(weights.topk(min(count, len(weights))).values[-1]))

    def alpha_for(self, layer: int, tau: float, experts: float) -> float:
        """α at which one layer computes `experts` at this τ. A larger α needs fewer experts."""
        device = self.layers[layer].b_TN.device
        low, high = (torch.full((), end, dtype=torch.float64, device=device) for end in ALPHAS)
        # On the device: the host waits once, for the answer, and not at each step.
        for _ in range(STEPS):
            middle = (low * high).sqrt()
            above = self._experts(layer, middle, tau) > experts
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return float(high)

    def _experts(self, layer: int, alpha: float | Tensor, tau: float) -> Tensor:
        return 1 + (self._held(layer, alpha) < tau).sum(-1).double().mean()

    def _held(self, layer: int, alpha: float | Tensor) -> Tensor:
        """What the j most probable experts hold, for each token and j < cap: (T, K−1)."""
        return self.layers[layer].probs(alpha).topk(self.cap, dim=-1).values.cumsum(-1)[:, :-1]
