"""Which experts compute a token, given its gate. Selection is separate from gating, so any policy fits any router.

A policy maps gate probabilities (..., N) to a boolean mask of the same shape. Every policy keeps at least the most
probable expert. `renormalize` says whether the kept weights are scaled back to sum one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from grmoe import checks


class Selection(Protocol):
    @property
    def renormalize(self) -> bool: ...

    @property
    def dense(self) -> bool: ...

    def __call__(self, probs: Tensor) -> Tensor: ...

    def max_experts(self, num_experts: int) -> int:
        """The largest number of experts a token can get, known in advance. It sizes the dispatch list."""
        ...


@dataclass(frozen=True)
class Dense:
    """Every expert, weighted by its probability: the paper's sum."""

    renormalize: ClassVar[bool] = False
    dense: ClassVar[bool] = True

    def __call__(self, probs: Tensor) -> Tensor:
        return torch.ones_like(probs, dtype=torch.bool)

    def max_experts(self, num_experts: int) -> int:
        return num_experts


@dataclass(frozen=True)
class TopK:
    """The k most probable experts. At k = 1 a renormalised weight is constant and trains no router."""

    k: int
    renormalize: bool = True
    dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _set(self, "k", checks.positive_int("k", self.k))

    def __call__(self, probs: Tensor) -> Tensor:
        experts = probs.shape[-1]
        checks.require(self.k <= experts, f"k must be at most the number of experts {experts}, got {self.k}")
        return _mask(probs, probs.topk(self.k, dim=-1).indices)

    def max_experts(self, num_experts: int) -> int:
        return self.k


@dataclass(frozen=True)
class Mass:
    """The smallest set of experts with probabilities that reach τ, at most `cap` of them.

    A token with a clear gate computes one expert, an ambiguous token several. With this policy the dial α changes the
    amount of computation. Without a cap the dropped mass is below 1−τ by construction.
    """

    tau: float
    cap: int | None = None
    renormalize: bool = True
    dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _set(self, "tau", checks.fraction("tau", self.tau))
        if self.cap is not None:
            _set(self, "cap", checks.positive_int("cap", self.cap))

    def __call__(self, probs: Tensor) -> Tensor:
        sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
        # Mass of the experts ranked higher. Shifted, because `cumsum − p` rounds and can keep one expert too many.
        before = torch.nn.functional.pad(sorted_probs.cumsum(-1)[..., :-1], (1, 0))
        keep = before < self.tau
        if self.cap is not None:
            keep = keep & (torch.arange(probs.shape[-1], device=probs.device) < self.cap)
        return torch.zeros_like(keep).scatter(-1, order, keep)

    def max_experts(self, num_experts: int) -> int:
        return num_experts if self.cap is None else min(self.cap, num_experts)


@dataclass(frozen=True)
class Threshold:
    """Experts with a probability of at least `minimum`, and always the most probable one."""

    minimum: float
    renormalize: bool = True
    dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _set(self, "minimum", checks.fraction("minimum", self.minimum))

    def __call__(self, probs: Tensor) -> Tensor:
        return (probs >= self.minimum) | _mask(probs, probs.argmax(-1, keepdim=True))

    def max_experts(self, num_experts: int) -> int:
        # n experts of at least `minimum` each need n·minimum <= 1, up to the rounding of the softmax.
        return min(num_experts, int(1.000001 / self.minimum))


def _set(policy: Any, name: str, value: float | int) -> None:
    """Store a checked Python number in a frozen policy, in place of the NumPy or PyTorch number given."""
    object.__setattr__(policy, name, value)


def _mask(probs: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(probs, dtype=torch.bool).scatter(-1, index, True)
