"""Kernels that move or transform rows of the dispatch list. They are bound by bytes and touch each row once.

Programs past the last used row stop at once, so runtime scales with the experts actually computed.

Legend: T tokens, D model width, A rows of the list, M most experts per token, I expert width; B… tile sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grmoe.kernels.early import await_inputs
from grmoe.kernels.launch import ceil_div, launch, power_of_2

# Whether all rows of a token are on their way at once while they are summed, or one after the other. Not measured yet.
AT_ONCE = False

ELEMENTS = 4096  # of a tile: with 4 warps every thread moves four times 16 bytes of bf16


def _tile(width: int) -> tuple[int, int]:
    """(rows, columns) of a tile."""
    columns = min(power_of_2(width), 1024)
    return max(1, ELEMENTS // columns), columns


# After a GEMM these delay the tensor cores, so instructions count, and special functions (exp2, rsqrt) take eight times
# as long as others. A division scales its operands and exp checks its range; a squared reciprocal root (exact to 3e-7)
# and exp2 do neither.
@triton.jit
def sigmoid(a):
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * a))
    return root * root


@triton.jit
def normal(a):
    """Φ(a) and exp(−a²/2), to 7e-8 (Abramowitz and Stegun 7.1.26); erf takes longer."""
    bell = tl.exp2(-0.7213475204444817 * a * a)
    root = tl.rsqrt(1.0 + 0.23164188838536214 * tl.abs(a))
    t = root * root
    poly = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    tail = t * poly * bell
    return tl.where(a < 0.0, tail, 1.0 - tail), bell


@triton.jit
def gelu(a):
    """a·Φ(a) = max(a, 0) − |a|·Φ(−|a|), to 1e-7.

    log₂ Φ(−|a|) is so smooth that a polynomial gives Φ to 6e-8. It was fitted up to 5 for the least largest error
    of Φ, and falls beyond. One special function, where `normal` has two.
    """
    b = tl.abs(a)
    far = -1.76012938e-4 + b * (3.69975969e-5 - b * 2.61372315e-6)
    near = -0.4592027962 + b * (-0.0525130033 + b * (0.0070896977 + b * (-1.5907992e-4 + b * far)))
    tail = tl.exp2(-1.0 + b * (-1.1511058807 + b * near))
    return tl.maximum(a, 0.0) - b * tail


@triton.jit
def differentiate(first, up, GLU: tl.constexpr):
    """(h, ∂h/∂first, ∂h/∂up) of h = silu(first)·up with GLU, else of h = gelu(first), where `up` is ignored."""
    if GLU:
        s = sigmoid(first)
        silu = first * s
        return silu * up, up * s * (1.0 + first * (1.0 - s)), silu
    cdf, bell = normal(first)
    slope = cdf + first * (0.3989422804014327 * bell)  # Φ(a) + a·φ(a)
    return first * cdf, slope, slope


@triton.jit(do_not_specialize=["last"])
def gather_kernel(
    x_ptr, token_ptr, offset_ptr, out_ptr, last, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    """out[a] = x[token_a]."""
    await_inputs()
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    used = tl.load(offset_ptr + last)
    if tl.program_id(0) * BR >= used:
        return
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = (row < used)[:, None] & (column < D)[None, :]
    token = tl.load(token_ptr + row, mask=row < used, other=0).to(tl.int64)
    value = tl.load(x_ptr + token[:, None] * D + column[None, :], mask=inside)
    tl.store(out_ptr + row[:, None].to(tl.int64) * D + column[None, :], value, mask=inside)


def gather(x: Tensor, token: Tensor, offset: Tensor) -> Tensor:
    """Each used row's token, (A, D)."""
    A, D = len(token), x.shape[1]
    out = torch.empty(A, D, dtype=x.dtype, device=x.device)
    BR, BD = _tile(D)
    grid = (ceil_div(A, BR), ceil_div(D, BD))
    launch(gather_kernel, grid, (x, token, offset, out, len(offset) - 1), (D, BR, BD))
    return out


