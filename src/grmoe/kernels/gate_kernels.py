"""The fused gate's kernels: energies of a token in every subspace, prior, dial, softmax and selection in one pass.

The frames are packed so that column j·N + e is direction j of expert e. A tile of x·U then holds whole rounds of
experts, and the sum over an expert's directions is a sum over every N-th column. With N a power of two it stays inside
a thread's registers, and the (T, N·K) projection is never written.

Legend: T tokens, D model width, N experts (padded to a power of two), K rank, C = K·N packed columns (padded to
whole tiles); B… tile sizes. `linear` gates (x·Wᵀ, no squares) are the case K = 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grmoe.kernels import runtime
from grmoe.kernels.select import alpha_B1, bias_BN, budget_B, grad_logits_BN, select_BN, softmax_BN, weigh_BN

ZERO_TOKEN = tl.constexpr(1e-12)  # as in grmoe.routing.grassmann
SCORES = tl.constexpr(runtime.SCORES)


@triton.jit
def pack_kernel(
    frames_ptr, packed_ptr, num_experts: tl.constexpr, D: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    NP: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """packed[j·NP + e, :] = frames[e, :, j], zero rows for padding. One program per expert and tile of directions."""
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
    x_desc, again_desc, packed_desc,
    log_kappa_ptr, prior_ptr, alpha_ptr, weight_alpha_ptr, tau_ptr, cap_ptr, bias_ptr, key_ptr, first_row_ptr,
    logits_ptr, probs_ptr, weights_ptr, selected_ptr, norm_ptr, aux_ptr, num_tokens, energy_scale, length, layer,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, num_experts: tl.constexpr,
    SQUARE: tl.constexpr, DIAGONAL: tl.constexpr, POSTERIOR: tl.constexpr, MODE: tl.constexpr,
    MAX_EXPERTS: tl.constexpr, RENORMALIZE: tl.constexpr, PER_ROW: tl.constexpr, APART: tl.constexpr,
    BIASED: tl.constexpr, ELASTIC: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    NP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: BT tokens against all experts."""
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


@triton.jit
def _load_or_zero(pointer, place, inside, GIVEN: tl.constexpr, BT: tl.constexpr, NP: tl.constexpr):
    if GIVEN:
        value_BN = tl.load(pointer + place, mask=inside, other=0.0).to(tl.float32)
    else:
        value_BN = tl.zeros((BT, NP), tl.float32)
    return value_BN


@triton.jit
def _logit_gradient(
    probs_ptr, weights_ptr, selected_ptr, g_logits_ptr, g_probs_ptr, g_weights_ptr, token, num_tokens, num_experts,
    RENORMALIZE: tl.constexpr, WITH_LOGITS: tl.constexpr, WITH_PROBS: tl.constexpr, WITH_WEIGHTS: tl.constexpr,
    BT: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, NP)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    place = token[:, None].to(tl.int64) * num_experts + expert[None, :]
    grad_BN = _load_or_zero(g_logits_ptr, place, inside, WITH_LOGITS, BT, NP)
    if WITH_PROBS or WITH_WEIGHTS:
        grad_BN = grad_logits_BN(
            tl.load(probs_ptr + place, mask=inside, other=0.0),
            _load_or_zero(weights_ptr, place, inside, RENORMALIZE, BT, NP),
            tl.load(selected_ptr + place, mask=inside, other=0),
            grad_BN,
            _load_or_zero(g_probs_ptr, place, inside, WITH_PROBS, BT, NP),
            _load_or_zero(g_weights_ptr, place, inside, WITH_WEIGHTS, BT, NP),
            RENORMALIZE,
        )
    return grad_BN


