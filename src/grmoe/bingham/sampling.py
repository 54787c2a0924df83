"""Exact draws from the vector Bingham distribution p(x) ∝ exp(xᵀU diag(λ)Uᵀx) on the unit sphere.

Legend: D sphere dimension d, K subspace rank k, S draws.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grmoe import checks


def sample(
    frame_DK: Tensor, concentration: Tensor | float, num: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """`num` independent draws, shape (num, d), in the frame's dtype.

    concentration: a number κ ≥ 0 (drawn from an exact mixture, without rejection), or a tensor of k values of any sign
        (rejection from an angular central Gaussian envelope). Acceptance is near one where draws spread over all
        directions. It falls to about √(m/d) where they keep to m of them, as with one value far above d/2.
    """
    checks.frames("frame", frame_DK)
    checks.require(frame_DK.ndim == 2, f"frame must have shape (d, k), got {tuple(frame_DK.shape)}")
    checks.positive_int("num", num)
    U_DK = frame_DK.to(torch.float64)
    if isinstance(concentration, Tensor) and concentration.ndim > 0:
        rank = frame_DK.shape[1]
        ok = concentration.shape == (rank,)
        checks.require(
            ok, f"concentration must be a number or have shape ({rank},), got {tuple(concentration.shape)}"
        )
        checks.all_finite("concentration", concentration)
        draws = _angular_gaussian_rejection(U_DK, concentration.to(torch.float64), num, generator)
    else:
        kappa = checks.finite("concentration", float(concentration), at_least=0)
        draws = _scalar_exact(U_DK, kappa, num, generator)
    return draws.to(frame_DK.dtype)


def _unit(x_SD: Tensor) -> Tensor:
    return x_SD / x_SD.norm(dim=-1, keepdim=True)


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def _scalar_exact(U_DK: Tensor, kappa: float, num: int, generator: torch.Generator | None) -> Tensor:
    """The energy a = ‖Uᵀx‖² is a mixture of betas, from the series of exp(κa):

    n ~ Categorical(∝ (k/2)ₙκⁿ/((d/2)ₙ n!)),  a ~ Beta(k/2+n, (d−k)/2),  x = √a Uu + √(1−a) v,
    with u uniform on the unit sphere of the subspace and v on that of its complement.
    """
    D, K = U_DK.shape
    a, b = K / 2, D / 2
    # The weights peak below κ and fall faster than a Poisson(κ) tail.
    terms = torch.arange(int(kappa + 12 * math.sqrt(kappa) + 40), dtype=torch.float64)
    log_ratio = torch.log((a + terms) / (b + terms) * kappa / (terms + 1))
    log_weight = torch.cat([torch.zeros(1, dtype=torch.float64), log_ratio.cumsum(0)])
    cdf = torch.softmax(log_weight, 0).cumsum(0).to(U_DK.device)
    uniform = torch.rand(num, generator=generator, dtype=torch.float64, device=U_DK.device)
    order = torch.searchsorted(cdf, uniform).clamp(max=len(cdf) - 1)
    inside = torch._standard_gamma(a + order.to(torch.float64), generator=generator)
    inside_SD = _unit(_normal((num, K), U_DK, generator)) @ U_DK.T
    if K == D:
        return inside_SD
    outside = torch._standard_gamma(torch.full_like(inside, b - a), generator=generator)
    energy = (inside / (inside + outside)).unsqueeze(-1)
    v_SD = _normal((num, D), U_DK, generator)
    v_SD = _unit(v_SD - (v_SD @ U_DK) @ U_DK.T)
    return energy.sqrt() * inside_SD + (1 - energy).sqrt() * v_SD


def _envelope(beta_D: Tensor) -> float:
    """b > 0 with Σ 1/(b + 2β_i) = 1, the tightest angular-Gaussian envelope (Kent, Ganeiber & Mardia 2013)."""
    low, high = 1e-12, float(len(beta_D))
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float((1 / (middle + 2 * beta_D)).sum()) > 1 else (low, middle)
    return high


def _angular_gaussian_rejection(
    U_DK: Tensor, lambda_K: Tensor, num: int, generator: torch.Generator | None
) -> Tensor:
    """Propose x = y/‖y‖, y ~ N(0, Ω⁻¹), Ω = I + 2B/b, B = λ_max I − A ⪰ 0; accept with probability
    exp(−xᵀBx) (xᵀΩx)^(d/2) / M, M = e^(−(d−b)/2) (d/b)^(d/2)."""
    D, K = U_DK.shape
    outside = torch.zeros(1 if D > K else 0, dtype=torch.float64, device=U_DK.device)
    top = torch.cat([lambda_K, outside]).max()
    # Without a complement (k = d) its β is unused; a negative `top` would make its variance negative.
    beta_K, beta_rest = top - lambda_K, top.clamp(min=0)
    b = _envelope(torch.cat([beta_K, beta_rest.expand(D - K)]))
    omega_K, omega_rest = 1 + 2 * beta_K / b, 1 + 2 * beta_rest / b
    log_M = -(D - b) / 2 + D / 2 * math.log(D / b)
    accepted: list[Tensor] = []
    have = 0
    while have < num:
        g_SD = _normal((max(256, int(1.3 * (num - have))), D), U_DK, generator)
        inner_SK = g_SD @ U_DK
        x_SD = _unit(g_SD * omega_rest.rsqrt() + (inner_SK * (omega_K.rsqrt() - omega_rest.rsqrt())) @ U_DK.T)
        energy_SK = (x_SD @ U_DK).square()
        rest_S = (1 - energy_SK.sum(-1)).clamp(min=0)
        xBx = energy_SK @ beta_K + rest_S * beta_rest
        log_accept = -xBx + D / 2 * torch.log1p(2 * xBx / b) - log_M
        uniform = torch.rand(len(x_SD), generator=generator, dtype=torch.float64, device=U_DK.device)
        accepted.append(x_SD[uniform.log() < log_accept])
        have += len(accepted[-1])
    return torch.cat(accepted)[:num]
