"""`routing_sums` and `prior_shares` (`grmoe.routing.metrics` and `counting`, the references) in two kernels.

Each program sums its chunk of tokens. Then one program per kind of sum adds the partial sums to the accumulators in
order, so that the same gates give the same bits. Few tokens are one chunk, and the first kernel does both.

Legend: T tokens, N experts (padded to a power of two), P chunks, B tokens of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grmoe.kernels import runtime
from grmoe.kernels.dispatch import place_tile, token_tile
from grmoe.kernels.early import await_inputs
from grmoe.kernels.launch import ceil_div, launch, power_of_2
from grmoe.kernels.select import select_BN

CHUNKS = 256
ALONE = 128  # tokens that one program handles without the second kernel
# What the prior counts. A kernel can read constexpr globals only.
PRIORS = {None: 0, "computed": 1, "candidates": 2, "leading": 3, "both": 4}
CANDIDATES, LEADING, BOTH = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
LARGEST = tl.constexpr(runtime.LARGEST)


@triton.jit(do_not_specialize=["num_tokens", "chunk"])
def partial_kernel(
    probs_ptr, weights_ptr, selected_ptr, tau_ptr, cap_ptr,
    gate_ptr, led_ptr, received_ptr, share_ptr, scalar_ptr, sums_ptr, prior_ptr, num_tokens, chunk,
    PRIOR: tl.constexpr, ROOM: tl.constexpr, num_experts: tl.constexpr, NP: tl.constexpr, B: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """Sums of one chunk. (P, N): gate probabilities, led tokens, received tokens, prior shares.
    (P, 4): entropy, 1/Σg², tokens, non-finite tokens.

    ALONE: this program is the only one and adds to `sums` and `prior_sums` by itself.
    """
    await_inputs()
    program, expert = tl.program_id(0), tl.arange(0, NP)
    real_N = expert < num_experts
    gate_N, led_N, received_N, share_N = (
        tl.zeros((NP,), tl.float32),
        tl.zeros((NP,), tl.float32),
        tl.zeros((NP,), tl.float32),
        tl.zeros((NP,), tl.float32),
    )
    entropy_B, inverse_B = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    tokens_B, bad_B = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    end = tl.minimum(num_tokens, (program + 1) * chunk)
    for start in range(0, chunk, B):
        token = program * chunk + start + tl.arange(0, B)
        inside = (token < end)[:, None] & real_N[None, :]
        place = token[:, None].to(tl.int64) * num_experts + expert[None, :]
        probs_BN = tl.load(probs_ptr + place, mask=inside, other=0.0)
        weights_BN = tl.load(weights_ptr + place, mask=inside, other=0.0)
        # x − x is zero for finite x only.
        finite_B = tl.min(((probs_BN - probs_BN) == 0.0).to(tl.int32), axis=1) != 0
        counted_B = finite_B & (token < end)
        probs_BN = tl.where(counted_B[:, None], probs_BN, 0.0)
        chosen_BN = (tl.load(selected_ptr + place, mask=inside, other=0) != 0) & counted_B[:, None]
        gate_N += tl.sum(probs_BN, axis=0)
        log_BN = tl.log(tl.where(probs_BN > 0, probs_BN, 1.0))
        entropy_B -= tl.sum(probs_BN * log_BN, axis=1)
        square_B = tl.sum(probs_BN * probs_BN, axis=1)
        inverse_B += tl.where(counted_B, 1.0 / tl.maximum(square_B, 1e-30), 0.0)
        received_N += tl.sum(chosen_BN.to(tl.float32), axis=0)
        each_B = tl.sum(chosen_BN.to(tl.float32), axis=1)
        tokens_B += counted_B.to(tl.float32)
        bad_B += ((finite_B == 0) & (token < end)).to(tl.float32)
        value_BN = tl.where(chosen_BN, weights_BN, -1.0)
        first_B = _first_largest(value_BN, expert)
        led_N += tl.sum(
            ((expert[None, :] == first_B[:, None]) & (each_B > 0)[:, None]).to(tl.float32), axis=0
        )
        if PRIOR == CANDIDATES or PRIOR == BOTH:  # noqa: SIM109
            tau_B = tl.zeros((B,), tl.float32) + tl.load(tau_ptr)
            cap_B = tl.zeros((B,), tl.int32) + tl.load(cap_ptr)
            chosen_BN = select_BN(probs_BN, expert, real_N, tau_B, cap_B, LARGEST, ROOM) != 0
            chosen_BN = chosen_BN & counted_B[:, None]
            each_B = tl.sum(chosen_BN.to(tl.float32), axis=1)
        share_BN = chosen_BN.to(tl.float32) / tl.maximum(each_B, 1.0)[:, None]
        if PRIOR == LEADING or PRIOR == BOTH:  # noqa: SIM109
            lead_B = _first_largest(tl.where(real_N[None, :], probs_BN, -1.0), expert)
            leads_BN = ((expert[None, :] == lead_B[:, None]) & counted_B[:, None]).to(tl.float32)
            if PRIOR == LEADING:
                share_BN = leads_BN
            else:
                share_BN = 0.5 * (share_BN + leads_BN)
        share_N += tl.sum(share_BN, axis=0)
    entropy, inverse = tl.sum(entropy_B, axis=0), tl.sum(inverse_B, axis=0)
    tokens, bad = tl.sum(tokens_B, axis=0), tl.sum(bad_B, axis=0)
    if ALONE:
        _add(sums_ptr + expert, gate_N, real_N)
        _add(sums_ptr + num_experts + expert, led_N, real_N)
        _add(sums_ptr + 2 * num_experts + expert, received_N, real_N)
        _add(sums_ptr + 3 * num_experts + 0, entropy, True)
        _add(sums_ptr + 3 * num_experts + 1, inverse, True)
        _add(sums_ptr + 3 * num_experts + 2, tokens, True)
        _add(sums_ptr + 3 * num_experts + 3, bad, True)
        if PRIOR:
            _add(prior_ptr + expert, share_N, real_N)
            _add(prior_ptr + num_experts, tokens, True)
    else:
        tl.store(gate_ptr + program * NP + expert, gate_N)
        tl.store(led_ptr + program * NP + expert, led_N)
        tl.store(received_ptr + program * NP + expert, received_N)
        tl.store(share_ptr + program * NP + expert, share_N)
        tl.store(scalar_ptr + program * 4 + 0, entropy)
        tl.store(scalar_ptr + program * 4 + 1, inverse)
        tl.store(scalar_ptr + program * 4 + 2, tokens)
        tl.store(scalar_ptr + program * 4 + 3, bad)


@triton.jit
def _add(place, value, mask):
    tl.store(place, tl.load(place, mask=mask) + value.to(place.dtype.element_ty), mask=mask)


@triton.jit
def _first_largest(value_BN, expert):
    best_B = tl.max(value_BN, axis=1)
    return tl.min(tl.where(value_BN == best_B[:, None], expert[None, :], value_BN.shape[1]), axis=1)


@triton.jit
def _column_sums(ptr, stride, index, chunks, inside):
    value = tl.load(ptr + chunks[:, None] * stride + index[None, :], mask=inside, other=0.0)
    return tl.sum(value.to(tl.float64), axis=0)


@triton.jit(do_not_specialize=["programs"])
def accumulate_kernel(
    gate_ptr, led_ptr, received_ptr, share_ptr, scalar_ptr, sums_ptr, prior_ptr, programs,
    PRIOR: tl.constexpr, num_experts: tl.constexpr, NP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """sums += the batch's sums; prior_sums += its shares and tokens. Each of five programs adds one kind."""
    await_inputs()
    kind, chunks, expert, column = tl.program_id(0), tl.arange(0, P), tl.arange(0, NP), tl.arange(0, 4)
    real_N, real_P = expert < num_experts, chunks < programs
    inside_PN = real_P[:, None] & real_N[None, :]
    if kind == 0:
        _add(sums_ptr + expert, _column_sums(gate_ptr, NP, expert, chunks, inside_PN), real_N)
    elif kind == 1:
        place = sums_ptr + num_experts + expert
        _add(place, _column_sums(led_ptr, NP, expert, chunks, inside_PN), real_N)
    elif kind == 2:
        place = sums_ptr + 2 * num_experts + expert
        _add(place, _column_sums(received_ptr, NP, expert, chunks, inside_PN), real_N)
    elif kind == 3:
        if PRIOR:
            _add(prior_ptr + expert, _column_sums(share_ptr, NP, expert, chunks, inside_PN), real_N)
    else:
        inside_P4 = real_P[:, None] & (column < 4)[None, :]
        scalar_4 = _column_sums(scalar_ptr, 4, column, chunks, inside_P4)
        _add(sums_ptr + 3 * num_experts + column, scalar_4, column < 4)
        if PRIOR:
            _add(prior_ptr + num_experts, tl.sum(tl.where(column == 2, scalar_4, 0.0), axis=0), True)