@triton.jit(do_not_specialize=["num_tokens"])
def linear_backward_kernel(
    probs_ptr, weights_ptr, selected_ptr, g_logits_ptr, g_probs_ptr, g_weights_ptr, alpha_ptr, out_ptr,
    num_tokens, num_experts: tl.constexpr,
    RENORMALIZE: tl.constexpr, WITH_LOGITS: tl.constexpr, WITH_PROBS: tl.constexpr, WITH_WEIGHTS: tl.constexpr,
    BT: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """α·∂loss/∂ℓ of a linear gate: the gradient of x·Wᵀ."""
    token, expert = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, NP)
    grad_BN = _logit_gradient(
        probs_ptr, weights_ptr, selected_ptr, g_logits_ptr, g_probs_ptr, g_weights_ptr, token, num_tokens, num_experts,
        RENORMALIZE, WITH_LOGITS, WITH_PROBS, WITH_WEIGHTS, BT, NP,
    )  # fmt: skip
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    place = token[:, None].to(tl.int64) * num_experts + expert[None, :]
    tl.store(out_ptr + place, (tl.load(alpha_ptr) * grad_BN).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale(
    q_BC, w_BN, scaled_desc, log_kappa_ptr, column_sums_ptr, first, column, num_experts: tl.constexpr,
    K: tl.constexpr, DIAGONAL: tl.constexpr, NP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Writes p = 2·w·λ·q and Σ_t w q² of some columns. Returns Σ_c λ w q² over them."""
    here = column + tl.arange(0, BC)
    lambda_C = column_weights(log_kappa_ptr, here, num_experts, K, NP, DIAGONAL)
    wq_BRN = tl.reshape(q_BC, (BT, BC // NP, NP)) * w_BN[:, None, :]
    wq_BC = tl.reshape(wq_BRN, (BT, BC))
    scaled_desc.store([first, column], (2.0 * lambda_C[None, :] * wq_BC).to(scaled_desc.dtype))
    square_BC = wq_BC * q_BC
    tl.store(column_sums_ptr + here, tl.sum(square_BC, axis=0))
    return tl.sum(square_BC * lambda_C[None, :], axis=1)


@triton.jit(do_not_specialize=["num_tokens"])
def gate_backward_kernel(
    x_desc, packed_desc, scaled_desc, log_kappa_ptr, alpha_ptr, norm_ptr,
    probs_ptr, weights_ptr, selected_ptr, g_logits_ptr, g_probs_ptr, g_weights_ptr, g_norm_ptr,
    along_ptr, column_sums_ptr, prior_sums_ptr,
    num_tokens, energy_scale,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, num_experts: tl.constexpr,
    DIAGONAL: tl.constexpr, POSTERIOR: tl.constexpr, RENORMALIZE: tl.constexpr,
    WITH_LOGITS: tl.constexpr, WITH_PROBS: tl.constexpr, WITH_WEIGHTS: tl.constexpr, WITH_NORM: tl.constexpr,
    PLAIN: tl.constexpr,
    PRECISION: tl.constexpr, NP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Recomputes q = x·U and writes p = 2·w·λ·q with w = α·c·(∂loss/∂ℓ)/‖x‖², for two plain GEMMs.

        ∂x = p·Uᵀ + along·x,    ∂U = xᵀ·p,    along = 2 ∂loss/∂‖x‖² − 2 Σ_c λ w q² / ‖x‖²,    ∂λ_c = Σ_t w q²

    PLAIN: scores, that is α = 1. WITH_NORM: the loss depends on ‖x‖² in other ways too.
    column_sums (programs, C) and prior_sums (programs, N) are partial sums over a program's tokens.
    HALVES: q, and what becomes of it, does not stay in registers for all columns of a tile at once.
    """
    program = tl.program_id(0)
    first = program * BT
    token, expert = first + tl.arange(0, BT), tl.arange(0, NP)
    grad_BN = _logit_gradient(
        probs_ptr, weights_ptr, selected_ptr, g_logits_ptr, g_probs_ptr, g_weights_ptr, token, num_tokens, num_experts,
        RENORMALIZE, WITH_LOGITS, WITH_PROBS, WITH_WEIGHTS, BT, NP,
    )  # fmt: skip
    if PLAIN:
        alpha = 1.0
    else:
        alpha = tl.load(alpha_ptr)
    norm_B = tl.load(norm_ptr + token, mask=token < num_tokens, other=1.0)
    prior_N = tl.sum(tl.where((token < num_tokens)[:, None], grad_BN, 0.0), axis=0)
    if POSTERIOR:
        prior_N = prior_N * alpha
    tl.store(prior_sums_ptr + program * num_experts + expert, prior_N, mask=expert < num_experts)
    w_BN = tl.where((token < num_tokens)[:, None], grad_BN * (alpha * energy_scale / norm_B)[:, None], 0.0)
    along_B = tl.zeros((BT,), tl.float32)
    sums_ptr = column_sums_ptr + program * C
    for column in range(0, C, BC):
        q_BC = tl.zeros((BT, BC), tl.float32)
        for d in range(0, D, BD):
            q_BC = tl.dot(
                x_desc.load([first, d]), packed_desc.load([column, d]).T, q_BC, input_precision=PRECISION
            )
        if HALVES:
            left_BC, right_BC = tl.split(tl.permute(tl.reshape(q_BC, (BT, 2, BC // 2)), (0, 2, 1)))
            along_B += _scale(
                left_BC, w_BN, scaled_desc, log_kappa_ptr, sums_ptr, first, column,
                num_experts, K, DIAGONAL, NP, BT, BC // 2,
            )  # fmt: skip
            along_B += _scale(
                right_BC, w_BN, scaled_desc, log_kappa_ptr, sums_ptr, first, column + BC // 2,
                num_experts, K, DIAGONAL, NP, BT, BC // 2,
            )  # fmt: skip
        else:
            along_B += _scale(
                q_BC, w_BN, scaled_desc, log_kappa_ptr, sums_ptr, first, column,
                num_experts, K, DIAGONAL, NP, BT, BC,
            )  # fmt: skip
    # Below the floor ‖x‖² is constant and has no gradient.
    along_B = -2.0 * along_B / norm_B
    if WITH_NORM:
        along_B += 2.0 * tl.load(g_norm_ptr + token, mask=token < num_tokens, other=0.0)
    along_B = tl.where(norm_B > ZERO_TOKEN, along_B, 0.0)
    tl.store(along_ptr + token, along_B, mask=token < num_tokens)


@triton.jit(do_not_specialize=["num_tokens"])
def gate_input_gradient_kernel(
    scaled_desc, packed_desc, x_desc, out_desc, along_ptr, num_tokens, C: tl.constexpr,
    PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """∂x = p·packed + along·x, one tile per program."""
    first, d = tl.program_id(1) * BT, tl.program_id(0) * BD
    acc_BD = tl.zeros((BT, BD), tl.float32)
    for column in range(0, C, BC):
        acc_BD = tl.dot(
            scaled_desc.load([first, column]),
            packed_desc.load([column, d]),
            acc_BD,
            input_precision=PRECISION,
        )
    token = first + tl.arange(0, BT)
    along_B = tl.load(along_ptr + token, mask=token < num_tokens, other=0.0)
    acc_BD += along_B[:, None] * x_desc.load([first, d]).to(tl.float32)
    out_desc.store([first, d], acc_BD.to(out_desc.dtype))


@triton.jit(do_not_specialize=["programs"])
def parameter_gradients_kernel(
    column_sums_ptr, prior_sums_ptr, log_kappa_ptr, g_log_kappa_ptr, g_prior_ptr, programs,
    K: tl.constexpr, C: tl.constexpr, num_experts: tl.constexpr, DIAGONAL: tl.constexpr,
    NP: tl.constexpr, BP: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """∂log κ and ∂prior of one expert from the partial sums over programs, always in the same order."""
    expert = tl.program_id(0)
    part = tl.arange(0, BP)
    prior = tl.zeros((BP,), tl.float32)
    for start in range(0, programs, BP):
        row = start + part
        prior += tl.load(prior_sums_ptr + row * num_experts + expert, mask=row < programs, other=0.0)
    tl.store(g_prior_ptr + expert, tl.sum(prior, axis=0))
    kappa = 0.0
    for first in range(0, K, BJ):
        j = first + tl.arange(0, BJ)
        total = tl.zeros((BP, BJ), tl.float32)
        for start in range(0, programs, BP):
            row = start + part
            inside = (row < programs)[:, None] & (j < K)[None, :]
            total += tl.load(
                column_sums_ptr + row[:, None] * C + (j * NP + expert)[None, :], mask=inside, other=0.0
            )
        sum_J = tl.sum(total, axis=0)
        if DIAGONAL:
            place = expert * K + j
            scale = tl.exp(tl.load(log_kappa_ptr + place, mask=j < K, other=0.0))
            tl.store(g_log_kappa_ptr + place, sum_J * scale, mask=j < K)
        kappa += tl.sum(sum_J, axis=0)
    if not DIAGONAL:
        tl.store(g_log_kappa_ptr + expert, kappa * tl.exp(tl.load(log_kappa_ptr + expert)))
