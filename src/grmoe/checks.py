"""Argument checks shared by every floor: a `ValueError` that names the argument and shows the value.

Python numbers are checked. Tensors that live on a device are not (reading them would stall the device),
except where a function says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def positive_int(name: str, value: int, at_least: int = 1) -> int:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    require(ok, f"{name} must be an integer >= {at_least}, got {value!r}")
    return value


def finite(name: str, value: float, *, at_least: float = -math.inf, above: float = -math.inf) -> float:
    """A finite Python number, optionally `>= at_least` and `> above`."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    limit = f" > {above:g}" if above > -math.inf else f" >= {at_least:g}" if at_least > -math.inf else ""
    require(
        ok and value >= at_least and value > above, f"{name} must be a finite number{limit}, got {value!r}"
    )
    return float(value)


def fraction(name: str, value: float) -> float:
    """A number in (0, 1]."""
    finite(name, value)
    require(0 < value <= 1, f"{name} must be in (0, 1], got {value!r}")
    return float(value)


def one_of(name: str, value: T, options: Sequence[T]) -> T:
    require(value in options, f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}")
    return value


def subspace(dim: int, rank: int) -> None:
    """A rank-`rank` subspace must fit into `dim` dimensions."""
    positive_int("dim", dim)
    positive_int("rank", rank)
    require(rank <= dim, f"rank must be at most dim = {dim}, got {rank}")


def floating(name: str, value: Tensor) -> Tensor:
    ok = isinstance(value, Tensor) and value.is_floating_point()
    got = value.dtype if isinstance(value, Tensor) else type(value).__name__
    require(ok, f"{name} must be a floating-point tensor, got {got}")
    return value


def last_dim(name: str, value: Tensor, size: int) -> Tensor:
    floating(name, value)
    ok = value.ndim >= 1 and value.shape[-1] == size
    require(ok, f"{name} must have shape (..., {size}), got {tuple(value.shape)}")
    return value


def frames(name: str, value: Tensor) -> Tensor:
    """A floating tensor of shape (..., d, k) with k <= d. Orthonormality is not checked."""
    floating(name, value)
    ok = value.ndim >= 2 and 1 <= value.shape[-1] <= value.shape[-2]
    require(ok, f"{name} must have shape (..., d, k) with k <= d, got {tuple(value.shape)}")
    return value


def all_finite(name: str, value: Tensor) -> Tensor:
    """Reads the tensor: it waits for the device. For checked mode and set-up code only."""
    bad = int((~torch.isfinite(value)).sum())
    require(bad == 0, f"{name} holds {bad} non-finite value{'s' if bad != 1 else ''} of {value.numel()}")
    return value
