"""What the routers of a model do with every token, taken from their forward passes by hooks.

Legend: L MoE layers, T tokens of a pass, N experts, K token types, D domains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from grmoe.routing import Routing, routers, uncounted

NONE = -1  # the expert of a token that no expert computes


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Routing]]:
    """A list that holds, after each forward pass, the `Routing` of every MoE layer; clear it before the next."""
    seen: list[Routing] = []
    hooks = [router.register_forward_hook(lambda _m, _x, out: seen.append(out)) for router in routers(model)]
    try:
        with uncounted(model):  # looking at a model leaves its metrics as they were
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


def leading_expert(routing: Routing) -> Tensor:
    """The expert of the largest combine weight, (...); NONE for a token that was dropped (paper: top-1 assignment)."""
    weights = torch.where(routing.selected, routing.weights, -1.0)
    return torch.where(routing.selected.any(-1), weights.argmax(-1), NONE)


@dataclass
class LayerTally:
    """Sums of one layer, by token type and by domain. All fp64."""

    top1_KN: NDArray[np.float64]  # tokens of a type that an expert leads
    mass_KN: NDArray[np.float64]  # their gate probability
    computed_KN: NDArray[np.float64]  # (token, expert) pairs computed
    entropy_K2: NDArray[np.float64]  # Σ H, Σ H² of the gate
    tokens_K: NDArray[np.float64]
    top1_DN: NDArray[np.float64]
    mass_DN: NDArray[np.float64]
    entropy_D: NDArray[np.float64]
    tokens_D: NDArray[np.float64]

    @classmethod
    def empty(cls, experts: int, types: int, domains: int) -> LayerTally:
        K, D, N = types, domains, experts
        shapes: list[Any] = [(K, N), (K, N), (K, N), (K, 2), K, (D, N), (D, N), D, D]
        return cls(*(np.zeros(shape) for shape in shapes))

    def add(self, routing: Routing, types_T: Tensor, domains_T: Tensor) -> Tensor:
        """Count one pass; returns the leading experts (T,). A token with a non-finite gate counts nowhere."""
        N = routing.probs.shape[-1]
        probs_TN = routing.probs.reshape(-1, N).double()
        finite_T = torch.isfinite(probs_TN).all(-1)
        top1_T = torch.where(finite_T, leading_expert(routing).reshape(-1), NONE)
        probs_TN = torch.where(finite_T.unsqueeze(-1), probs_TN, 0.0)
        leads_TN = (top1_T.unsqueeze(-1) == torch.arange(N, device=top1_T.device)).double()
        computed_TN = (routing.selected.reshape(-1, N) & finite_T.unsqueeze(-1)).double()
        if routing.slots is not None:  # Soft MoE computes slots, not tokens
            computed_TN *= routing.slots.to_slots.shape[-1] / routing.slots.to_slots.shape[-3]
        entropy_T = -torch.xlogy(probs_TN, probs_TN).sum(-1)

        def by(group_T: Tensor, groups: int, values_TX: Tensor) -> NDArray[np.float64]:
            sums = values_TX.new_zeros(groups, values_TX.shape[-1]).index_add_(0, group_T, values_TX)
            out: NDArray[np.float64] = sums.cpu().numpy()
            return out

        K, D = len(self.tokens_K), len(self.tokens_D)
        self.top1_KN += by(types_T, K, leads_TN)
        self.mass_KN += by(types_T, K, probs_TN)
        self.computed_KN += by(types_T, K, computed_TN)
        self.entropy_K2 += by(types_T, K, torch.stack([entropy_T, entropy_T.square()], -1))
        self.tokens_K += by(types_T, K, finite_T.double().unsqueeze(-1))[:, 0]
        self.top1_DN += by(domains_T, D, leads_TN)
        self.mass_DN += by(domains_T, D, probs_TN)
        self.entropy_D += by(domains_T, D, entropy_T.unsqueeze(-1))[:, 0]
        self.tokens_D += by(domains_T, D, finite_T.double().unsqueeze(-1))[:, 0]
        return top1_T
