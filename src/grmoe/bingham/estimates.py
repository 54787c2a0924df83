"""Approximate normalisers for the validation table: Kume–Wood's saddlepoint, the paper's print of it, Monte Carlo.

The saddlepoint formula in the paper's appendix lacks the factors K''(t̂)^(−1/2) and e^(−t̂) of the method it cites.
`kume_wood` is the method itself (Kume & Wood 2005), `printed` the formula of the appendix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grmoe import checks
from grmoe.bingham.contour import Saddle, find_saddle, spectrum, stirling_remainder


def _moving_saddle(eigenvalues: Tensor, counts: Sequence[int]) -> Saddle:
    """The saddle with its gradient: one Newton step that changes no value, dv = d(S₁ − 1)/S₂.

    The integral does not depend on the saddle, but these approximations do.
    """
    saddle = find_saddle(eigenvalues, counts, None)
    return replace(saddle, v=saddle.v + (saddle.power_sum(1) - 1) / saddle.power_sum(2).detach())


def kume_wood(eigenvalues: Tensor, multiplicities: Sequence[int] | Tensor, order: int = 1) -> Tensor:
    """Kume–Wood's saddlepoint approximation of log Z, first or third order.

    First order is Laplace's method on the contour integral: log Ẑ₁ = c(h) + hφ(v) − ½ log S₂ with
    S_n = Σ w_j/(1+v−μ_j)ⁿ (see `contour`). Third order adds T = ρ₄/8 − 5ρ₃²/24, ρ₄ = 6S₄/(hS₂²) and
    ρ₃² = 4S₃²/(hS₂³), the standardised cumulants of the saddle.
    """
    checks.one_of("order", order, (1, 3))
    dtype = eigenvalues.dtype
    eigenvalues, counts, _ = spectrum(eigenvalues, multiplicities)
    saddle = _moving_saddle(eigenvalues, counts)
    h, s2 = saddle.half_dim, saddle.power_sum(2)
    peak = saddle.phi(saddle.v.unsqueeze(-1)).squeeze(-1)
    log_z = saddle.shift + stirling_remainder(h) + h * peak - 0.5 * torch.log(s2)
    if order == 3:
        rho4 = 6 * saddle.power_sum(4) / (h * s2**2)
        rho3_squared = 4 * saddle.power_sum(3) ** 2 / (h * s2**3)
        log_z = log_z + rho4 / 8 - 5 * rho3_squared / 24
    return log_z.to(dtype)


def printed(eigenvalues: Tensor, multiplicities: Sequence[int] | Tensor, factor: int = 1) -> Tensor:
    """log Z by the formula of the paper's appendix: Z ≈ (2π)^(d/2) |Λ⋆|^(−1/2) exp(tr(Λ Λ⋆⁻¹)).

    The paper calls Λ⋆ "the solution to a system of implicit equations" and does not print them. Two readings are
    tried, both with the saddle ŝ of Kume–Wood, ½ Σ 1/(ŝ−λ_j) = 1: Λ⋆ = ŝI − Λ (factor 1), the matrix of their formula,
    and Λ⋆ = 2(ŝI − Λ) (factor 2), for which tr Λ⋆⁻¹ = 1. The measure is the area of the sphere, as in their paper.
    """
    checks.one_of("factor", factor, (1, 2))
    dtype = eigenvalues.dtype
    eigenvalues, counts, _ = spectrum(eigenvalues, multiplicities)
    saddle = _moving_saddle(eigenvalues, counts)
    d = 2 * saddle.half_dim
    star_J = factor * saddle.half_dim * (1 + saddle.v.unsqueeze(-1) - saddle.mu_J)
    terms_J = eigenvalues / star_J - 0.5 * torch.log(star_J)
    log_area = math.log(2) + d / 2 * math.log(math.pi) - math.lgamma(d / 2)
    log_z = d / 2 * math.log(2 * math.pi) + d * (saddle.weight_J * terms_J).sum(-1) - log_area
    return log_z.to(dtype)


def monte_carlo(
    eigenvalues: Tensor,
    multiplicities: Sequence[int] | Tensor,
    linear: Tensor | None = None,
    *,
    samples: int = 1_000_000,
    generator: torch.Generator | None = None,
) -> tuple[float, float]:
    """(estimate, standard error) of log Z from uniform points of the sphere, for one spectrum of shape (J,).

    Only the energy of each eigenspace and the coordinate along γ matter, so a point costs J gammas and J normals
    instead of d normals. When the integrand concentrates (κ ≳ 100) the standard error is wrong too, because no sample
    reaches the region that dominates Z.
    """
    checks.require(eigenvalues.ndim == 1, f"eigenvalues must have shape (J,), got {tuple(eigenvalues.shape)}")
    checks.positive_int("samples", samples, at_least=2)
    eigenvalues, counts, linear = spectrum(eigenvalues, multiplicities, linear)
    shape_J = (torch.tensor(counts, dtype=torch.float64) - 1).clamp(min=0) / 2
    present_J = torch.tensor([m > 0 for m in counts], dtype=torch.float64)
    log_terms = []
    for start in range(0, samples, 1 << 18):
        size = (min(1 << 18, samples - start), len(counts))
        along = torch.randn(size, generator=generator, dtype=torch.float64) * present_J
        rest = torch._standard_gamma(shape_J.clamp(min=1e-300).expand(size).contiguous(), generator=generator)
        energy = along.square() / 2 + torch.where(shape_J > 0, rest, 0.0)
        total = energy.sum(-1, keepdim=True)
        exponent = (energy / total) @ eigenvalues
        if linear is not None:
            exponent = exponent + (along / (2 * total).sqrt()) @ linear
        log_terms.append(exponent)
    exponent = torch.cat(log_terms)
    estimate = torch.logsumexp(exponent, 0) - math.log(samples)
    relative = torch.exp(exponent - estimate)
    return float(estimate), float(relative.std() / math.sqrt(samples))
