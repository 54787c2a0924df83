"""Rotary positions of queries and keys in one kernel, without a gradient.

Each product and sum is rounded to the tensors' precision, as PyTorch's operations do, so that the bits are the same.
The compiler would make one operation of a product and a sum, rounded once. So it is told not to.

Legend: B sequences, S positions, H query heads, G key-value heads, W head width; B… tile sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grmoe.kernels.early import await_inputs
from grmoe.kernels.launch import ceil_div, launch, power_of_2

HEADS = 16  # of one program, at most


@triton.jit(do_not_specialize=["length", "cos_row", "q_token", "k_token"])
def rotate_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, length, cos_row, q_token, k_token,
    H: tl.constexpr, G: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """One token and BH heads of its queries or, in the programs after these, of its keys. Strides are in units of UNIT
    elements, so that the compiler knows that rows are aligned."""
    await_inputs()
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tiles: tl.constexpr = (H + BH - 1) // BH
    if tile < tiles:
        x_ptr, out_ptr, heads, first = q_ptr + token * q_token * UNIT, q_out_ptr + token * H * W, H, tile * BH
    else:
        x_ptr, out_ptr, heads = k_ptr + token * k_token * UNIT, k_out_ptr + token * G * W, G
        first = (tile - tiles) * BH
    head, w, half = first + tl.arange(0, BH), tl.arange(0, BW), W // 2
    # cos_row is zero where all sequences share their positions.
    place = (token // length * cos_row + token % length) * W + w
    cos_W, sin_W = tl.load(cos_ptr + place, mask=w < half), tl.load(sin_ptr + place, mask=w < half)
    far_cos_W = tl.load(cos_ptr + place + half, mask=w < half)
    far_sin_W = tl.load(sin_ptr + place + half, mask=w < half)
    place, inside = head[:, None] * W + w[None, :], (head < heads)[:, None] & (w < half)[None, :]
    near_HW, far_HW = tl.load(x_ptr + place, mask=inside), tl.load(x_ptr + place + half, mask=inside)
    kind: tl.constexpr = q_out_ptr.dtype.element_ty
    tl.store(out_ptr + place, _sum(near_HW, cos_W, -far_HW, sin_W, kind), mask=inside)
    tl.store(out_ptr + place + half, _sum(far_HW, far_cos_W, near_HW, far_sin_W, kind), mask=inside)


@triton.jit
def _sum(a_HW, cos_W, b_HW, sin_W, kind: tl.constexpr):
    """a·cos + b·sin, each product rounded."""
    first = (a_HW.to(tl.float32) * cos_W[None, :].to(tl.float32)).to(kind)
    second = (b_HW.to(tl.float32) * sin_W[None, :].to(tl.float32)).to(kind)
    return (first.to(tl.float32) + second.to(tl.float32)).to(kind)


def covers(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel takes these layouts: tokens one after the other, the heads of a token side by side."""
    unit, W = 16 // q.element_size(), q.shape[-1]
    return (
        q.dtype == k.dtype == cos.dtype == sin.dtype
        and cos.shape == sin.shape
        and cos.is_contiguous()
        and sin.is_contiguous()
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1:] == (q.shape[2], W)
        and W % 2 == 0
        and all(_packed(x, unit) for x in (q, k))
    )


def _packed(x_BHSW: Tensor, unit: int) -> bool:
    B, H, S, W = x_BHSW.shape
    row, head, _, one = x_BHSW.stride()
    step = _step(x_BHSW)
    return (one == 1 or W == 1) and (head == W or H == 1) and (row == S * step or B == 1) and step % unit == 0


def _step(x_BHSW: Tensor) -> int:
    """Elements from a token to the next. The stride of a dimension of size one says nothing."""
    return x_BHSW.stride(2) if x_BHSW.shape[2] > 1 else x_BHSW.stride(0) if len(x_BHSW) > 1 else 0


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `grmoe.attention.rotate_reference`, of layouts that `covers` takes."""
    (B, H, S, W), G, unit = q.shape, k.shape[1], 16 // q.element_size()
    q_out, k_out = (x.new_empty(B, S, x.shape[1], W) for x in (q, k))
    if q.numel():
        BH = min(HEADS, power_of_2(max(H, G)))
        args = (q, k, cos, sin, q_out, k_out, S, 0 if cos.shape[0] == 1 else S)
        strides = (_step(q) // unit, _step(k) // unit)
        grid = (B * S, ceil_div(H, BH) + ceil_div(G, BH))
        constants = (H, G, W, unit, BH, power_of_2(W // 2))
        launch(rotate_kernel, grid, (*args, *strides), constants, fuse=False)
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
