"""Argument checks shared by all modules: a `ValueError` that names the argument and shows the value.

A number may be Python's, NumPy's or a tensor with one element; a check returns it as a Python number. The contents of
larger tensors are not checked, because reading them would stall the device, except where a function says so.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# fp32 ends at 3.4e38, where α · score overflows and the gate is NaN. This leaves room for scores up to 1e8.
LARGEST_ALPHA = 1e30


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def _plain_number(value: Any) -> int | float | None:
    """The number in `value`, also from a NumPy scalar or a one-element tensor; None if it is not a real number."""
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        value = value.item()
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def positive_int(name: str, value: Any, at_least: int = 1) -> int:
    number = _plain_number(value)
    ok = isinstance(number, int) and number >= at_least
    require(ok, f"{name} must be an integer >= {at_least}, got {value!r}")
    return operator.index(number)  # type: ignore[arg-type]


def finite(name: str, value: Any, *, at_least: float = -math.inf, above: float = -math.inf) -> float:
    """A finite number, optionally `>= at_least` and `> above`."""
    number = _plain_number(value)
    limit = f" > {above:g}" if above > -math.inf else f" >= {at_least:g}" if at_least > -math.inf else ""
    message = f"{name} must be a finite number{limit}, got {value!r}"
    if number is None or not math.isfinite(number) or number < at_least or number <= above:
        raise ValueError(message)
    return float(number)


def alpha(name: str, value: Any) -> float:
    """A setting of the dial: finite, not negative, and small enough that no gate becomes NaN."""
    number = finite(name, value, at_least=0)
    require(
        number <= LARGEST_ALPHA,
        f"{name} must be at most {LARGEST_ALPHA:g}, got {value!r}: logits would overflow and gates become NaN",
    )
    return number


def alphas(name: str, value: Any) -> float | list[float]:
    """One setting of the dial, or several as a list: from any iterable, array or 1-d tensor of numbers."""
    several = isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0
    if not several:
        return alpha(name, value)
    return [alpha(name, v) for v in (value.tolist() if hasattr(value, "tolist") else value)]


def fraction(name: str, value: Any) -> float:
    """A number in (0, 1]."""
    number = finite(name, value)
    require(0 < number <= 1, f"{name} must be in (0, 1], got {value!r}")
    return number


def one_of(name: str, value: T, options: Sequence[T]) -> T:
    require(value in options, f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}")
    return value


def one_of_many(name: str, value: str, options: Sequence[str], lists: str) -> str:
    """As `one_of`, for more names than one reads in a sentence: the message has similar ones.

    lists: the command that lists all.
    """
    near = " or ".join(map(repr, difflib.get_close_matches(value, options)))
    meant = f"; did you mean {near}?" if near else "."
    require(value in options, f"unknown {name} {value!r}{meant} `{lists}` lists all {len(options)}")
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


def shape(name: str, value: Tensor, want: Sequence[int]) -> Tensor:
    ok = tuple(value.shape) == tuple(want)
    require(ok, f"{name} must have shape {tuple(want)}, got {tuple(value.shape)}")
    return value


def frames(name: str, value: Tensor) -> Tensor:
    """A floating tensor of shape (..., d, k) with k <= d. Orthonormality is not checked."""
    floating(name, value)
    ok = value.ndim >= 2 and 1 <= value.shape[-1] <= value.shape[-2]
    require(ok, f"{name} must have shape (..., d, k) with k <= d, got {tuple(value.shape)}")
    return value


def all_finite(name: str, value: Tensor) -> Tensor:
    """Reads the tensor, which waits for the device: use it in checked mode and set-up code only."""
    bad = int((~torch.isfinite(value)).sum())
    require(bad == 0, f"{name} holds {bad} non-finite value{'s' if bad != 1 else ''} of {value.numel()}")
    return value
