"""The fused gate's packed copy of frames or weights, kept between calls in eval mode."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from grmoe.kernels.runtime import attempt, is_capturing
from grmoe.routing.fused import GateOperands, pack_operands


class PackedCopy:
    """One packed copy, and the parameter state it was made from.

    The copy is remade when the parameter is replaced, written in place, moved, or used with tokens of another dtype.
    PyTorch's fused optimisers write without a trace, so none is kept of a parameter that has a gradient or may get one.
    A write through `.data` is invisible here: call `clear()` after one. Copies and pickles of this object start empty.
    """

    def __init__(self) -> None:
        self._kept: tuple[weakref.ref[Tensor], tuple[Any, ...], Tensor] | None = None

    def clear(self) -> None:
        self._kept = None

    def get(self, operands: GateOperands, x: Tensor) -> Tensor | None:
        """The packed matrix for tokens like x; None where a copy must not be kept.

        A captured graph must see later changes of the parameter. Autograd refuses tensors made in inference mode.
        """
        matrix = operands.matrix
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return None
        if matrix.is_inference() or is_capturing(x):
            return None
        if matrix.requires_grad and (torch.is_grad_enabled() or matrix.grad is not None):
            self.clear()
            return None
        state = (matrix._version, matrix.data_ptr(), x.dtype)
        if self._kept is None or self._kept[0]() is not matrix or self._kept[1] != state:
            packed = attempt("gate", lambda: pack_operands(operands, x.dtype), lambda: None)
            self._kept = None if packed is None else (weakref.ref(matrix), state, packed)
        return None if self._kept is None else self._kept[2]

    def __reduce__(self) -> tuple[type[PackedCopy], tuple[()]]:
        # A weak reference can be neither copied nor pickled.
        return PackedCopy, ()
