"""Device functions on a tile of gates in registers: the budget's numbers, softmax, selection and their backward.

Legend: B tokens of a tile, N experts padded to a power of two; columns past the real experts hold probability 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grmoe.kernels import runtime

# A kernel can read constexpr globals only.
DENSE, ABOVE = tl.constexpr(runtime.DENSE), tl.constexpr(runtime.ABOVE)
MASS, COUNT = tl.constexpr(runtime.MASS), tl.constexpr(runtime.COUNT)
PER_TOKEN, PER_SEQUENCE = tl.constexpr(runtime.PER_TOKEN), tl.constexpr(runtime.PER_SEQUENCE)


@triton.jit
def softmax_BN(logits_BN):
    """Along experts. A row with NaN in it becomes NaN."""
    shifted = logits_BN - tl.max(logits_BN, axis=1)[:, None]
    e_BN = tl.exp(shifted)
    return e_BN / tl.sum(e_BN, axis=1)[:, None]


@triton.jit
def mix(word):
    """The 32-bit hash of `grmoe.routing.elastic.mix`, in uint32."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def budget_B(
    token, num_tokens, tau_ptr, cap_ptr, key_ptr, first_row_ptr, length, layer,
    PER_ROW: tl.constexpr, ELASTIC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """(τ, cap) of each token: one number for all, one per sequence (PER_ROW), or drawn (`grmoe.routing.elastic`)."""
    if PER_ROW:
        row_B, inside_B = token // length, token < num_tokens
        tau_B = tl.load(tau_ptr + row_B, mask=inside_B, other=1.0)
        cap_B = tl.load(cap_ptr + row_B, mask=inside_B, other=1)
    else:
        tau_B = (token * 0).to(tl.float32) + tl.load(tau_ptr)
        cap_B = token * 0 + tl.load(cap_ptr)
    if ELASTIC:
        key = tl.load(key_ptr)
        index_B = token + tl.load(first_row_ptr).to(tl.int32) * length
        if UNIT == PER_SEQUENCE:
            index_B = index_B // length
        elif UNIT != PER_TOKEN:
            index_B = index_B * 0
        stem = mix(layer.to(tl.uint32) + mix(key.to(tl.uint32)))
        u_B = (mix(index_B.to(tl.uint32) + stem) >> 8).to(tl.float32) * (1.0 / (1 << 24))
        if ELASTIC == MASS:
            tau_B = tl.where(key < 0, tau_B, tl.minimum(tau_B, u_B))
        else:
            fewer_B = 1 + tl.floor(u_B * cap_B.to(tl.float32)).to(tl.int32)
            cap_B = tl.where(key < 0, cap_B, tl.minimum(cap_B, fewer_B))
    return tau_B, cap_B


