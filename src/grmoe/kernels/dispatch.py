"""The dispatch list (see `grmoe.experts.dispatch`) by two kernels: count, then place. No sort, no atomics.

Tokens are cut into chunks, one per program. The first kernel counts each chunk's assignments to every expert. In the
second, each program sums the counts before it, which gives its first row of every expert. Few tokens are one chunk,
and the second kernel counts by itself.

Legend: T tokens, N experts (padded to a power of two), A rows of the list, M most experts per token, P chunks read
at once, B tokens of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from grmoe.kernels.early import await_inputs
from grmoe.kernels.launch import ceil_div, launch, power_of_2
from grmoe.kernels.runtime import attempt

CHUNKS = 256  # the most programs, because each reads the counts of all
ALONE = 256  # tokens that one program handles without the first kernel


def token_tile(num_experts: int) -> int:
    """Tokens per step: a tile of tokens × experts stays in registers."""
    return min(128, max(2, 4096 // power_of_2(num_experts)))


def place_tile(num_tokens: int, num_experts: int) -> int:
    """Tokens per step of `place_kernel`, which holds several such tiles at once. More would not stay in registers."""
    return min(power_of_2(num_tokens), 128, max(2, 2048 // power_of_2(num_experts)))


@triton.jit
def _count(selected_ptr, program, num_tokens, chunk, num_experts, NP: tl.constexpr, B: tl.constexpr):
    """Assignments of a chunk to every expert."""
    expert = tl.arange(0, NP)
    total_N = tl.zeros((NP,), tl.int32)
    end = tl.minimum(num_tokens, (program + 1) * chunk)
    for start in range(0, chunk, B):
        token = program * chunk + start + tl.arange(0, B)
        inside = (token < end)[:, None] & (expert < num_experts)[None, :]
        place = token[:, None].to(tl.int64) * num_experts + expert[None, :]
        total_N += tl.sum(tl.load(selected_ptr + place, mask=inside, other=0).to(tl.int32), axis=0)
    return total_N


@triton.jit(do_not_specialize=["num_tokens", "chunk"])
def count_kernel(
    selected_ptr, counts_ptr, num_tokens, chunk, num_experts: tl.constexpr, NP: tl.constexpr, B: tl.constexpr
):
    """counts[p, e] = assignments of chunk p to expert e."""
    await_inputs()
    program = tl.program_id(0)
    total_N = _count(selected_ptr, program, num_tokens, chunk, num_experts, NP, B)
    tl.store(counts_ptr + program * NP + tl.arange(0, NP), total_N)


@triton.jit(do_not_specialize=["num_tokens", "chunk", "rows"])
def place_kernel(
    selected_ptr, weights_ptr, counts_ptr, token_ptr, pair_ptr, offset_ptr, slot_ptr, weight_ptr,
    num_tokens, chunk, rows,
    num_experts: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, NP: tl.constexpr, P: tl.constexpr,
    B: tl.constexpr, BA: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Writes a chunk's entries of token, pair, slot and weight; program 0 also the offsets.

    ALONE: this program is the only one and counts by itself.
    """
    await_inputs()
    program, expert, chunks = tl.program_id(0), tl.arange(0, NP), tl.arange(0, P)
    if ALONE:
        totals_N = _count(selected_ptr, program, num_tokens, chunk, num_experts, NP, B)
        before_N = tl.zeros((NP,), tl.int32)
    else:
        totals_N, before_N = tl.zeros((NP,), tl.int32), tl.zeros((NP,), tl.int32)
        for start in range(0, tl.num_programs(0), P):  # all at once would not stay in registers
            chunk_P = start + chunks
            counts_PN = tl.load(
                counts_ptr + chunk_P[:, None] * NP + expert[None, :],
                mask=(chunk_P < tl.num_programs(0))[:, None] & (expert < NP)[None, :],
                other=0,
            )
            totals_N += tl.sum(counts_PN, axis=0)
            before_N += tl.sum(tl.where((chunk_P < program)[:, None], counts_PN, 0), axis=0)
    offset_N = tl.cumsum(totals_N, axis=0)
    if program == 0:
        tl.store(offset_ptr + expert, offset_N, mask=expert < num_experts)
    next_N = offset_N - totals_N + before_N
    end = tl.minimum(num_tokens, (program + 1) * chunk)
    slots = tl.arange(0, MP)
    for start in range(0, chunk, B):
        token = program * chunk + start + tl.arange(0, B)
        inside = (token < end)[:, None] & (expert < num_experts)[None, :]
        place = token[:, None].to(tl.int64) * num_experts + expert[None, :]
        chosen_BN = tl.load(selected_ptr + place, mask=inside, other=0).to(tl.int32)
        row_BN = next_N[None, :] + tl.cumsum(chosen_BN, axis=0) - 1
        rank_BN = tl.cumsum(chosen_BN, axis=1) - 1
        next_N += tl.sum(chosen_BN, axis=0)
        pair_BN = token[:, None] * M + rank_BN
        chosen = (chosen_BN != 0) & (rank_BN < M)
        tl.store(token_ptr + row_BN, tl.broadcast_to(token[:, None], (B, NP)), mask=chosen)
        tl.store(pair_ptr + row_BN, pair_BN, mask=chosen)
        tl.store(slot_ptr + pair_BN, row_BN, mask=chosen)
        tl.store(weight_ptr + pair_BN, tl.load(weights_ptr + place, mask=chosen, other=0.0), mask=chosen)
        # A token with fewer than M experts has empty slots at the end.
        empty = (
            (slots[None, :] >= tl.sum(chosen_BN, axis=1)[:, None])
            & (slots < M)[None, :]
            & (token < end)[:, None]
        )
        spare = token[:, None] * M + slots[None, :]
        tl.store(slot_ptr + spare, tl.zeros((B, MP), tl.int32) + rows, mask=empty)
        tl.store(weight_ptr + spare, tl.zeros((B, MP), tl.float32), mask=empty)
    # Unused rows name token 0, so that reading them stays in bounds.
    used = tl.sum(totals_N, axis=0)
    for start in range(0, chunk * M, BA):
        row = program * chunk * M + start + tl.arange(0, BA)
        unused = (row >= used) & (row < rows)
        tl.store(token_ptr + row, tl.zeros((BA,), tl.int32), mask=unused)
        tl.store(pair_ptr + row, tl.zeros((BA,), tl.int32), mask=unused)


