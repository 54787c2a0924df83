"""Linear maps of few tokens, as in decoding: their time is that of reading the weights.

One kernel in place of several small ones. It takes the norm before a map with it, what follows (activation, residual
sum), and up to three matrices that read the same tokens:

    W·norm(x),        norm(x) = g·x/√(mean x² + ε)

Each program reads some rows of a matrix once. One token is a sum of products in registers. There the scale of the norm,
one number, comes after the products. More tokens are a product on the tensor cores. Each program computes their norms
by itself, from the cache, because g·x alone may not fit into 16 bits.

Legend: T tokens, D inner width, O outputs of all matrices; B… tile sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from grmoe.kernels.early import await_inputs
from grmoe.kernels.launch import ceil_div, launch, power_of_2
from grmoe.kernels.rows import gelu, sigmoid
from grmoe.kernels.runtime import INTERPRETED

NONE, SWIGLU, GELU = 0, 1, 2
MOST_MATRICES = 3
# Of one token: columns of a tile, and its rows where the programs keep the device busy. Otherwise half as many.
ONE_COLUMNS, ONE_ROWS, ENOUGH = 1024, 8, 512
# Products of so few rows are not asynchronous. So tokens may feed the norm too (docs/explanation/kernels.md, "A race").
MANY_ROWS, MANY_COLUMNS = 16, 256
MOST_AT_ONCE = 32  # tokens of a tile
WIDE_COLUMNS, WIDE_STAGES = 64, 2  # in fp32, whose products take three parts of each operand


@triton.jit(do_not_specialize=["num_tokens", "eps"])
def thin_linear_kernel(
    x_ptr, gain_ptr, a_ptr, b_ptr, c_ptr, residual_ptr, out_ptr, num_tokens, eps,
    D: tl.constexpr, OA: tl.constexpr, OB: tl.constexpr, OC: tl.constexpr, NORM: tl.constexpr,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BO: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out = [A n(x), B n(x), C n(x)], or act(A n(x))·B n(x) with SwiGLU, or gelu(A n(x)); plus `residual` on request.

    n is the norm, or nothing. BT = 1: there is one token.
    """
    await_inputs()
    tile, token = tl.program_id(0), tl.program_id(1) * BT + tl.arange(0, BT)
    tiles_a: tl.constexpr = (OA + BO - 1) // BO
    tiles_b: tl.constexpr = (OB + BO - 1) // BO
    width: tl.constexpr = OA if ACTIVATION == 1 else OA + OB + OC
    if tile < tiles_a:
        w_ptr, rows, start, first = a_ptr, OA, 0, tile * BO
    elif tile < tiles_a + tiles_b:
        w_ptr, rows, start, first = b_ptr, OB, OA, (tile - tiles_a) * BO
    else:
        w_ptr, rows, start, first = c_ptr, OC, OA + OB, (tile - tiles_a - tiles_b) * BO
    o, here = first + tl.arange(0, BO), token < num_tokens
    row = w_ptr + o[:, None].to(tl.int64) * D
    other = b_ptr + o[:, None].to(tl.int64) * D
    SUMS: tl.constexpr = BD if BT == 1 else BT
    acc, acc_up = tl.zeros((BO, SUMS), tl.float32), tl.zeros((BO, SUMS), tl.float32)
    square = tl.zeros((BD,) if BT == 1 else (BT,), tl.float32)
    scale = square
    if NORM and BT > 1:
        for d in range(0, D, BD):
            column = d + tl.arange(0, BD)
            place = token[:, None] * D + column[None, :]
            wide = tl.load(x_ptr + place, mask=here[:, None] & (column < D)[None, :], other=0.0).to(
                tl.float32
            )
            square += tl.sum(wide * wide, axis=1)
        scale = tl.rsqrt(square / D + eps)
    for d in range(0, D, BD):
        column = d + tl.arange(0, BD)
        if D % BD == 0:
            inside = (o < rows)[:, None]
        else:
            inside = (o < rows)[:, None] & (column < D)[None, :]
        w = tl.load(row + column[None, :], mask=inside, other=0.0)
        if BT == 1:
            x = tl.load(x_ptr + column, mask=column < D, other=0.0).to(tl.float32)
            if NORM:
                square += x * x
                x *= tl.load(gain_ptr + column, mask=column < D, other=0.0).to(tl.float32)
            acc += w.to(tl.float32) * x[None, :]
            if ACTIVATION == 1:
                acc_up += tl.load(other + column[None, :], mask=inside, other=0.0).to(tl.float32) * x[None, :]
        else:
            place = token[:, None] * D + column[None, :]
            x = tl.load(x_ptr + place, mask=here[:, None] & (column < D)[None, :], other=0.0)
            if NORM:
                gain = tl.load(gain_ptr + column, mask=column < D, other=0.0).to(tl.float32)
                x = (x.to(tl.float32) * scale[:, None] * gain[None, :]).to(x_ptr.dtype.element_ty)
            acc = tl.dot(w, x.T, acc, input_precision=PRECISION)
            if ACTIVATION == 1:
                up = tl.load(other + column[None, :], mask=inside, other=0.0)
                acc_up = tl.dot(up, x.T, acc_up, input_precision=PRECISION)
    if BT == 1:
        acc, acc_up = tl.sum(acc, axis=1)[:, None], tl.sum(acc_up, axis=1)[:, None]
        if NORM:
            one = tl.rsqrt(tl.sum(square, axis=0) / D + eps)
            acc, acc_up = acc * one, acc_up * one
    if ACTIVATION == 1:
        acc = acc * sigmoid(acc) * acc_up
    if ACTIVATION == 2:
        acc = gelu(acc)
    place = token[None, :] * width + start + o[:, None]
    stored = (o < rows)[:, None] & here[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + place, mask=stored, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=stored)