@triton.jit
def alpha_B1(alpha_ptr, token, num_tokens, length, PER_ROW: tl.constexpr):
    """α as a scalar, or as (BT, 1) where each sequence has its own."""
    if PER_ROW:
        alpha = tl.load(alpha_ptr + token // length, mask=token < num_tokens, other=1.0)[:, None]
    else:
        alpha = tl.load(alpha_ptr)
    return alpha


@triton.jit
def bias_BN(bias_ptr, token, expert, num_tokens, length, num_experts: tl.constexpr, PER_ROW: tl.constexpr):
    """The bias of the choice as (1, N), or as (BT, N) where each sequence has its own."""
    real_N = expert < num_experts
    if PER_ROW:
        place = (token // length)[:, None] * num_experts + expert[None, :]
        inside = (token < num_tokens)[:, None] & real_N[None, :]
        bias = tl.load(bias_ptr + place, mask=inside, other=0.0)
    else:
        bias = tl.load(bias_ptr + expert, mask=real_N, other=0.0)[None, :]
    return bias


@triton.jit
def select_BN(probs_BN, index_N, real_N, tau_B, cap_B, MODE: tl.constexpr, MAX_EXPERTS: tl.constexpr):
    """Which experts are computed, as 0/1. LARGEST takes at most `cap_B` while the mass before is under `tau_B`, or,
    where `tau_B` is negative, while the next one has at least −`tau_B`. ABOVE takes those with probability at least
    `tau_B`. MAX_EXPERTS is the largest possible cap.

    Ties go to the lower index. A row of NaN counts as all zero, so that it also gets an expert.
    """
    if MODE == DENSE:
        chosen_BN = (probs_BN == probs_BN) | (probs_BN != probs_BN)
        chosen_BN = chosen_BN & real_N[None, :]
        return chosen_BN.to(tl.int32)
    # Padding is never chosen, and no expert is taken twice.
    left_BN = tl.where(probs_BN == probs_BN, probs_BN, 0.0)
    left_BN = tl.where(real_N[None, :], left_BN, -1.0)
    if MODE == ABOVE:
        best_B = tl.max(left_BN, axis=1)
        first_B = tl.min(tl.where(left_BN == best_B[:, None], index_N[None, :], probs_BN.shape[1]), axis=1)
        chosen_BN = (left_BN >= tau_B[:, None]) | (index_N[None, :] == first_B[:, None])
        return (chosen_BN & real_N[None, :]).to(tl.int32)
    chosen_BN = (left_BN > 2.0).to(tl.int32)  # none: zeros in the layout of the caller's tile
    mass_B = tl.sum(chosen_BN, axis=1).to(tl.float32)
    for taken in range(MAX_EXPERTS):
        best_B = tl.max(left_BN, axis=1)
        first_B = tl.min(tl.where(left_BN == best_B[:, None], index_N[None, :], probs_BN.shape[1]), axis=1)
        next_B = tl.where(tau_B < 0, best_B >= -tau_B, mass_B < tau_B)
        more_B = (next_B | (cap_B * 0 == taken)) & (taken < cap_B)  # the first one always
        take_BN = (index_N[None, :] == first_B[:, None]) & more_B[:, None]
        chosen_BN = tl.where(take_BN, 1, chosen_BN)
        left_BN = tl.where(take_BN, -1.0, left_BN)
        mass_B += tl.where(more_B, best_B, 0.0)
    return chosen_BN


@triton.jit
def weigh_BN(logits_BN, probs_BN, chosen_BN, RENORMALIZE: tl.constexpr):
    """Combine weights: the probabilities of the chosen experts, scaled to sum one if requested. The specification is
    `grmoe.kernels.combine.combine_weights`. At least one expert is chosen."""
    if RENORMALIZE:
        # Their softmax, because their probabilities may all be zero. A row of NaN stays one.
        among_BN = softmax_BN(tl.where(chosen_BN != 0, logits_BN, float("-inf")))
        weights_BN = tl.where(probs_BN == probs_BN, among_BN, probs_BN)
    else:
        weights_BN = tl.where(chosen_BN != 0, probs_BN, 0.0)
    return weights_BN


@triton.jit
def grad_logits_BN(
    probs_BN,
    weights_BN,
    chosen_BN,
    grad_logits_BN,
    grad_probs_BN,
    grad_weights_BN,
    RENORMALIZE: tl.constexpr,
):
    """∂loss/∂ℓ from the gradients of logits, probabilities and combine weights. weights_BN: read if RENORMALIZE."""
    if RENORMALIZE:  # a softmax over the chosen experts, beside that over all
        mean_B = tl.sum(weights_BN * grad_weights_BN, axis=1)
        grad_logits_BN += weights_BN * (grad_weights_BN - mean_B[:, None])
    else:
        grad_probs_BN += tl.where(chosen_BN != 0, grad_weights_BN, 0.0)
    inner_B = tl.sum(probs_BN * grad_probs_BN, axis=1)
    return probs_BN * (grad_probs_BN - inner_B[:, None]) + grad_logits_BN
