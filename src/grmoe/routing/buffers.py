"""Buffers with numbers: those that a checkpoint does not have, and those that may be set before a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class Restarted(nn.Module):
    """A module that fills its buffers again when they leave the meta device.

    `to_empty` and transformers' `from_pretrained` put uninitialised memory in their place. No checkpoint has them.
    """

    def restart(self, name: str) -> None:
        """Fill the buffer of this name as at the start."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.__dict__.get("_buffers", {}).get(name)
        super().__setattr__(name, value)
        if before is not None and before.is_meta and isinstance(value, Tensor) and not value.is_meta:
            self.restart(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        empty = [name for name, buffer in self._buffers.items() if buffer is not None and buffer.is_meta]
        super()._apply(fn, recurse)
        for name in empty:
            if not getattr(self, name).is_meta:
                self.restart(name)
        return self


def for_backward(number: Tensor) -> Tensor:
    """The number as it is now: a copy where gradients are computed.

    Buffers are set in place, maybe before the backward reads them: one loss may add up passes at several α.
    """
    return number.clone() if torch.is_grad_enabled() else number
