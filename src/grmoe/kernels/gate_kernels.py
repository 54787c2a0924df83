"""The fused gate's kernels: energies of a token in every subspace, prior, dial, softmax and selection in one pass.

The frames are packed so that column j·N + e is direction j of expert e. A tile of x·U then holds whole rounds of
experts, and the sum over an expert's directions is a sum over every N-th column. With N a power of two it stays inside
a thread's registers, and the (T, N·K) projection is written only to keep it for the backward.

Legend: T tokens, D model width, N experts (padded to a power of two), K rank, C = K·N packed columns (padded to
whole tiles); B… tile sizes. `linear` gates (x·Wᵀ, no squares) are the case K = 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grmoe.kernels import runtime
from grmoe.kernels.early import await_inputs
from grmoe.kernels.select import alpha_B1, bias_BN, budget_B, select_BN, softmax_BN, weigh_BN

ZERO_TOKEN = tl.constexpr(1e-12)  # as in grmoe.routing.grassmann
SCORES = tl.constexpr(runtime.SCORES)


@triton.jit
def pack_kernel(
    frames_ptr, packed_ptr, num_experts: tl.constexpr, D: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    NP: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """packed[j·NP + e, :] = frames[e, :, j], zero rows for padding. One program per expert and tile of directions."""
    await_inputs()
    expert = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    j = tl.program_id(2) * BK + tl.arange(0, BK)
    inside = (d[:, None] < D) & (j[None, :] < K) & (expert < num_experts)
    tile_DK = tl.load(
        frames_ptr + expert.to(tl.int64) * D * K + d[:, None] * K + j[None, :], mask=inside, other=0.0
    )
    row = j * NP + expert
    place = packed_ptr + row[:, None].to(tl.int64) * D + d[None, :]
    tl.store(
        place, tl.trans(tile_DK).to(packed_ptr.dtype.element_ty), mask=(row[:, None] < C) & (d[None, :] < D)
    )


@triton.jit
def unpack_kernel(
    packed_ptr,
    frames_ptr,
    D: tl.constexpr,
    K: tl.constexpr,
    NP: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
):
    """The inverse of `pack_kernel`, for gradients."""
    await_inputs()
    expert = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    j = tl.program_id(2) * BK + tl.arange(0, BK)
    row = j * NP + expert
    inside = (j[:, None] < K) & (d[None, :] < D)
    tile_KD = tl.load(packed_ptr + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
    place = frames_ptr + expert.to(tl.int64) * D * K + d[:, None] * K + j[None, :]
    tl.store(
        place, tl.trans(tile_KD).to(frames_ptr.dtype.element_ty), mask=(d[:, None] < D) & (j[None, :] < K)
    )


@triton.jit
def column_weights(log_kappa_ptr, column, num_experts, K, NP: tl.constexpr, DIAGONAL: tl.constexpr):
    """λ of each packed column: κ_e, or λ_ej along the frame's directions; zero on padding."""
    expert, j = column % NP, column // NP
    inside = (expert < num_experts) & (j < K)
    where = expert * K + j if DIAGONAL else expert
    return tl.where(inside, tl.exp(tl.load(log_kappa_ptr + where, mask=inside, other=0.0)), 0.0)


