"""Experts as two grouped GEMMs, `torch.nn.functional.grouped_mm`: CPU and GPU, fp32, bf16 and fp16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from grmoe.experts.dispatch import Dispatch, combine, gather
from grmoe.experts.weights import Weights


def grouped_experts(x_TD: Tensor, dispatch: Dispatch, weights: Weights) -> Tensor:
    """As `reference_experts`. Runtime scales with the rows actually used, because a group ends at its offset.

    grouped_mm leaves rows past the last offset uninitialised. `combine` never reads them, their gradient is zero in the
    backward, and in between nothing mixes rows.
    """
    # The compiler's shape rule for grouped_mm accepts bf16 only; our own operator has its own rule.
    multiply = _grouped_op if torch.compiler.is_compiling() else grouped_mm
    offs = dispatch.offset_N
    inner = multiply(gather(x_TD, dispatch), weights.up.to(x_TD.dtype).mT, offs=offs)
    hidden = weights.activate(inner, in_place=not torch.is_grad_enabled())
    rows = multiply(hidden, weights.down_proj.to(x_TD.dtype).mT, offs=offs)
    return combine(rows, dispatch)


@torch.library.custom_op("grmoe::grouped_mm", mutates_args=())
def _grouped_op(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Rows (A, K) by (N, K, O) to (A, O); or columns (K, A) by rows (A, O) to (N, K, O)."""
    return grouped_mm(a, b, offs=offs)


@_grouped_op.register_fake
def _(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    shape = (len(offs), a.shape[0], b.shape[1]) if b.ndim == 2 else (a.shape[0], b.shape[2])
    return a.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    a, b, offs = ctx.saved_tensors
    return _grouped_op(grad, b.mT, offs), _grouped_op(a.mT, grad, offs), None


_grouped_op.register_autograd(_backward, setup_context=_setup)
