"""The gate for few tokens, as in decoding: its time is that of reading the frames.

With few tokens, one program per tile of tokens would leave most of the device idle. Here the work is split over experts
and directions, or over the width for a linear gate. A second kernel adds the parts up in a fixed order and chooses.
Frames are read as they are stored, once per tile of up to 64 tokens, so nothing has to be packed before.

Legend: T tokens, D model width, N experts (padded to a power of two), K rank, S parts; B… tile sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grmoe.kernels.early import await_inputs
from grmoe.kernels.gate_kernels import finish_gate
from grmoe.kernels.launch import ceil_div, launch, power_of_2
from grmoe.kernels.runtime import INTERPRETED

MOST_TOKENS = 512
DIRECTIONS = 16  # of one program: the least a tensor core takes, so that many programs read
EXPERTS, WIDTH = 16, 256  # of one program of a linear gate
NARROW = 64  # its width in fp32, where three tf32 products need the registers


@triton.jit(do_not_specialize=["num_tokens"])
def energies_kernel(
    x_ptr, frames_ptr, log_kappa_ptr, sums_ptr, norm_ptr, num_tokens,
    D: tl.constexpr, K: tl.constexpr, num_experts: tl.constexpr, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """sums[s, t, e] = Σ over the s-th BJ directions of λ (u_ejᵀx_t)²: one program per expert, part and tile of tokens.

    λ is one unless DIAGONAL. The program after the last expert writes ‖x_t‖².
    """
    await_inputs()
    expert, part = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2) * BT + tl.arange(0, BT)
    here = token < num_tokens
    row = x_ptr + token[:, None].to(tl.int64) * D
    if expert < num_experts:
        j = part * BJ + tl.arange(0, BJ)
        frame = frames_ptr + expert.to(tl.int64) * D * K + j[None, :]
        acc_BJ = tl.zeros((BT, BJ), tl.float32)
        for d in range(0, D, BD):
            column = d + tl.arange(0, BD)
            x_BD = tl.load(row + column[None, :], mask=here[:, None] & (column < D)[None, :], other=0.0)
            u_DJ = tl.load(
                frame + column[:, None] * K, mask=(column < D)[:, None] & (j < K)[None, :], other=0.0
            )
            acc_BJ = tl.dot(x_BD, u_DJ.to(x_BD.dtype), acc_BJ, input_precision=PRECISION)
        acc_BJ = acc_BJ * acc_BJ
        if DIAGONAL:
            weight_J = tl.exp(tl.load(log_kappa_ptr + expert * K + j, mask=j < K, other=0.0))
            acc_BJ = acc_BJ * weight_J[None, :]
        tl.store(
            sums_ptr + (part * num_tokens + token) * num_experts + expert, tl.sum(acc_BJ, axis=1), mask=here
        )
    elif part == 0:
        square_BD = tl.zeros((BT, BD), tl.float32)
        for d in range(0, D, BD):
            column = d + tl.arange(0, BD)
            x_BD = tl.load(row + column[None, :], mask=here[:, None] & (column < D)[None, :], other=0.0)
            square_BD += x_BD.to(tl.float32) * x_BD.to(tl.float32)
        tl.store(norm_ptr + token, tl.sum(square_BD, axis=1), mask=here)


@triton.jit(do_not_specialize=["num_tokens"])
def products_kernel(
    x_ptr, weight_ptr, sums_ptr, num_tokens,
    D: tl.constexpr, num_experts: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """sums[s, t, e] = w_eᵀx_t over the s-th BD columns: one program per tile of experts, part and tile of tokens."""
    await_inputs()
    expert = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    token = tl.program_id(2) * BT + tl.arange(0, BT)
    column = part * BD + tl.arange(0, BD)
    here, real, wide = token < num_tokens, expert < num_experts, column < D
    place = token[:, None].to(tl.int64) * D + column[None, :]
    x_BD = tl.load(x_ptr + place, mask=here[:, None] & wide[None, :], other=0.0)
    w_ND = tl.load(
        weight_ptr + expert[:, None] * D + column[None, :], mask=real[:, None] & wide[None, :], other=0.0
    )
    sums_BN = tl.dot(x_BD, w_ND.to(x_BD.dtype).T, input_precision=PRECISION)
    place = (part * num_tokens + token)[:, None] * num_experts + expert[None, :]
    tl.store(sums_ptr + place, sums_BN, mask=here[:, None] & real[None, :])


@triton.jit(do_not_specialize=["num_tokens", "length", "layer"])
def choose_kernel(
    sums_ptr, log_kappa_ptr, prior_ptr, alpha_ptr, weight_alpha_ptr, tau_ptr, cap_ptr, bias_ptr, key_ptr,
    first_row_ptr, logits_ptr, probs_ptr, weights_ptr, selected_ptr, norm_ptr, aux_ptr,
    num_tokens, energy_scale, length, layer,
    PARTS: tl.constexpr, num_experts: tl.constexpr, SQUARE: tl.constexpr,
    DIAGONAL: tl.constexpr, POSTERIOR: tl.constexpr, MODE: tl.constexpr, MAX_EXPERTS: tl.constexpr,
    RENORMALIZE: tl.constexpr, PER_ROW: tl.constexpr, APART: tl.constexpr, BIASED: tl.constexpr,
    ELASTIC: tl.constexpr, UNIT: tl.constexpr, NP: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """From sums in PARTS parts, (S, T, N), to everything the gate returns."""
    await_inputs()
    token, expert = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, NP)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    sums_BN = tl.zeros((BT, NP), tl.float32)
    for part in range(PARTS):
        place = (part * num_tokens + token)[:, None].to(tl.int64) * num_experts + expert[None, :]
        sums_BN += tl.load(sums_ptr + place, mask=inside, other=0.0)
    norm_B = tl.zeros((BT,), tl.float32)
    if SQUARE:
        norm_B = tl.load(norm_ptr + token, mask=token < num_tokens, other=1.0)
    finish_gate(
        sums_BN, norm_B, token, expert, log_kappa_ptr, prior_ptr, alpha_ptr, weight_alpha_ptr,
        (tau_ptr, cap_ptr, bias_ptr, key_ptr, first_row_ptr),
        logits_ptr, probs_ptr, weights_ptr, selected_ptr, norm_ptr, num_tokens, energy_scale, length, layer,
        num_experts, SQUARE, DIAGONAL, POSTERIOR, MODE, MAX_EXPERTS, RENORMALIZE, PER_ROW, APART, BIASED, ELASTIC,
        UNIT,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(aux_ptr, 0.0)


def sum_parts(x: Tensor, matrix: Tensor, log_kappa: Tensor | None, norm: Tensor) -> Tensor:
    """Sums in parts, (S, T, N): of squared projections (with λ where `log_kappa` is (N, K)), or of products without
    `log_kappa`. Writes ‖x‖² to `norm` for the former."""
    (T, D), N = x.shape, len(matrix)
    BT = min(64, max(16, power_of_2(T)))
    precision = "tf32x3" if x.dtype == torch.float32 and not INTERPRETED else "ieee"
    if log_kappa is None:
        width = NARROW if x.dtype == torch.float32 else WIDTH
        parts = ceil_div(D, width)
        sums = torch.empty(parts, T, N, dtype=torch.float32, device=x.device)
        grid = (ceil_div(N, EXPERTS), parts, ceil_div(T, BT))
        launch(products_kernel, grid, (x, matrix, sums, T), (D, N, precision, BT, EXPERTS, width))
        return sums
    K = matrix.shape[2]
    parts = ceil_div(K, DIRECTIONS)
    sums = torch.empty(parts, T, N, dtype=torch.float32, device=x.device)
    grid = (N + 1, parts, ceil_div(T, BT))
    # With few programs, each must have much on its way: wide tiles, where those of x leave room.
    width = NARROW if x.dtype == torch.float32 else WIDTH if BT <= 32 else 128
    constants = (D, K, N, log_kappa.ndim == 2, precision, BT, DIRECTIONS, width)
    launch(energies_kernel, grid, (x, matrix, log_kappa, sums, norm, T), constants, warps=4, stages=4)
    return sums


def choose(sums: Tensor, pointers: tuple[Any, ...], square: bool, choice: tuple[Any, ...]) -> None:
    """Run `choose_kernel` over (S, T, N) sums. pointers, choice: as for `gate_kernels.gate_kernel`."""
    parts, T, N = sums.shape
    NP = power_of_2(N)
    BT = max(2, min(power_of_2(T), 256 // NP))
    launch(choose_kernel, (ceil_div(T, BT),), (sums, *pointers), (parts, N, square, *choice, NP, BT))
