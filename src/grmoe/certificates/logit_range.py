"""A bound on the range of a router's logits over all tokens, from its parameters alone.

Legend: N experts, D model width d, K subspace rank k, M later experts that one expert is compared with; `...` any
batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grmoe import checks
from grmoe.certificates.certificate import Certificate, as_scalar, require_shape, widened


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
    require_shape("kappa", kappa, (*batch, N), (*batch, N, K))
    mu_ND = U_NDK.new_zeros(*batch, N, D) if linear is None else widened("linear", linear).double()
    require_shape("linear", mu_ND, (*batch, N, D))
    b_N = U_NDK.new_zeros(*batch, N) if log_prior is None else widened("log_prior", log_prior).double()
    require_shape("log_prior", b_N, (*batch, N))
    checks.finite("scale", scale, at_least=0.0)
    checks.finite("linear_scale", linear_scale, at_least=0.0)
    a = as_scalar("alpha", alpha, 0.0, like=U_NDK)

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
