"""The entropy term of the training objective: keep a gate's entropy near a target.

    E = mean over tokens of (H_t − η·log N)²,        H_t = −Σ_e g_e log g_e

It is a mean over tokens, so micro-batches and processes add up to the same number. The mean over tokens of the square
is (mean H − η·log N)² plus the variance of H: the term also draws the tokens' entropies together.

Legend: N experts, T tokens (all leading dimensions together).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grmoe import checks


@dataclass(frozen=True)
class EntropyTerm:
    """weight·E, for a router that trains."""

    weight: float
    target: float
    """η: the entropy that a token's gate should have, as a share of log N. 0: one expert. 1: all alike."""

    def __post_init__(self) -> None:
        checks.finite("weight", self.weight, at_least=0)
        checks.finite("target", self.target, at_least=0)
        checks.require(self.target <= 1, f"target must be a share of log N, at most 1, got {self.target}")

    def __call__(self, logits: Tensor) -> Tensor:
        """weight·E of gates with these logits (..., N); 0-d."""
        N = logits.shape[-1]
        apart_T = gate_entropy(logits.reshape(-1, N)) - self.target * math.log(N)
        return self.weight * apart_T.square().sum() / max(1, len(apart_T))


def gate_entropy(logits: Tensor) -> Tensor:
    """H of softmax(logits) in nats, (...). From logits, because log g has no finite gradient where g rounds to zero."""
    log_g = torch.log_softmax(logits, dim=-1)
    return -(log_g.exp() * log_g).sum(-1)
