"""Sums over the tokens of a text of what one router did.

Legend: T tokens of a forward pass, N experts, K token types, D domains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from grmoe.analyze.statistics import Array
from grmoe.probe.routing import DROPPED, leading_expert
from grmoe.routing import Routing


@dataclass
class GroupSums:
    """Sums over the tokens of each group (token types, or domains). fp64."""

    tokens_G: Array
    led_GN: Array
    """Tokens that each expert leads."""
    received_GN: Array
    """Tokens that each expert computes."""
    gate_GN: Array
    """Gate probability."""
    entropy_G: Array
    entropy_squared_G: Array

    @classmethod
    def empty(cls, groups: int, experts: int) -> GroupSums:
        one, many = (groups,), (groups, experts)
        return cls(*(np.zeros(shape) for shape in (one, many, many, many, one, one)))

    def add(self, group_T: Tensor, *values: Tensor) -> None:
        """values: per token, (T,) or (T, N), in the order of the fields."""
        for name, value in zip(vars(self), values, strict=True):
            sums = value.new_zeros(len(self.tokens_G), *value.shape[1:]).index_add_(0, group_T, value)
            total = getattr(self, name)
            total += sums.cpu().numpy()


@dataclass
class LayerTally:
    """Sums of one layer, by token type and by domain."""

    types: GroupSums
    domains: GroupSums

    @classmethod
    def empty(cls, experts: int, types: int, domains: int) -> LayerTally:
        return cls(GroupSums.empty(types, experts), GroupSums.empty(domains, experts))

    def add(self, routing: Routing, types_T: Tensor, domains_T: Tensor) -> Tensor:
        """Count one forward pass. Returns the leading experts (T,). A token with a non-finite gate counts nowhere."""
        N = routing.probs.shape[-1]
        gate_TN = routing.probs.reshape(-1, N).double()
        finite_T = torch.isfinite(gate_TN).all(-1)
        leading_T = torch.where(finite_T, leading_expert(routing).reshape(-1), DROPPED)
        gate_TN = torch.where(finite_T.unsqueeze(-1), gate_TN, 0.0)
        led_TN = (leading_T.unsqueeze(-1) == torch.arange(N, device=leading_T.device)).double()
        # Identity experts, the last ones, are chosen and compute nothing.
        computed_TN = routing.computed.reshape(-1, N - routing.identity_experts)
        received_TN = pad(computed_TN & finite_T.unsqueeze(-1), (0, routing.identity_experts)).double()
        entropy_T = -torch.xlogy(gate_TN, gate_TN).sum(-1)
        for sums, group_T in ((self.types, types_T), (self.domains, domains_T)):
            sums.add(group_T, finite_T.double(), led_TN, received_TN, gate_TN, entropy_T, entropy_T.square())
        return leading_T
