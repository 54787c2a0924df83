"""The scalar normaliser, log Z(κ) = log ₁F₁(k/2; d/2; κ): one concentration for a k-dimensional subspace."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grmoe import checks
from grmoe.bingham.contour import find_saddle, quadrature


def log_kummer(k: int, d: int, kappa: Tensor | float) -> Tensor:
    """log ₁F₁(k/2; d/2; κ) = log E exp(κ‖Px‖²) for uniform unit x and a rank-k projector P.

    Evaluated in fp64 by the contour integral with spectrum (κ: k times, 0: d−k times), without waiting for the device.
    Returned in the dtype of `kappa` (fp64 for a Python number). Differentiable to any order; the first derivative is
    E‖Px‖² (`mean_energy`). A Python number must be >= 0. A tensor is not read; the formula holds for negative entries.
    """
    checks.subspace(d, k)
    kappa = _concentration(kappa)
    return _LogKummer.apply(kappa.to(torch.float64), k, d).to(kappa.dtype)


def mean_energy(k: int, d: int, kappa: Tensor | float) -> Tensor:
    """E‖Px‖² = ∂ log Z/∂κ = (k/d) · ₁F₁(k/2+1; d/2+1; κ) / ₁F₁(k/2; d/2; κ)."""
    checks.subspace(d, k)
    kappa = _concentration(kappa)
    wide = kappa.to(torch.float64)
    log_ratio = _LogKummer.apply(wide, k + 2, d + 2) - _LogKummer.apply(wide, k, d)
    return (k / d * torch.exp(log_ratio)).to(kappa.dtype)


def log_kummer_reference(k: int, d: int, kappa: float) -> float:
    """The specification: the power series Σ (k/2)ₙ/(d/2)ₙ κⁿ/n!, rescaled as it grows."""
    checks.subspace(d, k)
    checks.finite("kappa", kappa, at_least=0)
    total = term = 1.0
    log_scale = 0.0
    n = 0
    while term > 1e-18 * total or n < kappa:
        term *= (k / 2 + n) / (d / 2 + n) * kappa / (n + 1)
        total += term
        n += 1
        if total > 1e200:  # before it overflows
            log_scale += math.log(total)
            term /= total
            total = 1.0
    return log_scale + math.log(total)


def _concentration(kappa: Tensor | float) -> Tensor:
    if not isinstance(kappa, Tensor):
        return torch.tensor(checks.finite("kappa", kappa, at_least=0), dtype=torch.float64)
    return checks.floating("kappa", kappa)


class _LogKummer(torch.autograd.Function):
    """Own backward: the derivative is again a ratio of Kummer functions, exact and differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kappa: Tensor, k: int, d: int) -> Tensor:
        spectrum_J = torch.stack([kappa, torch.zeros_like(kappa)], dim=-1)
        return quadrature(find_saddle(spectrum_J, [k, d - k], None))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        kappa, ctx.k, ctx.d = inputs
        ctx.save_for_backward(kappa, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        kappa, log_z = ctx.saved_tensors
        up = _LogKummer.apply(kappa, ctx.k + 2, ctx.d + 2)
        return grad * (ctx.k / ctx.d) * torch.exp(up - log_z), None, None
