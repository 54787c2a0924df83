"""Full precision, whatever the rest of a model computes in: routers are modules of fp32 tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Self

import torch
from torch import Tensor, nn


class FullPrecision(nn.Module):
    """A module that is made in fp32 and stays out of half precision. `module.double()` is the way to fp64."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _in_full_precision(cls.__init__)  # type: ignore[method-assign]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves between devices but stays out of half precision: frames in bf16 lose orthonormality and stall
        training, so `model.bfloat16()` leaves a router in fp32."""

        def keep_precision(t: Tensor) -> Tensor:
            out = fn(t)
            return t.to(out.device, torch.float32) if out.dtype in (torch.bfloat16, torch.float16) else out

        return super()._apply(keep_precision, recurse)


def _in_full_precision(init: Callable[..., None]) -> Callable[..., None]:
    """An __init__ that makes fp32 tensors whatever the default dtype is. In transformers' `from_pretrained(dtype=…)` it
    has 16 bits."""

    @wraps(init)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            init(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return wrapped