def _apply(
    x: Tensor,
    weights: Sequence[Tensor],
    gain: Tensor | None,
    eps: float,
    residual: Tensor | None,
    activation: int,
) -> Tensor:
    T, D = x.shape
    sizes = [len(w) for w in weights]
    out = torch.empty(T, sizes[0] if activation == SWIGLU else sum(sizes), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, given = x.contiguous(), [w.contiguous() for w in weights]
    pointers = [*given, *(given[0],) * (MOST_MATRICES - len(given))]
    sizes += [0] * (MOST_MATRICES - len(sizes))
    added = x if residual is None else residual.contiguous()
    args = (x, x if gain is None else gain, *pointers, added, out, T, float(eps))
    wide = x.dtype == torch.float32
    precision = "tf32x3" if wide and not INTERPRETED else "ieee"
    if T == 1:
        BT, BD = 1, min(ONE_COLUMNS, power_of_2(D))
        BO = ONE_ROWS if out.shape[1] >= ONE_ROWS * ENOUGH else ONE_ROWS // 2
    else:
        BT, BO = min(MOST_AT_ONCE, max(16, power_of_2(T))), MANY_ROWS
        BD = max(16, min(WIDE_COLUMNS if wide else MANY_COLUMNS, power_of_2(D)))
    tiles = sum(ceil_div(size, BO) for size in (sizes[:1] if activation == SWIGLU else sizes))
    constants = (D, *sizes, gain is not None, activation, residual is not None, precision, BT, BO, BD)
    stages = WIDE_STAGES if wide else 4 if BT <= 16 else 3  # so that the tiles fit on smaller GPUs too
    launch(thin_linear_kernel, (tiles, ceil_div(T, BT)), args, constants, stages=stages)
    return out


# An opaque operator for the compiler.
_apply_op = torch.library.custom_op("grmoe::thin_linear", _apply, mutates_args=())


@_apply_op.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    gain: Tensor | None,
    eps: float,
    residual: Tensor | None,
    activation: int,
) -> Tensor:
    return x.new_empty(len(x), len(weights[0]) if activation == SWIGLU else sum(len(w) for w in weights))


def apply(
    x_TD: Tensor,
    weights: Sequence[Tensor],
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    activation: int = NONE,
) -> Tensor:
    """(T, O): W·norm(x) of each matrix side by side, or of the two or one matrices of an activation.

    gain, eps: of the norm, if there is one. residual (T, O): is added.
    """
    run = _apply_op if torch.compiler.is_compiling() else _apply
    result: Tensor = run(x_TD, list(weights), gain, eps, residual, activation)
    return result
