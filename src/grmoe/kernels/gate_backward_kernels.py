"""The fused gate's backward: from the gradients of what the gate returned to those of logits, tokens and parameters.

Legend as in `gate_kernels`: T tokens, D model width, N experts (padded to a power of two), K rank, C packed columns
(padded to whole tiles); B… tile sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grmoe.kernels.early import await_inputs
from grmoe.kernels.gate_kernels import ZERO_TOKEN, column_weights
from grmoe.kernels.select import grad_logits_BN


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
    await_inputs()
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
    x_desc, packed_desc, kept_ptr, scaled_desc, log_kappa_ptr, alpha_ptr, norm_ptr,
    probs_ptr, weights_ptr, selected_ptr, g_logits_ptr, g_probs_ptr, g_weights_ptr, g_norm_ptr,
    along_ptr, column_sums_ptr, prior_sums_ptr,
    num_tokens, energy_scale,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, num_experts: tl.constexpr,
    DIAGONAL: tl.constexpr, POSTERIOR: tl.constexpr, RENORMALIZE: tl.constexpr,
    WITH_LOGITS: tl.constexpr, WITH_PROBS: tl.constexpr, WITH_WEIGHTS: tl.constexpr, WITH_NORM: tl.constexpr,
    PLAIN: tl.constexpr,
    PRECISION: tl.constexpr, NP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
    HALVES: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Reads or recomputes q = x·U and writes p = 2·w·λ·q with w = α·c·(∂loss/∂ℓ)/‖x‖², for two plain GEMMs.

        ∂x = p·Uᵀ + along·x,    ∂U = xᵀ·p,    along = 2 ∂loss/∂‖x‖² − 2 Σ_c λ w q² / ‖x‖²,    ∂λ_c = Σ_t w q²

    PLAIN: scores, that is α = 1. WITH_NORM: the loss depends on ‖x‖² in other ways too.
    column_sums (programs, C) and prior_sums (programs, N) are partial sums over a program's tokens.
    HALVES: q, and what becomes of it, does not stay in registers for all columns of a tile at once.
    KEPT: the forward has written q.
    """
    await_inputs()
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
        if KEPT:
            place = kept_ptr + token[:, None].to(tl.int64) * C + (column + tl.arange(0, BC))[None, :]
            q_BC = tl.load(place, mask=(token < num_tokens)[:, None], other=0.0).to(tl.float32)
        else:
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
    await_inputs()
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
    await_inputs()
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
