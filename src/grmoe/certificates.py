"""Proved bounds on routing: entropy, top-k mass, load balance, truncation error, range of the logits.

Every function takes tensors and returns a `Certificate`: a number, and whether the hypothesis behind it holds. Where it
does not, the number is the trivial one that is always true. There are two kinds of bound: `paper` is the formula as the
paper prints it, `sharp` the best one from the same assumptions. Both are exact in real arithmetic; rounding adds a few
units in the last place. Half-precision input is widened to fp32. Logits ℓ include α and the prior, so that the gate is
softmax(ℓ). Entropies are in nats. One file, because all bounds share the same few helpers.

Legend: N experts, D model width d, K subspace rank k, M = 1 … N−1 experts at the top; `...` any batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grmoe import checks

__all__ = [
    "Certificate",
    "EntropyBounds",
    "amortized_tv_bound",
    "entropy_bounds",
    "entropy_bounds_from_range",
    "load_cv_bound",
    "logit_range_bound",
    "min_load_bounds",
    "separation_gap",
    "topk_mass_bound",
    "truncation_error_bound",
]

_FINITE = "the logits are finite"
_SEPARATED = "alpha >= 0 is finite, the gap Δ is finite and > 0, every D_i leads its rivals by Δ"


@dataclass(frozen=True)
class Certificate:
    """`bound`, the mask `holds` (broadcasts against it), and the hypothesis behind that mask in words.

    Where `holds` is False, `bound` is the trivial value that the function names. A hypothesis about the data (a
    mixture, the source of a token) cannot be checked from the arguments: the caller must ensure it.
    """

    bound: Tensor
    holds: Tensor
    hypothesis: str


@dataclass(frozen=True)
class EntropyBounds:
    """`lower` ≤ H ≤ `upper`."""

    lower: Certificate
    upper: Certificate


def _wide(name: str, value: Tensor) -> Tensor:
    checks.floating(name, value)
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _scalar(name: str, value: object, at_least: float = -math.inf, like: object = None) -> Tensor:
    """A tensor stays on its device, unread. A Python number is checked and becomes a tensor with dtype and device of
    `like`, or in fp64 on the CPU if `like` is not a tensor."""
    if isinstance(value, Tensor):
        return _wide(name, value)
    number = checks.finite(name, value, at_least=at_least)
    if isinstance(like, Tensor):  # filled on the device, not copied to it
        return torch.full(
            (), number, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device
        )
    return torch.tensor(number, dtype=torch.float64)


def _experts(name: str, value: Tensor) -> Tensor:
    value = _wide(name, value)
    ok = value.ndim >= 1 and value.shape[-1] >= 2
    checks.require(ok, f"{name} must have shape (..., N) with N >= 2, got {tuple(value.shape)}")
    return value


def _shape(name: str, value: Tensor, *allowed: tuple[int, ...]) -> None:
    ok = tuple(value.shape) in allowed
    checks.require(ok, f"{name} must have shape {' or '.join(map(str, allowed))}, got {tuple(value.shape)}")


def _range(x_N: Tensor) -> Tensor:
    return x_N.amax(-1) - x_N.amin(-1)


def _lowest_entropy(r: Tensor, N: int) -> Tensor:
    """min H over all logits of range at most r, attained by M experts at the top and N−M at the bottom.

    ∂H/∂ℓ_e has the sign of (the others' gate mean − ℓ_e). So H rises and then falls along each coordinate, and its
    minimum over the box [0, r]^N is at a corner. All M are tried, which costs one pass over the logits. The best one is
    next to N(w−1)/(e^r−1), w = r/(1−e^{−r}).
    """
    top_M = torch.arange(1, N, dtype=r.dtype, device=r.device)
    tail = torch.exp(-r).unsqueeze(-1) * (N - top_M)
    Z_M = top_M + tail
    return (Z_M.log() + r.unsqueeze(-1) * tail / Z_M).amin(-1)


def _highest_entropy(r: Tensor, N: int) -> Tensor:
    """max H over logits of range exactly r: one at the top, one at the bottom, the rest at their gate mean v.

    By the same sign rule the best place of a free logit is the others' mean, v = r/(1+e^{−r}) above the bottom.
    """
    p = torch.exp(-r)
    v = r / (1 + p)
    return torch.log(N - 2 + torch.exp(-v) + torch.exp(r * p / (1 + p)))  # the last exponent is r − v


def entropy_bounds(logits_N: Tensor, method: Literal["sharp", "paper"] = "sharp") -> EntropyBounds:
    """Bounds on the routing entropy H of softmax(ℓ), with r = max ℓ − min ℓ; shapes (...).

    `paper` (Theorem "Concentration–Entropy Bound"): log N − (max ℓ − mean ℓ) ≤ H ≤ log N − ½ Var_U(ℓ) e^{−r}.
    The lower one may be negative.

    `sharp`, lower: the largest of 0, the paper's bound, and the least entropy that (N, r) allow,
    min_M log(M+(N−M)e^{−r}) + (N−M)e^{−r} r/(M+(N−M)e^{−r}).
    `sharp`, upper: the smaller of the largest entropy that (N, r) allow, log(N−2+e^{−v}+e^{r−v}) with v = r/(1+e^{−r}),
    and log N − Var_U(ℓ)(1−e^{−r}(1+r))/r², the exact integral of the paper's proof.

    Trivial values: 0 and log N.
    """
    checks.one_of("method", method, ("sharp", "paper"))
    logits_N = _experts("logits", logits_N)
    N = logits_N.shape[-1]
    log_N = math.log(N)
    holds = torch.isfinite(_range(logits_N))
    logits_N = torch.where(holds.unsqueeze(-1), logits_N, 0.0)
    r = _range(logits_N)
    # Var_U(ℓ)/r² is at most ¼: it neither overflows nor divides by zero.
    unit_N = (logits_N - logits_N.amin(-1, keepdim=True)) / torch.where(r > 0, r, 1.0).unsqueeze(-1)
    variance = unit_N.var(-1, correction=0)
    lower = log_N - r * (1 - unit_N.mean(-1))
    if method == "paper":
        upper = log_N - 0.5 * variance * (r * torch.exp(-r / 2)).square()
    else:
        lower = torch.maximum(lower, _lowest_entropy(r, N)).clamp(min=0.0)
        # The paper's upper bound is never the smaller one: ∫₀¹ s e^{−sr} ds ≥ ½ e^{−r}.
        integral = -torch.expm1(-r) - r * torch.exp(-r)  # r² ∫₀¹ s e^{−sr} ds
        upper = torch.minimum(_highest_entropy(r, N), log_N - variance * integral).clamp(max=log_N)
    return EntropyBounds(
        Certificate(torch.where(holds, lower, 0.0), holds, _FINITE),
        Certificate(torch.where(holds, upper, log_N), holds, _FINITE),
    )


def entropy_bounds_from_range(range_: float | Tensor, num_experts: int) -> EntropyBounds:
    """Bounds on H for any token when only r ≤ `range_` is known; shapes (...).

    Sharp form of Theorem "Concentration–Entropy Bound": below, the least entropy over all logits of range at most
    `range_`; above, log N, because equal logits are allowed. Trivial value of the lower bound: 0.
    """
    N = checks.positive_int("num_experts", num_experts, at_least=2)
    r = _scalar("range_", range_, 0.0)
    holds = torch.isfinite(r) & (r >= 0)
    lower = _lowest_entropy(torch.where(holds, r, 0.0), N).clamp(min=0.0)
    return EntropyBounds(
        Certificate(torch.where(holds, lower, 0.0), holds, "range_ is finite, no logit range exceeds it"),
        Certificate(torch.full_like(r, math.log(N)), torch.ones_like(holds), "none"),
    )


def topk_mass_bound(logits_N: Tensor, k: int, method: Literal["sharp", "paper"] = "sharp") -> Certificate:
    """Lower bound on the gate mass G_k of the k largest experts, gap = ℓ_(k) − ℓ_(k+1); shape (...).

    `paper` (Corollary "Top-k Mass Control"): 1 − (N−k) e^{−gap}; may be negative.
    `sharp`: k/(k+(N−k) e^{−gap}), attained by k equal logits above N−k equal ones.
    k = N gives 1. Logits of −∞ below the k-th are allowed. Trivial value: k/N.
    """
    checks.one_of("method", method, ("sharp", "paper"))
    logits_N = _experts("logits", logits_N)
    N = logits_N.shape[-1]
    checks.positive_int("k", k)
    checks.require(k <= N, f"k must be at most N = {N}, got {k}")
    top = logits_N.topk(min(k + 1, N), dim=-1).values  # a NaN comes first
    holds = torch.isfinite(top[..., 0]) & torch.isfinite(top[..., k - 1])
    if k == N:
        bound = torch.ones_like(top[..., 0])
    else:
        rest = (N - k) * torch.exp(top[..., k] - top[..., k - 1])
        bound = 1 - rest if method == "paper" else k / (k + rest)
    return Certificate(torch.where(holds, bound, k / N), holds, "the k largest logits are finite, no NaN")


def separation_gap(gamma: float | Tensor, rho: float | Tensor, kappa_N: Tensor) -> Certificate:
    """Δ = γ(κ_min − ρ κ_max), the hypothesis Δ > 0 of Theorem "Collapse Resistance"; shape (...).

    γ is the least affinity of a token to its own expert and ργ the largest to another, in the units of the affinity
    that κ multiplies. For κ ≥ 0 a Δ ≤ 0 is still a valid lower bound on the lead, and is returned. A negative κ breaks
    the argument: trivial value −∞.
    """
    kappa_N = _experts("kappa", kappa_N)
    smallest, largest = kappa_N.amin(-1), kappa_N.amax(-1)
    g, p = _scalar("gamma", gamma, 0.0, like=kappa_N), _scalar("rho", rho, 0.0, like=kappa_N)
    gap = g * (smallest - p * largest)
    valid = (smallest >= 0) & (g >= 0) & (p >= 0) & torch.isfinite(gap)
    bound = torch.where(valid, gap, -math.inf)
    return Certificate(bound, valid & (gap > 0), "Δ > 0, finite; kappa, gamma and rho >= 0")


def _rival_ratio(
    alpha: float | Tensor, gap: float | Tensor, like: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """t = e^{−αΔ}, the largest weight of a rival relative to the target, and where the hypothesis holds."""
    a = _scalar("alpha", alpha, 0.0, like=gap if like is None else like)
    delta = _scalar("gap", gap, like=a)
    holds = (a >= 0) & torch.isfinite(a) & (delta > 0) & torch.isfinite(delta)
    return torch.exp(-torch.where(holds, a * delta, 0.0)), holds


def load_cv_bound(
    alpha: float | Tensor,
    gap: float | Tensor,
    num_experts: int,
    method: Literal["sharp", "paper", "closed"] = "sharp",
) -> Certificate:
    """Upper bound on the coefficient of variation of the expected loads; t = e^{−αΔ}, shape (...).

    `paper` (Theorem "Collapse Resistance"): (N−1) t.
    `closed`: (t/(1+t)) √((N²−1)/3).
    `sharp`: √(Σ_m (c_m−c_{m−1})²/N) with c_m = m(N−m)t/(1+mt), at most √(N−1). Equality at N = 2; for larger
    N it is attained to first order in t.

    Always sharp ≤ closed ≤ paper. Needs a balanced mixture of the D_i. Trivial value: √(N−1), one expert for all.
    """
    checks.one_of("method", method, ("sharp", "paper", "closed"))
    N = checks.positive_int("num_experts", num_experts, at_least=2)
    t, holds = _rival_ratio(alpha, gap)
    trivial = math.sqrt(N - 1)
    if method == "paper":
        bound = (N - 1) * t
    elif method == "closed":
        bound = t / (1 + t) * math.sqrt((N * N - 1) / 3)
    else:
        # Any m experts get at most mt/(1+mt) of a token of another D_i: the sum of their loads exceeds m/N by at most
        # c_m/N. c is concave, so its increments majorise the sorted excesses.
        m = torch.arange(N + 1, dtype=t.dtype, device=t.device)
        c = m * (N - m) * t.unsqueeze(-1) / (1 + m * t.unsqueeze(-1))
        bound = c.diff(dim=-1).square().mean(-1).sqrt().clamp(max=trivial)
    return Certificate(torch.where(holds, bound, trivial), holds, f"{_SEPARATED}, the mixture is balanced")


def min_load_bounds(
    alpha: float | Tensor, gap: float | Tensor, weights_N: Tensor
) -> tuple[Certificate, Certificate]:
    """Lower and upper bound on each expected load for a mixture Σ π_i D_i; t = e^{−αΔ}, shapes (..., N).

    π_i/(1+(N−1)t) ≤ ḡ_i ≤ π_i + (1−π_i) t/(1+t): sharp form of Theorem "Collapse Resistance", for any
    mixture. Each is attained. `alpha` and `gap` have the batch shape. Trivial values: 0 and 1.
    """
    weights_N = _experts("weights", weights_N)
    t, holds = (value.unsqueeze(-1) for value in _rival_ratio(alpha, gap, like=weights_N))
    simplex = (weights_N >= 0).all(-1, keepdim=True) & ((weights_N.sum(-1, keepdim=True) - 1).abs() <= 1e-4)
    holds = holds & simplex
    lower = weights_N / (1 + (weights_N.shape[-1] - 1) * t)
    upper = weights_N + (1 - weights_N) * (t / (1 + t))
    hypothesis = f"{_SEPARATED}, the weights are >= 0 and sum to 1"
    return (
        Certificate(torch.where(holds, lower, 0.0), holds, hypothesis),
        Certificate(torch.where(holds, upper, 1.0), holds, hypothesis),
    )


def amortized_tv_bound(base_logits_N: Tensor, amortized_logits_N: Tensor) -> Certificate:
    """TV(q, g) ≤ tanh(range(amortised − base)/4) for the two softmaxes, sharp form; shape (...).

    Their likelihood ratio spans a factor e^range; two-valued ratios are the worst. Trivial value: 1.
    """
    base, amortized = _experts("base_logits", base_logits_N), _experts("amortized_logits", amortized_logits_N)
    same = base.shape[-1] == amortized.shape[-1]
    shapes = f"{tuple(base.shape)} and {tuple(amortized.shape)}"
    checks.require(same, f"base_logits and amortized_logits must share N, got {shapes}")
    r = _range(amortized - base)
    holds = torch.isfinite(r)
    return Certificate(torch.where(holds, torch.tanh(r / 4), 1.0), holds, _FINITE)


def truncation_error_bound(
    probs_N: Tensor, kept_N: Tensor, *, diameter: float | Tensor | None = None, outputs: Tensor | None = None
) -> Certificate:
    """Upper bound on ‖y − ŷ‖ when experts of total mass ε are dropped and the rest renormalised; shape (...).

    Give one of two: `diameter`, the largest ‖f_i − f_j‖, for ε·diameter; or `outputs` (..., N, D), the f_e, for
    min(ε·diam, √(ε/(1−ε) · Σ g_e‖f_e−y‖²)). Sharp form, attained when all kept outputs coincide and all dropped ones
    do. Trivial value: ∞.
    """
    probs_N = _experts("probs", probs_N)
    checks.require(kept_N.dtype == torch.bool, f"kept must be a boolean tensor, got {kept_N.dtype}")
    _shape("kept", kept_N, tuple(probs_N.shape))
    kept = (probs_N * kept_N).sum(-1)
    dropped = (probs_N * ~kept_N).sum(-1)  # ε, without the cancellation in 1 − kept
    holds = (kept > 0) & (probs_N >= 0).all(-1) & ((kept + dropped - 1).abs() <= 1e-3)
    if diameter is not None and outputs is None:
        bound = dropped * _scalar("diameter", diameter, 0.0, like=probs_N)
    elif outputs is not None and diameter is None:
        f_ND = _wide("outputs", outputs)
        _shape("outputs", f_ND, (*probs_N.shape, *f_ND.shape[-1:]))
        # Plain differences, because the matmul form of the distance cancels.
        distance_NN = torch.cdist(f_ND, f_ND, compute_mode="donot_use_mm_for_euclid_dist")
        y_1D = (probs_N.unsqueeze(-1) * f_ND).sum(-2, keepdim=True)
        spread = (probs_N * (f_ND - y_1D).square().sum(-1)).sum(-1)
        # y−ŷ = v/(1−ε) with v = Σ_dropped g(f−y) = −Σ_kept g(f−y); Cauchy–Schwarz on both sums gives
        # ‖v‖² ≤ ε(1−ε)·spread.
        root = (dropped * spread).sqrt() / torch.where(holds, kept, 1.0).sqrt()
        bound = torch.minimum(dropped * distance_NN.amax((-2, -1)), root)
    else:
        given = "neither" if outputs is None else "both"
        raise ValueError(f"give exactly one of diameter and outputs, got {given}")
    hypothesis = "probs is a distribution, the kept experts have positive mass"
    return Certificate(torch.where(holds, bound, math.inf), holds, hypothesis)


def _pair_extremes(U_DK: Tensor, V_MDK: Tensor, kappa: Tensor, kappas_M: Tensor) -> tuple[Tensor, Tensor]:
    """Largest eigenvalues of A − B and of B − A, A = U diag(κ) Uᵀ against each B; shapes (..., M)."""
    D, K = V_MDK.shape[-2:]
    U_1DK = U_DK.unsqueeze(-3)
    if kappa.ndim == U_DK.ndim - 2 and K < D:  # scalar κ: the pair splits into planes, one per angle
        outside = V_MDK - U_1DK @ (U_1DK.mT @ V_MDK)  # no cancellation, unlike 1 − cos²
        sin2_max = torch.linalg.eigvalsh(outside.mT @ outside)[..., -1].clamp(0.0, 1.0)
        difference = kappa.unsqueeze(-1) - kappas_M
        root = (difference.square() + 4 * kappa.unsqueeze(-1) * kappas_M * sin2_max).sqrt()
        return (root + difference) / 2, (root - difference) / 2
    if kappa.ndim == U_DK.ndim - 2:
        kappa, kappas_M = kappa.unsqueeze(-1).expand_as(U_DK[..., 0, :]), kappas_M.unsqueeze(-1)
    # diagonal κ: [U V] = QR moves everything into at most 2k dimensions.
    R = torch.linalg.qr(torch.cat([U_1DK.expand_as(V_MDK), V_MDK], dim=-1), mode="r").R
    kappas_MK = kappas_M.expand_as(V_MDK[..., 0, :])
    signed = torch.cat([kappa.unsqueeze(-2).expand_as(kappas_MK), -kappas_MK], dim=-1)
    values = torch.linalg.eigvalsh((R * signed.unsqueeze(-2)) @ R.mT)
    top, bottom = values[..., -1], -values[..., 0]
    # Below full dimension some token is outside both subspaces and has logit difference 0.
    return (top.clamp(min=0.0), bottom.clamp(min=0.0)) if 2 * K < D else (top, bottom)


def logit_range_bound(
    frames_NDK: Tensor,
    kappa: Tensor,
    *,
    alpha: float | Tensor = 1.0,
    scale: float = 1.0,
    linear: Tensor | None = None,
    linear_scale: float = 1.0,
    log_prior: Tensor | None = None,
) -> Certificate:
    """Upper bound on r = max ℓ − min ℓ over all tokens, from the router's parameters alone; shape (...).

    ℓ_e = α (scale·x̂ᵀU_e diag(κ_e) U_eᵀx̂ + linear_scale·μ_eᵀx̂ + b_e) with ‖x̂‖ = 1; `kappa` is (..., N) or
    (..., N, K), μ is `linear` (..., N, D) and b is `log_prior` (..., N), here inside α. Sharp form: the
    largest over pairs i ≠ j of scale·λ_max(A_i−A_j) + linear_scale·‖μ_i−μ_j‖ + b_i − b_j. For scalar κ,
    λ_max = ½[(κ_i−κ_j) + √((κ_i−κ_j)² + 4κ_iκ_j sin²θ_max)], θ_max the largest principal angle; for diagonal κ it is
    the eigenvalue itself. Without μ some token attains it. Pass it to `entropy_bounds_from_range`.

    Computed in fp64, one expert against all later ones at a time. Eigenvalues wait for the device: use it in reports,
    not in a training step. Trivial value: ∞.
    """
    U_NDK = checks.frames("frames", frames_NDK).double()
    ok = U_NDK.ndim >= 3 and U_NDK.shape[-3] >= 2
    checks.require(ok, f"frames must have shape (..., N, d, k) with N >= 2, got {tuple(U_NDK.shape)}")
    *batch, N, D, K = U_NDK.shape
    kappa_ = checks.floating("kappa", kappa).double()
    _shape("kappa", kappa, (*batch, N), (*batch, N, K))
    mu_ND = U_NDK.new_zeros(*batch, N, D) if linear is None else _wide("linear", linear).double()
    _shape("linear", mu_ND, (*batch, N, D))
    b_N = U_NDK.new_zeros(*batch, N) if log_prior is None else _wide("log_prior", log_prior).double()
    _shape("log_prior", b_N, (*batch, N))
    checks.finite("scale", scale, at_least=0.0)
    checks.finite("linear_scale", linear_scale, at_least=0.0)
    a = _scalar("alpha", alpha, 0.0, like=U_NDK)

    axis = len(batch)
    eye = torch.eye(K, dtype=U_NDK.dtype, device=U_NDK.device)
    least = 0.0 if kappa.ndim == axis + 1 else -math.inf  # the plane formula needs κ >= 0
    valid = ((U_NDK.mT @ U_NDK - eye).abs() <= 1e-4).all(-1).all(-1).all(-1)
    valid = valid & (torch.isfinite(kappa_) & (kappa_ >= least)).flatten(axis).all(-1)
    # Eigenvalue routines raise on NaN, so a batch entry that fails is replaced by zeros.
    U_NDK = torch.where(valid.view(*batch, 1, 1, 1), U_NDK, 0.0)
    kappa_ = torch.where(valid.view(*batch, *[1] * (kappa.ndim - axis)), kappa_, 0.0)
    best = []
    for i in range(N - 1):
        later = slice(i + 1, None)
        kappas_M = kappa_.narrow(axis, i + 1, N - 1 - i)
        U_DK, V_MDK = U_NDK[..., i, :, :], U_NDK[..., later, :, :]
        top_M, bottom_M = _pair_extremes(U_DK, V_MDK, kappa_.select(axis, i), kappas_M)
        apart_M = linear_scale * (mu_ND[..., i : i + 1, :] - mu_ND[..., later, :]).norm(dim=-1)
        step_M = b_N[..., i : i + 1] - b_N[..., later]
        best.append((apart_M + torch.maximum(scale * top_M + step_M, scale * bottom_M - step_M)).amax(-1))
    bound = a * torch.stack(best).amax(0).clamp(min=0.0)
    holds = valid & (a >= 0) & torch.isfinite(bound)
    bound = torch.where(holds, bound, math.inf).to(torch.promote_types(frames_NDK.dtype, torch.float32))
    hypothesis = "no amortiser, frames orthonormal to 1e-4, finite parameters, alpha >= 0, scalar kappa >= 0"
    return Certificate(bound, holds, hypothesis)
