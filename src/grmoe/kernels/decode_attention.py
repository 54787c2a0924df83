"""Attention of one new token per sequence over its keys and values: each is read once, however many heads share it.

PyTorch's attention takes no mask with shared heads: a batch with sequences of different lengths first copies keys and
values for every query head. Here the query heads of a group are the rows of one tile. Positions are divided among
programs, because a few sequences alone would leave most of the device idle. A second kernel joins the parts in their
order: always the same bits.

Legend: B sequences, H query heads, G key-value heads, R = H/G query heads of a group (padded to a tile of the tensor
core), L positions, W head width, P parts, C positions of a part; B… tile sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grmoe.kernels.early import await_inputs
from grmoe.kernels.launch import ceil_div, launch, power_of_2
from grmoe.kernels.runtime import INTERPRETED, num_programs

ROWS = 16  # the least a tensor core takes
POSITIONS = 64  # of a step; of a part at least
PARTS = 64  # at most, because one program joins them
BUSY = 4  # programs per multiprocessor that are wanted


@triton.jit(do_not_specialize=["groups", "length", "parts", "q_row", "k_row", "k_head", "k_step", "v_row", "v_head",
                               "v_step", "mask_row"])  # fmt: skip
def attend_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, most_ptr, total_ptr, scale, groups, length, parts,
    q_row, k_row, k_head, k_step, v_row, v_head, v_step, mask_row,
    R: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
    BL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of one group: Σ_l exp(s_l − m)·v_l, m = max_l s_l and Σ_l exp(s_l − m), with s_l = scale·qᵀk_l where
    the mask allows l. Strides are in units of UNIT elements, so that the compiler knows that rows are aligned.
    """
    await_inputs()
    pair, part = tl.program_id(0), tl.program_id(1)
    sequence, group = (pair // groups).to(tl.int64), (pair % groups).to(tl.int64)
    r, w = tl.arange(0, BR), tl.arange(0, BW)
    own = (r < R)[:, None] & (w < W)[None, :]
    q_ptr += sequence * q_row * UNIT + group * R * W
    k_ptr += sequence * k_row * UNIT + group * k_head * UNIT
    v_ptr += sequence * v_row * UNIT + group * v_head * UNIT
    mask_ptr += sequence * mask_row
    q_RW = tl.load(q_ptr + r[:, None] * W + w[None, :], mask=own, other=0.0)
    # Only the positions between the first and the last that the mask allows are read.
    here_C = part * C + tl.arange(0, C)
    seen_C = tl.load(mask_ptr + here_C, mask=here_C < length, other=0) != 0
    first = tl.min(tl.where(seen_C, here_C, length), axis=0)
    end = tl.max(tl.where(seen_C, here_C + 1, 0), axis=0)
    most_R = tl.full((BR,), float("-inf"), tl.float32)
    total_R = tl.zeros((BR,), tl.float32)
    acc_RW = tl.zeros((BR, BW), tl.float32)
    for start in range(first // BL * BL, end, BL):
        here_L = start + tl.arange(0, BL)
        seen_L = tl.load(mask_ptr + here_L, mask=here_L < end, other=0) != 0
        inside = seen_L[:, None] & (w < W)[None, :]  # what was left elsewhere may be NaN
        k_LW = tl.load(
            k_ptr + here_L[:, None].to(tl.int64) * k_step * UNIT + w[None, :], mask=inside, other=0.0
        )
        v_LW = tl.load(
            v_ptr + here_L[:, None].to(tl.int64) * v_step * UNIT + w[None, :], mask=inside, other=0.0
        )
        score_RL = tl.dot(q_RW, k_LW.T, input_precision=PRECISION) * scale
        score_RL = tl.where(seen_L[None, :], score_RL, float("-inf"))
        higher_R = tl.maximum(most_R, tl.max(score_RL, axis=1))
        # A step of the loop may have no position that the mask allows: −∞ − (−∞) is NaN.
        base_R = tl.where(higher_R == float("-inf"), 0.0, higher_R)
        weight_RL = tl.exp(score_RL - base_R[:, None])
        shrink_R = tl.exp(most_R - base_R)
        total_R = total_R * shrink_R + tl.sum(weight_RL, axis=1)
        acc_RW = acc_RW * shrink_R[:, None]
        acc_RW = tl.dot(weight_RL.to(v_LW.dtype), v_LW, acc_RW, input_precision=PRECISION)
        most_R = higher_R
    row = (pair * parts + part) * R + r
    tl.store(out_ptr + row[:, None].to(tl.int64) * W + w[None, :], acc_RW, mask=own)
    tl.store(most_ptr + row, most_R, mask=r < R)
    tl.store(total_ptr + row, total_R, mask=r < R)


@triton.jit(do_not_specialize=["parts"])
def join_kernel(
    part_ptr, most_ptr, total_ptr, out_ptr, parts,
    R: tl.constexpr, W: tl.constexpr, BP: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The output of one query head: Σ_p exp(m_p − m)·acc_p / Σ_p exp(m_p − m)·total_p. Zero without any position."""
    await_inputs()
    head = tl.program_id(0)  # sequence, group and query head in one
    p, w = tl.arange(0, BP), tl.arange(0, BW)
    row_P = (head // R * parts + p) * R + head % R
    most_P = tl.load(most_ptr + row_P, mask=p < parts, other=float("-inf"))
    most = tl.max(most_P, axis=0)
    scale_P = tl.where(most_P == float("-inf"), 0.0, tl.exp(most_P - most))
    total = tl.sum(scale_P * tl.load(total_ptr + row_P, mask=p < parts, other=0.0), axis=0)
    inside = (p < parts)[:, None] & (w < W)[None, :]
    acc_PW = tl.load(part_ptr + row_P[:, None].to(tl.int64) * W + w[None, :], mask=inside, other=0.0)
    out_W = tl.sum(acc_PW * scale_P[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + head * W + w, out_W.to(out_ptr.dtype.element_ty), mask=w < W)


def covers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> bool:
    """Whether the kernel takes these layouts: rows of whole 16 bytes, and one mask for all heads."""
    unit = 16 // q.element_size()
    whole = all(t.stride(3) == 1 and not any(s % unit for s in t.stride()[:3]) for t in (k, v))
    return (
        whole
        and q.dtype == k.dtype == v.dtype
        and q.shape[-1] == v.shape[-1] <= 256
        and q.shape[-1] % unit == 0
        and q.shape[1] // k.shape[1] <= ROWS
        and mask.dtype == torch.bool
        and mask.ndim == 4
        and mask.shape[0] in (1, len(q))
        and mask.shape[1:] == (1, 1, k.shape[2])
        and (mask.shape[3] == 1 or mask.stride(3) == 1)
    )


def _split(pairs: int, length: int, device: torch.device) -> tuple[int, int]:
    """(P, C): parts of the positions and the length of one, by the shapes alone."""
    wanted = ceil_div(BUSY * num_programs(device), pairs)
    chunk = max(POSITIONS, power_of_2(ceil_div(length, min(PARTS, wanted))))
    return ceil_div(length, chunk), chunk


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    (B, H, _, W), (G, L) = q.shape, k.shape[1:3]
    out = torch.empty(B, H, 1, W, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, R, unit = q.contiguous(), H // G, 16 // q.element_size()
    P, C = _split(B * G, L, q.device)
    sums = torch.empty(B * G * P * R * (W + 2), dtype=torch.float32, device=q.device)
    acc, most, total = sums.split([B * G * P * R * W, *(B * G * P * R,) * 2])
    strides = [H * W // unit, *(s // unit for t in (k, v) for s in t.stride()[:3])]
    row = 0 if mask.shape[0] == 1 else mask.stride(0)
    precision = "tf32x3" if q.dtype == torch.float32 and not INTERPRETED else "ieee"
    BW = max(16, power_of_2(W))
    args = (q, k, v, mask.view(torch.uint8), acc, most, total, scale, G, L, P, *strides, row)
    constants = (R, W, unit, C, ROWS, BW, min(POSITIONS, 8192 // BW), precision)
    launch(attend_kernel, (B * G, P), args, constants)
    launch(join_kernel, (B * H,), (acc, most, total, out, P), (R, W, power_of_2(P), BW))
    return out


# An opaque operator for the compiler.
_attend_op = torch.library.custom_op("grmoe::decode_attention", _attend, mutates_args=())
_attend_op.register_fake(lambda q, k, v, mask, scale: q.new_empty(q.shape))


def attend(q_BH1W: Tensor, k_BGLW: Tensor, v_BGLW: Tensor, mask_B11L: Tensor, scale: float) -> Tensor:
    """As `grmoe.attention.attend_one_reference`, (B, H, 1, W), without a gradient."""
    run = _attend_op if torch.compiler.is_compiling() else _attend
    return run(q_BH1W, k_BGLW, v_BGLW, mask_B11L, scale)
