"""Buffers that a checkpoint does not have, for models made on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

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