def _add_counts(
    probs: Tensor,
    weights: Tensor,
    selected: Tensor,
    tau: Tensor | None,
    cap: Tensor | None,
    sums: Tensor,
    prior_sums: Tensor,
    prior: int,
    room: int,
) -> None:
    T, N = probs.shape
    if T == 0:
        return
    NP, alone = power_of_2(N), T <= ALONE
    tile = place_tile(T, N) if alone else token_tile(N)
    chunk = ceil_div(T if alone else ceil_div(T, CHUNKS), tile) * tile
    programs = ceil_div(T, chunk)
    sections: tuple[Tensor, ...] = (sums,) * 5  # not written where alone
    if not alone:
        partial = torch.empty(programs * (4 * NP + 4), dtype=torch.float32, device=probs.device)
        sections = partial.split([programs * NP] * 4 + [programs * 4])
    marks = selected.contiguous().view(torch.uint8)
    limits = [prior_sums if t is None else t for t in (tau, cap)]  # not read where None
    given = (probs.contiguous(), weights.contiguous(), marks, *limits)
    constants = (prior, room, N, NP, tile, alone)
    launch(partial_kernel, (programs,), (*given, *sections, sums, prior_sums, T, chunk), constants)
    if not alone:
        args = (*sections, sums, prior_sums, programs)
        launch(accumulate_kernel, (5,), args, (prior > 0, N, NP, power_of_2(programs)), warps=8)


_add_counts_op = torch.library.custom_op(
    "grmoe::add_counts", _add_counts, mutates_args=("sums", "prior_sums")
)
_add_counts_op.register_fake(lambda *_: None)


def add_counts(
    probs_TN: Tensor,
    weights_TN: Tensor,
    selected_TN: Tensor,
    sums: Tensor,
    prior_sums: Tensor,
    *,
    prior: str | None = None,
    tau: Tensor | None = None,
    cap: Tensor | None = None,
    room: int = 1,
) -> None:
    """Add one pass to `sums`, and unless `prior` is None to `prior_sums`.

    prior: what it counts (`Budget.balances`). For "candidates" and "both" the full budget is τ and cap, 0-d, and cap is
    at most `room`.
    """
    run = _add_counts_op if torch.compiler.is_compiling() else _add_counts
    run(probs_TN, weights_TN, selected_TN, tau, cap, sums, prior_sums, PRIORS[prior], room)