@triton.jit
def _sum_directions(
    acc_BC, log_kappa_ptr, column, num_experts, K, SQUARE: tl.constexpr, DIAGONAL: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Σ over the directions in this tile, (BT, NP): of squares (weighted by λ if diagonal), or of plain values."""
    if SQUARE:
        acc_BC = acc_BC * acc_BC
        if DIAGONAL:
            here = column + tl.arange(0, BC)
            acc_BC = acc_BC * column_weights(log_kappa_ptr, here, num_experts, K, NP, DIAGONAL)[None, :]
    return tl.sum(tl.reshape(acc_BC, (BT, BC // NP, NP)), axis=1)


@triton.jit
def _keep(kept_ptr, acc_BC, token, column, num_tokens, C: tl.constexpr, BC: tl.constexpr):
    """Some columns of the projection, in the tokens' precision."""
    here = column + tl.arange(0, BC)
    place = kept_ptr + token[:, None].to(tl.int64) * C + here[None, :]
    tl.store(place, acc_BC.to(kept_ptr.dtype.element_ty), mask=(token < num_tokens)[:, None])


@triton.jit
def _dial(scores_BN, prior_N, alpha, POSTERIOR: tl.constexpr):
    if POSTERIOR:
        logits_BN = alpha * (scores_BN + prior_N[None, :])
    else:
        logits_BN = alpha * scores_BN + prior_N[None, :]
    return logits_BN


@triton.jit
def finish_gate(
    sums_BN, norm_B, token, expert, log_kappa_ptr, prior_ptr, alpha_ptr, weight_alpha_ptr, budget,
    logits_ptr, probs_ptr, weights_ptr, selected_ptr, norm_ptr, num_tokens, energy_scale, length, layer,
    num_experts: tl.constexpr, SQUARE: tl.constexpr, DIAGONAL: tl.constexpr, POSTERIOR: tl.constexpr,
    MODE: tl.constexpr, MAX_EXPERTS: tl.constexpr, RENORMALIZE: tl.constexpr,
    PER_ROW: tl.constexpr, APART: tl.constexpr, BIASED: tl.constexpr, ELASTIC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """From the sums over directions and ‖x‖² to everything the gate returns, for a tile of tokens. With MODE == SCORES
    that is the scores, in place of the logits.

    budget: pointers to τ, cap, the bias of the choice, the key of a draw and its first row.
    """
    real_N = expert < num_experts
    inside = (token < num_tokens)[:, None] & real_N[None, :]
    place = token[:, None].to(tl.int64) * num_experts + expert[None, :]
    scores_BN = sums_BN
    if SQUARE:
        norm_B = tl.maximum(norm_B, ZERO_TOKEN)
        scores_BN = scores_BN * (energy_scale / norm_B)[:, None]
        if not DIAGONAL:
            kappa_N = tl.exp(tl.load(log_kappa_ptr + expert, mask=real_N, other=0.0))
            scores_BN = scores_BN * kappa_N[None, :]
        tl.store(norm_ptr + token, norm_B, mask=token < num_tokens)
    if MODE == SCORES:
        tl.store(logits_ptr + place, scores_BN, mask=inside)
    else:
        prior_N = tl.load(prior_ptr + expert, mask=real_N, other=0.0)
        alpha_BN = alpha_B1(alpha_ptr, token, num_tokens, length, PER_ROW)
        logits_BN = _dial(scores_BN, prior_N, alpha_BN, POSTERIOR)
        probs_BN = softmax_BN(tl.where(real_N[None, :], logits_BN, float("-inf")))
        tau_ptr, cap_ptr, bias_ptr, key_ptr, first_row_ptr = budget
        tau_B, cap_B = budget_B(
            token, num_tokens, tau_ptr, cap_ptr, key_ptr, first_row_ptr, length, layer, PER_ROW, ELASTIC, UNIT
        )
        ranks_BN = probs_BN
        if BIASED:
            biased_BN = logits_BN + bias_BN(bias_ptr, token, expert, num_tokens, length, num_experts, PER_ROW)
            ranks_BN = softmax_BN(tl.where(real_N[None, :], biased_BN, float("-inf")))
        chosen_BN = select_BN(ranks_BN, expert, real_N, tau_B, cap_B, MODE, MAX_EXPERTS)
        if APART:
            alpha_BN = alpha_B1(weight_alpha_ptr, token, num_tokens, length, PER_ROW)
            logits_BN = _dial(scores_BN, prior_N, alpha_BN, POSTERIOR)
            probs_BN = softmax_BN(tl.where(real_N[None, :], logits_BN, float("-inf")))
        weights_BN = weigh_BN(logits_BN, probs_BN, chosen_BN, RENORMALIZE)
        tl.store(logits_ptr + place, logits_BN, mask=inside)
        tl.store(probs_ptr + place, probs_BN, mask=inside)
        tl.store(weights_ptr + place, weights_BN, mask=inside)
        tl.store(selected_ptr + place, chosen_BN.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "length", "layer"])
def gate_kernel(
    x_desc, again_desc, packed_desc, kept_ptr,
    log_kappa_ptr, prior_ptr, alpha_ptr, weight_alpha_ptr, tau_ptr, cap_ptr, bias_ptr, key_ptr, first_row_ptr,
    logits_ptr, probs_ptr, weights_ptr, selected_ptr, norm_ptr, aux_ptr, num_tokens, energy_scale, length, layer,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, num_experts: tl.constexpr,
    SQUARE: tl.constexpr, DIAGONAL: tl.constexpr, POSTERIOR: tl.constexpr, MODE: tl.constexpr,
    MAX_EXPERTS: tl.constexpr, RENORMALIZE: tl.constexpr, PER_ROW: tl.constexpr, APART: tl.constexpr,
    BIASED: tl.constexpr, ELASTIC: tl.constexpr, UNIT: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    NP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: BT tokens against all experts. KEEP: the projection x·U is written too."""
    await_inputs()
    first = tl.program_id(0) * BT
    expert = tl.arange(0, NP)
    sums_BN = tl.zeros((BT, NP), tl.float32)
    norm_B = tl.zeros((BT,), tl.float32)
    token = first + tl.arange(0, BT)
    done: tl.constexpr = (3 if AT_ONCE else 1) if SQUARE else 0
    if SQUARE:
        # The lengths come from a second copy of the tile, `again_desc`. With one tile for the tensor core and for
        # registers, Triton 3.6 keeps one buffer too few and overwrites it while the tensor core still reads.
        square_BD = tl.zeros((BT, BD), tl.float32)
        acc_BC = tl.zeros((BT, BC), tl.float32)
        if AT_ONCE:  # few columns: all of them in one pass over x
            second_BC, third_BC = tl.zeros((BT, BC), tl.float32), tl.zeros((BT, BC), tl.float32)
        for d in tl.range(0, D, BD, num_stages=3):
            x_BD = x_desc.load([first, d])
            acc_BC = tl.dot(x_BD, packed_desc.load([0, d]).T, acc_BC, input_precision=PRECISION)
            if AT_ONCE:
                second_BC = tl.dot(x_BD, packed_desc.load([BC, d]).T, second_BC, input_precision=PRECISION)
                third_BC = tl.dot(x_BD, packed_desc.load([2 * BC, d]).T, third_BC, input_precision=PRECISION)
            wide_BD = again_desc.load([first, d]).to(tl.float32)
            square_BD += wide_BD * wide_BD
        norm_B = tl.sum(square_BD, axis=1)
        if KEEP:
            _keep(kept_ptr, acc_BC, token, 0, num_tokens, C, BC)
            if AT_ONCE:
                _keep(kept_ptr, second_BC, token, BC, num_tokens, C, BC)
                _keep(kept_ptr, third_BC, token, 2 * BC, num_tokens, C, BC)
        sums_BN += _sum_directions(acc_BC, log_kappa_ptr, 0, num_experts, K, SQUARE, DIAGONAL, BT, BC, NP)
        if AT_ONCE:
            sums_BN += _sum_directions(
                second_BC, log_kappa_ptr, BC, num_experts, K, SQUARE, DIAGONAL, BT, BC, NP
            )
            sums_BN += _sum_directions(
                third_BC, log_kappa_ptr, 2 * BC, num_experts, K, SQUARE, DIAGONAL, BT, BC, NP
            )
    for column in tl.range(done * BC, C, BC, flatten=True):
        acc_BC = tl.zeros((BT, BC), tl.float32)
        for d in range(0, D, BD):
            acc_BC = tl.dot(
                x_desc.load([first, d]), packed_desc.load([column, d]).T, acc_BC, input_precision=PRECISION
            )
        if KEEP:
            _keep(kept_ptr, acc_BC, token, column, num_tokens, C, BC)
        sums_BN += _sum_directions(
            acc_BC, log_kappa_ptr, column, num_experts, K, SQUARE, DIAGONAL, BT, BC, NP
        )
    finish_gate(
        sums_BN, norm_B, token, expert, log_kappa_ptr, prior_ptr, alpha_ptr, weight_alpha_ptr,
        (tau_ptr, cap_ptr, bias_ptr, key_ptr, first_row_ptr),
        logits_ptr, probs_ptr, weights_ptr, selected_ptr, norm_ptr, num_tokens, energy_scale, length, layer,
        num_experts, SQUARE, DIAGONAL, POSTERIOR, MODE, MAX_EXPERTS, RENORMALIZE, PER_ROW, APART, BIASED, ELASTIC,
        UNIT,
    )  # fmt: skip
    if first == 0:
        tl.store(aux_ptr, 0.0)