@triton.jit(do_not_specialize=["num_tokens"])
def spread_kernel(grad_ptr, selected_ptr, out_ptr, num_tokens, num_experts: tl.constexpr, M: tl.constexpr,
                  NP: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """Gradient of weight_TM with respect to weights_TN: slot m goes back to the token's m-th chosen expert."""
    await_inputs()
    token, expert = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, NP)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    place = token[:, None].to(tl.int64) * num_experts + expert[None, :]
    chosen_BN = tl.load(selected_ptr + place, mask=inside, other=0).to(tl.int32)
    rank_BN = tl.cumsum(chosen_BN, axis=1) - 1
    chosen = (chosen_BN != 0) & (rank_BN < M)
    tl.store(
        out_ptr + place, tl.load(grad_ptr + token[:, None] * M + rank_BN, mask=chosen, other=0.0), mask=inside
    )


def _forward(
    weights: Tensor, selected: Tensor, max_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(token_A, pair_A, offset_N, slot_TM, weight_TM), all int32 but the weights."""
    (T, N), M = selected.shape, max_experts
    token, pair, offset, slot, weight = outputs = _outputs(weights, selected, max_experts)
    if T == 0:
        offset.zero_()
        return outputs
    weights, marks = weights.contiguous(), selected.contiguous().view(torch.uint8)
    NP, tile = power_of_2(N), place_tile(T, N)
    alone = T <= ALONE
    chunk = ceil_div(T if alone else ceil_div(T, CHUNKS), tile) * tile
    programs = ceil_div(T, chunk)
    counts = offset
    if not alone:
        counts = torch.empty(programs, NP, dtype=torch.int32, device=selected.device)
        launch(count_kernel, (programs,), (marks, counts, T, chunk), (N, NP, tile))
    args = (marks, weights, counts, token, pair, offset, slot, weight, T, chunk, T * M)
    MP, P = power_of_2(M), min(power_of_2(programs), max(2, 4096 // NP))
    launch(place_kernel, (programs,), args, (N, M, MP, NP, P, tile, 1024, alone))
    return outputs


def _outputs(weights: Tensor, selected: Tensor, M: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    T, N = selected.shape
    token, pair = (selected.new_empty(T * M, dtype=torch.int32) for _ in range(2))
    offset = selected.new_empty(N, dtype=torch.int32)
    slot, weight = selected.new_empty(T, M, dtype=torch.int32), weights.new_empty(T, M)
    return token, pair, offset, slot, weight


def _backward(grad: Tensor, selected: Tensor) -> Tensor:
    (T, N), M = selected.shape, grad.shape[1]
    out = torch.empty(T, N, dtype=grad.dtype, device=grad.device)
    if T:
        tile = token_tile(N)
        args = (grad.contiguous(), selected.contiguous().view(torch.uint8), out, T)
        launch(spread_kernel, (ceil_div(T, tile),), args, (N, M, power_of_2(N), tile))
    return out


def _backward_plain(grad_TM: Tensor, selected_TN: Tensor) -> Tensor:
    """As `_backward`, in PyTorch, in case the kernel does not compile."""
    rank_TN = (selected_TN.long().cumsum(1) - 1).clamp(min=0)
    return torch.where(selected_TN, grad_TM.gather(1, rank_TN.clamp(max=grad_TM.shape[1] - 1)), 0.0)


# Opaque operators for the compiler. Eager mode calls the functions directly, which costs the host less.
_forward_op = torch.library.custom_op("grmoe::dispatch", _forward, mutates_args=())
_backward_op = torch.library.custom_op("grmoe::dispatch_backward", _backward, mutates_args=())
_forward_op.register_fake(_outputs)


@_backward_op.register_fake
def _(grad: Tensor, selected: Tensor) -> Tensor:
    return grad.new_empty(selected.shape)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, selected: Tensor, max_experts: int) -> tuple[Tensor, ...]:
        run = _forward_op if torch.compiler.is_compiling() else _forward
        token, pair, offset, slot, weight = run(weights, selected, max_experts)
        ctx.save_for_backward(selected)
        ctx.mark_non_differentiable(token, pair, offset, slot)
        return token, pair, offset, slot, weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        run = _backward_op if torch.compiler.is_compiling() else _backward
        (selected,) = ctx.saved_tensors
        back = attempt(
            "dispatch backward", lambda: run(grads[4], selected), lambda: _backward_plain(grads[4], selected)
        )
        return back, None, None


def dispatch(
    weights_TN: Tensor, selected_TN: Tensor, max_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(token_A, pair_A, offset_N, slot_TM, weight_TM), differentiable in the weights."""
    return _Dispatch.apply(weights_TN, selected_TN, max_experts)
