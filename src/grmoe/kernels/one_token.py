"""The experts of one token, as in decoding: two kernels, whose time is that of reading the chosen experts once.

There is no list of pairs and no sum behind the experts. Each program finds the chosen ones in the gate's own output.
The first kernel has a program for each of them and a few hidden units. The second has one for a few outputs: it adds up
all chosen experts, in order, so that the same input gives the same bits. Rows may have any width.

Legend: D model width, N experts (padded to a power of two), M most experts of the token, I expert width; B… tile sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grmoe.kernels.early import await_inputs
from grmoe.kernels.launch import ceil_div, launch, power_of_2
from grmoe.kernels.rows import gelu, sigmoid

COLUMNS = 1024  # of a tile, at most
ROWS = 8  # of a tile where the programs keep the device busy, otherwise half
ENOUGH = 512


@triton.jit
def _chosen(selected_ptr, num_experts: tl.constexpr, M: tl.constexpr, NP: tl.constexpr):
    """(experts, whether each is chosen, how many chosen ones come before it, how many there are, at most M)."""
    expert = tl.arange(0, NP)
    chosen = tl.load(selected_ptr + expert, mask=expert < num_experts, other=0).to(tl.int32)
    return expert, chosen, tl.cumsum(chosen, axis=0) - chosen, tl.minimum(tl.sum(chosen, axis=0), M)


@triton.jit
def hidden_kernel(
    x_ptr, up_ptr, selected_ptr, hidden_ptr,
    num_experts: tl.constexpr, M: tl.constexpr, D: tl.constexpr, I: tl.constexpr, GLU: tl.constexpr,
    NP: tl.constexpr, BO: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """hidden[m] = act(W_up x) of the token's m-th chosen expert, in fp32."""
    await_inputs()
    slot = tl.program_id(1)
    experts, chosen, before, total = _chosen(selected_ptr, num_experts, M, NP)
    if slot < total:
        expert = tl.sum(tl.where((chosen != 0) & (before == slot), experts, 0), axis=0).to(tl.int64)
        o = tl.program_id(0) * BO + tl.arange(0, BO)
        height: tl.constexpr = 2 * I if GLU else I
        row = up_ptr + (expert * height + o[:, None]) * D
        acc, acc_up = tl.zeros((BO, BD), tl.float32), tl.zeros((BO, BD), tl.float32)
        for d in range(0, D, BD):
            column = d + tl.arange(0, BD)
            inside = (o < I)[:, None]
            if D % BD != 0:
                inside = inside & (column < D)[None, :]
            x = tl.load(x_ptr + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
            acc += tl.load(row + column[None, :], mask=inside, other=0.0).to(tl.float32) * x
            if GLU:
                up = tl.load(row + I * D + column[None, :], mask=inside, other=0.0)
                acc_up += up.to(tl.float32) * x
        first, second = tl.sum(acc, axis=1), tl.sum(acc_up, axis=1)
        hidden = first * sigmoid(first) * second if GLU else gelu(first)
        tl.store(hidden_ptr + slot * I + o, hidden, mask=o < I)


@triton.jit
def output_kernel(
    hidden_ptr, down_ptr, weights_ptr, selected_ptr, out_ptr,
    num_experts: tl.constexpr, M: tl.constexpr, D: tl.constexpr, I: tl.constexpr, NP: tl.constexpr,
    BO: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """out = Σ_m w_m·W_down hidden[m] over the token's chosen experts."""
    await_inputs()
    experts, chosen, before, total = _chosen(selected_ptr, num_experts, M, NP)
    weights = tl.load(weights_ptr + experts, mask=chosen != 0, other=0.0).to(tl.float32)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    acc = tl.zeros((BO, BI), tl.float32)
    for slot in range(total):
        here = (chosen != 0) & (before == slot)
        expert, weight = (
            tl.sum(tl.where(here, experts, 0), axis=0),
            tl.sum(tl.where(here, weights, 0.0), axis=0),
        )
        row = down_ptr + (expert.to(tl.int64) * D + o[:, None]) * I
        for i in range(0, I, BI):
            column = i + tl.arange(0, BI)
            inside = (o < D)[:, None]
            if I % BI != 0:
                inside = inside & (column < I)[None, :]
            hidden = tl.load(hidden_ptr + slot * I + column, mask=column < I, other=0.0)
            acc += (
                tl.load(row + column[None, :], mask=inside, other=0.0).to(tl.float32)
                * (weight * hidden)[None, :]
            )
    tl.store(out_ptr + o, tl.sum(acc, axis=1).to(out_ptr.dtype.element_ty), mask=o < D)


def _tile(rows: int, width: int) -> tuple[int, int]:
    """(rows, columns) of a tile. rows: of all programs."""
    return (ROWS if rows >= ROWS * ENOUGH else ROWS // 2), min(COLUMNS, power_of_2(width))


def _experts(
    x: Tensor, weights: Tensor, selected: Tensor, up: Tensor, down: Tensor, max_experts: int, glu: bool
) -> Tensor:
    (N, D, I), M = down.shape, max_experts
    x, up, down, marks = *(t.contiguous() for t in (x, up, down)), selected.contiguous().view(torch.uint8)
    hidden = torch.empty(M, I, dtype=torch.float32, device=x.device)
    NP = power_of_2(N)
    BO, BD = _tile(M * I, D)
    launch(hidden_kernel, (ceil_div(I, BO), M), (x, up, marks, hidden), (N, M, D, I, glu, NP, BO, BD))
    out = torch.empty_like(x)
    BO, BI = _tile(D, I)
    args = (hidden, down, weights.contiguous(), marks, out)
    launch(output_kernel, (ceil_div(D, BO),), args, (N, M, D, I, NP, BO, BI))
    return out


# An opaque operator for the compiler.
_experts_op = torch.library.custom_op("grmoe::experts_of_one_token", _experts, mutates_args=())
_experts_op.register_fake(lambda x, *_: torch.empty_like(x))


def experts(
    x_1D: Tensor,
    weights_1N: Tensor,
    selected_1N: Tensor,
    up: Tensor,
    down: Tensor,
    max_experts: int,
    *,
    glu: bool,
) -> Tensor:
    """Σ over the chosen experts of weight · W_down act(W_up x), (1, D). At most `max_experts` are chosen."""
    run = _experts_op if torch.compiler.is_compiling() else _experts
    found: Tensor = run(x_1D, weights_1N, selected_1N, up, down, max_experts, glu)
    return found
