"""What all bounds share: the `Certificate`, and the checks of their arguments.

Legend: N experts; `...` any batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grmoe import checks

FINITE = "the logits are finite"  # a hypothesis of several bounds


@dataclass(frozen=True)
class Certificate:
    """`bound`, the mask `holds` (broadcasts against it), and the hypothesis behind that mask in words.

    Where `holds` is False, `bound` is the trivial value that the function names. A hypothesis about the data (a
    mixture, the source of a token) cannot be checked from the arguments: the caller must ensure it.
    """

    bound: Tensor
    holds: Tensor
    hypothesis: str


def widened(name: str, value: Tensor) -> Tensor:
    """A floating tensor in fp32 at least."""
    checks.floating(name, value)
    return value.to(torch.promote_types(value.dtype, torch.float32))


def over_experts(name: str, value: Tensor) -> Tensor:
    """`widened`, with the shape (..., N) of at least two experts."""
    value = widened(name, value)
    ok = value.ndim >= 1 and value.shape[-1] >= 2
    checks.require(ok, f"{name} must have shape (..., N) with N >= 2, got {tuple(value.shape)}")
    return value


def as_scalar(name: str, value: object, at_least: float = -math.inf, like: object = None) -> Tensor:
    """A tensor stays on its device, unread. A Python number is checked and becomes a tensor with dtype and device of
    `like`, or in fp64 on the CPU if `like` is not a tensor."""
    if isinstance(value, Tensor):
        return widened(name, value)
    number = checks.finite(name, value, at_least=at_least)
    if isinstance(like, Tensor):  # filled on the device, not copied to it
        return torch.full(
            (), number, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device
        )
    return torch.tensor(number, dtype=torch.float64)


def require_shape(name: str, value: Tensor, *allowed: tuple[int, ...]) -> None:
    """Raise unless the shape is one of those allowed."""
    ok = tuple(value.shape) in allowed
    checks.require(ok, f"{name} must have shape {' or '.join(map(str, allowed))}, got {tuple(value.shape)}")


def range_of(x_N: Tensor) -> Tensor:
    """max − min over experts."""
    return x_N.amax(-1) - x_N.amin(-1)