@triton.jit
def _weighted_row(
    rows_ptr, slot_ptr, weight_ptr, token, column, m, num_tokens, num_rows,
    WEIGHTED: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The m-th row of each token times its weight; zeros where it has fewer."""
    slot = tl.load(slot_ptr + token * M + m, mask=token < num_tokens, other=num_rows)
    filled = (slot < num_rows)[:, None] & (column < D)[None, :]
    place = slot[:, None].to(tl.int64) * D + column[None, :]
    value = tl.load(rows_ptr + place, mask=filled, other=0.0).to(tl.float32)
    if WEIGHTED:
        weight = tl.load(weight_ptr + token * M + m, mask=token < num_tokens, other=0.0)
        # An empty slot counts nothing, even if its weight is NaN.
        value = tl.where(filled, value * weight[:, None].to(tl.float32), 0.0)
    return value


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def combine_kernel(
    rows_ptr, slot_ptr, weight_ptr, out_ptr, num_tokens, num_rows,
    WEIGHTED: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """out_t = Σ_m w_tm · rows[slot_tm] in fp32, in slot order: always the same bits."""
    await_inputs()
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = (token < num_tokens)[:, None] & (column < D)[None, :]
    total = tl.zeros((BT, BD), tl.float32)
    if AT_ONCE:
        for m in tl.static_range(M):
            total += _weighted_row(
                rows_ptr, slot_ptr, weight_ptr, token, column, m, num_tokens, num_rows, WEIGHTED, M, D
            )
    else:
        for m in range(M):
            total += _weighted_row(
                rows_ptr, slot_ptr, weight_ptr, token, column, m, num_tokens, num_rows, WEIGHTED, M, D
            )
    place = token[:, None].to(tl.int64) * D + column[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine(rows: Tensor, slot: Tensor, weight: Tensor | None) -> Tensor:
    """Σ over a token's rows, (T, D)."""
    (T, M), (A, D) = slot.shape, rows.shape
    out = torch.empty(T, D, dtype=rows.dtype, device=rows.device)
    BT, BD = _tile(D)
    grid = (ceil_div(T, BT), ceil_div(D, BD))
    args = (rows, slot, slot if weight is None else weight, out, T, A)
    launch(combine_kernel, grid, args, (weight is not None, M, D, BT, BD, AT_ONCE and M <= 8))
    return out


@triton.jit(do_not_specialize=["last"])
def activation_backward_kernel(
    inner_ptr, grad_ptr, pair_ptr, weight_ptr, offset_ptr, grad_inner_ptr, grad_weight_ptr, last,
    GLU: tl.constexpr, I: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """From q = ∂y·W_down (not yet weighted) of each row, with h = act(inner) recomputed:

    ∂inner = w·q·act'(inner),    ∂w = ⟨q, h⟩,    and w·h over q in place, which ∂W_down needs.

    ∂inner may overwrite inner: a thread reads an element before it writes there, and no other thread reads it.
    """
    await_inputs()
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    used = tl.load(offset_ptr + last)
    if tl.program_id(0) * BR >= used:
        return
    pair = tl.load(pair_ptr + row, mask=row < used, other=0)
    weight = tl.load(weight_ptr + pair, mask=row < used, other=0.0).to(tl.float32)[:, None]
    width: tl.constexpr = 2 * I if GLU else I
    inner_row = row[:, None].to(tl.int64) * width
    dot = tl.zeros((BR,), tl.float32)
    for start in range(0, I, BI):
        column = start + tl.arange(0, BI)
        inside = (row < used)[:, None] & (column < I)[None, :]
        first = tl.load(inner_ptr + inner_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        place = grad_ptr + row[:, None].to(tl.int64) * I + column[None, :]
        q = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        up = first
        if GLU:
            up = tl.load(inner_ptr + inner_row + I + column[None, :], mask=inside, other=0.0).to(tl.float32)
        h, slope, slope_up = differentiate(first, up, GLU)
        grad_place = grad_inner_ptr + inner_row + column[None, :]
        if GLU:
            tl.store(grad_place + I, (weight * q * slope_up).to(grad_inner_ptr.dtype.element_ty), mask=inside)
        tl.store(grad_place, (weight * q * slope).to(grad_inner_ptr.dtype.element_ty), mask=inside)
        dot += tl.sum(q * h, axis=1)
        tl.store(place, (weight * h).to(grad_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_weight_ptr + pair, dot.to(grad_weight_ptr.dtype.element_ty), mask=row < used)


def activation_backward(
    inner: Tensor, grad: Tensor, pair: Tensor, weight: Tensor, offset: Tensor, glu: bool, spend: bool = False
) -> tuple[Tensor, Tensor]:
    """(∂inner, ∂weight_TM). `grad` (A, I) is overwritten by w·h, and `inner` by ∂inner if that is allowed."""
    A, I = grad.shape
    grad_inner, grad_weight = inner if spend else torch.empty_like(inner), torch.zeros_like(weight)
    BI = min(power_of_2(I), 1024)
    BR = max(2, 128 // BI)  # at least one element per thread, because two threads on one element would race
    args = (inner, grad, pair, weight, offset, grad_inner, grad_weight, len(offset) - 1)
    launch(activation_backward_kernel, (ceil_div(A, BR),), args, (glu, I, BR, BI))
    return grad_inner, grad_weight
