"""Which experts compute a token, given its gate. Selection is separate from gating, so any policy fits any router.

A policy maps gate probabilities (..., N) to a boolean mask of the same shape. Every policy keeps at least the most
probable expert. `renormalize` says whether the kept weights are scaled back to sum one; the paper's are not.

`TopK`, `Mass` and `AtLeast` are one rule with two numbers, τ and `cap`: take the most probable experts, at most `cap`
of them, while those taken hold less than τ. A negative τ says it by expert: while the next one has at least −τ. A
router keeps both numbers on the device (`Router.tau`, `Router.cap`), where they change without recompiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from grmoe import checks

NO_LIMIT = 2.0  # a τ that no mass reaches: the cap alone decides


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
    renormalize: bool = False
    dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _set(self, "k", checks.positive_int("k", self.k))

    def __call__(self, probs: Tensor) -> Tensor:
        experts = probs.shape[-1]
        checks.require(self.k <= experts, f"k must be at most the number of experts {experts}, got {self.k}")
        return largest(probs, NO_LIMIT, self.k)

    def max_experts(self, num_experts: int) -> int:
        return self.k


@dataclass(frozen=True)
class Mass:
    """The smallest set of experts with probabilities that reach τ, at most `cap` of them.

    A token with a clear gate computes one expert, an ambiguous token several. With this policy the dial α changes the
    amount of computation. Without a cap the dropped mass is at most 1−τ by construction.
    """

    tau: float
    cap: int | None = None
    renormalize: bool = False
    dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _set(self, "tau", checks.fraction("tau", self.tau))
        if self.cap is not None:
            _set(self, "cap", checks.positive_int("cap", self.cap))

    def __call__(self, probs: Tensor) -> Tensor:
        return largest(probs, self.tau, self.max_experts(probs.shape[-1]))

    def max_experts(self, num_experts: int) -> int:
        return num_experts if self.cap is None else min(self.cap, num_experts)


@dataclass(frozen=True)
class AtLeast:
    """Experts with a weight of at least `weight`, at most `cap` of them, and always the most probable one.

    Weights that are not renormalised are what a dropped expert's output is multiplied by. So for a number of experts
    per token, this rule drops the least weight of all rules: it computes the largest weights of all tokens.
    """

    weight: float
    cap: int | None = None
    renormalize: bool = False
    dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        weight = checks.fraction("weight", self.weight)
        _set(self, "weight", weight)
        if self.cap is not None:
            _set(self, "cap", checks.positive_int("cap", self.cap))

    def __call__(self, probs: Tensor) -> Tensor:
        return largest(probs, -self.weight, self.max_experts(probs.shape[-1]))

    def max_experts(self, num_experts: int) -> int:
        return num_experts if self.cap is None else min(self.cap, num_experts)


BY_RANK = (TopK, Mass, AtLeast)  # policies with the same rule and other numbers


@dataclass(frozen=True)
class Threshold:
    """Experts with a probability of at least `minimum`, and always the most probable one. `AtLeast` has a cap too."""

    minimum: float
    renormalize: bool = False
    dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _set(self, "minimum", checks.fraction("minimum", self.minimum))

    def __call__(self, probs: Tensor) -> Tensor:
        return above(probs, self.minimum)

    def max_experts(self, num_experts: int) -> int:
        # n experts of at least `minimum` each need n·minimum <= 1, up to the rounding of the softmax.
        return min(num_experts, int(1.000001 / self.minimum))


def largest(probs: Tensor, tau: float | Tensor, cap: int | Tensor) -> Tensor:
    """Mask (..., N) of the most probable experts: at most `cap` of them, while those before hold less than τ.

    A negative τ keeps the experts with at least −τ, and the most probable one. τ and cap may be tensors that broadcast
    against (..., N), for instance one number per sequence. Ties go to the lower index.
    """
    # A NaN gate counts as all zero, so that its token gets experts too.
    sorted_probs, order = torch.where(probs == probs, probs, 0.0).sort(dim=-1, descending=True, stable=True)
    # Mass of the experts ranked higher. Shifted, because `cumsum − p` rounds and can keep one expert too many.
    before = torch.nn.functional.pad(sorted_probs.cumsum(-1)[..., :-1], (1, 0))
    rank = torch.arange(probs.shape[-1], device=probs.device)
    by_mass, by_weight = before < tau, sorted_probs >= -tau
    # An exact choice of either, for tensors and for numbers. The first expert always: a τ that is drawn may be zero.
    keep = ((by_weight & (tau < 0)) | (by_mass & (tau >= 0)) | (rank == 0)) & (rank < cap)
    return torch.zeros_like(keep).scatter(-1, order, keep)


def above(probs: Tensor, minimum: float | Tensor) -> Tensor:
    """Mask (..., N) of the experts with at least this probability, and of the most probable one."""
    first = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, probs.argmax(-1, keepdim=True), True)
    return (probs >= minimum) | first


def numbers(selection: Selection, num_experts: int) -> tuple[float, int]:
    """(τ, cap) of a policy, as `Router` keeps them on the device."""
    if isinstance(selection, AtLeast):
        return -selection.weight, selection.max_experts(num_experts)
    if isinstance(selection, Mass):
        return selection.tau, selection.max_experts(num_experts)
    if isinstance(selection, Threshold):
        return selection.minimum, num_experts
    return NO_LIMIT, selection.k if isinstance(selection, TopK) else num_experts


def _set(policy: Any, name: str, value: float | int) -> None:
    """Store a checked Python number in a frozen policy, in place of the NumPy or PyTorch number given."""
    object.__setattr__(policy, name, value)
