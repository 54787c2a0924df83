"""log Z of a (Fisher–)Bingham distribution as a contour integral, to near machine precision.

For A with eigenvalues λ_j of multiplicity m_j, d = Σ m_j, and a linear term with norm γ_j in eigenspace j,

    Z = E exp(xᵀAx + γᵀx) = Γ(d/2)/(2πi) ∫ eˢ Π_j (s−λ_j)^(−m_j/2) exp(Σ_j γ_j²/(4(s−λ_j))) ds.

With h = d/2, s = h(1+z), w_j = m_j/d, μ_j = λ_j/h and g_j = γ_j²/(4h²) this becomes

    Z = √(2πh) e^(c(h)) · 1/(2πi) ∫ e^(h φ(z)) dz,
    φ(z) = z − Σ w_j log(1+z−μ_j) + Σ g_j/(1+z−μ_j),

where c(h) is Stirling's remainder of log Γ(h). In this form nothing large cancels: at d = 8192 the unscaled terms are
near 3·10⁴ and would cost four digits.

The path is a parabola z = v + iy − cy² through the saddle φ'(v) = 0. With one eigenvalue, the c that removes the cubic
phase is best. With several, such a path may pass near another singularity, where |e^(hφ)| rises again, by any factor:
at k = 1, d = 768 and κ = 0.55 d it cost 214 nats. So c is the largest of several for which |e^(hφ)| only falls. The
last one is 1/2δ_max, with δ_j = 1+v−μ_j: in q = y², |1+z−μ_j|² = (δ_j−cq)² + q then grows from δ_j² on, and ∂ Re φ/∂q
is at most −c + c Σ g_j/δ_j² ≤ 0, because Σ w_j/δ_j + Σ g_j/δ_j² = 1 at the saddle.

A small eigenspace far from the others gives the integrand two scales, δ_min and δ_max. So y = σ sinh t, with σ the
standard deviation at the saddle: equal steps of t resolve both. The trapezoid rule in t converges geometrically.

Legend: J distinct eigenvalues, Y quadrature nodes, B bends c, `...` any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from grmoe import checks

# Nodes on the half line. 192 are enough almost everywhere; with 256 the error is that of fp64, from d = 2 up.
_NODES = 256
_MORE = 2  # with a linear term, which has an essential singularity at its eigenvalue: the integrand is less smooth
_SADDLE_STEPS = 24
_BENDS, _NODES_TO_CHOOSE = 8, 32
_REACH = 80.0  # the path ends where e^(−hcy²) is e^−80
_NEGLIGIBLE = -36.0  # log of a part of the peak


@dataclass(frozen=True, kw_only=True)
class Saddle:
    """The integrand near its saddle, in the scaled variables of the module docstring."""

    half_dim: float
    """h."""
    weight_J: Tensor
    """w."""
    mu_J: Tensor
    """μ, with its gradient."""
    g_J: Tensor
    """g, with its gradient."""
    shift: Tensor
    """The mean eigenvalue, subtracted from all: Z(λ + c) = eᶜ Z(λ)."""
    v: Tensor
    """The saddle, without a gradient."""
    linear: bool
    """Whether there is a linear term."""

    def phi(self, z: Tensor) -> Tensor:
        """φ(z), z of shape (..., Y) against parameters (..., J); real or complex."""
        u = z.unsqueeze(-1) - self.mu_J.unsqueeze(-2)
        # log1p has no complex kernel; |u| is not small where z is complex, so log(1+u) loses nothing there.
        log = torch.log(1 + u) if u.is_complex() else torch.log1p(u)
        terms = -self.weight_J * log + self.g_J.unsqueeze(-2) / (1 + u)
        return z + terms.sum(-1)

    def power_sum(self, order: int) -> Tensor:
        """Σ_j w_j / (1+v−μ_j)^order."""
        return (self.weight_J / (1 + self.v.unsqueeze(-1) - self.mu_J) ** order).sum(-1)


def stirling_remainder(h: float) -> float:
    """log Γ(h) − [(h−½) log h − h + ½ log 2π]."""
    if h < 20:
        return math.lgamma(h) - ((h - 0.5) * math.log(h) - h + 0.5 * math.log(2 * math.pi))
    q = 1 / (h * h)
    return (1 / 12 - q * (1 / 360 - q * (1 / 1260 - q * (1 / 1680 - q * (1 / 1188))))) / h


def find_saddle(eigenvalues_J: Tensor, multiplicities: Sequence[int], gamma_J: Tensor | None) -> Saddle:
    """Scale the problem and solve φ'(v) = 0, i.e. Σ w/(1+v−μ) + Σ g/(1+v−μ)² = 1, by a fixed number of steps.

    Newton's method on 1/f − 1, started left of the root. It is exact for one eigenvalue, and the function is concave
    without the linear term. The integral does not depend on where the path crosses the axis, so v need not be exact.
    """
    dim = sum(multiplicities)
    half = dim / 2
    # Filled on the device, because torch.tensor(list, device="cuda") would wait for a copy from the host.
    weight_J = torch.cat(
        [
            torch.full((len(list(run)),), m / dim, dtype=torch.float64, device=eigenvalues_J.device)
            for m, run in groupby(multiplicities)
        ]
    )
    shift = (weight_J * eigenvalues_J).sum(-1)
    mu_J = (eigenvalues_J - shift.unsqueeze(-1)) / half
    # Eigenvalues of multiplicity zero are absent and must not move the saddle.
    present = weight_J > 0
    g_J = torch.zeros_like(mu_J)
    if gamma_J is not None:
        g_J = torch.where(present, (gamma_J / (2 * half)).square(), g_J)
    with torch.no_grad():
        floor = torch.where(present, mu_J - 1 + torch.maximum(weight_J, g_J.sqrt()), -math.inf).amax(-1)
        v = floor
        for _ in range(_SADDLE_STEPS):
            delta_J = torch.where(present, 1 + v.unsqueeze(-1) - mu_J, 1.0)
            f = (weight_J / delta_J + g_J / delta_J**2).sum(-1)
            slope = -(weight_J / delta_J**2 + 2 * g_J / delta_J**3).sum(-1)
            v = torch.maximum(v + (f - f * f) / slope, floor)
    # An absent eigenvalue becomes the mean, so that its weight zero multiplies a finite logarithm.
    mu_J = torch.where(present, mu_J, torch.zeros_like(mu_J))
    return Saddle(
        half_dim=half, weight_J=weight_J, mu_J=mu_J, g_J=g_J, shift=shift, v=v, linear=gamma_J is not None
    )


def _path(saddle: Saddle, bend_B: Tensor, deviation: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Nodes z and weights dz/i of the upper half of each path, (..., B, count + 1)."""
    bend, sigma = bend_B.unsqueeze(-1), deviation[..., None, None]
    step = torch.asinh((_REACH / (saddle.half_dim * bend)).sqrt() / sigma) / count
    node_Y = torch.arange(count + 1, dtype=torch.float64, device=bend.device)
    y, dy = sigma * torch.sinh(node_Y * step), step * sigma * torch.cosh(node_Y * step)
    # The path is symmetric: twice the real part, the middle node counted once.
    dy = dy * (1 - 0.5 * (node_Y == 0))
    return torch.complex(saddle.v[..., None, None] - bend * y**2, y), torch.complex(dy, 2 * bend * y * dy)


def _best_bend(saddle: Saddle, bend_B: Tensor, deviation: Tensor) -> Tensor:
    """The first bend with which |e^(hφ)| only falls, and falls far enough, (..., 1). The last one needs no test."""
    z, _ = _path(saddle, bend_B, deviation, _NODES_TO_CHOOSE)
    peak = saddle.phi(saddle.v.unsqueeze(-1)).unsqueeze(-1)
    log_BY = saddle.half_dim * (saddle.phi(z.flatten(-2)).real.view(z.shape) - peak)
    rises_B = ((log_BY.diff(dim=-1) > 1e-9) & (log_BY[..., 1:] > _NEGLIGIBLE)).any(-1)
    last_B = torch.arange(_BENDS, device=bend_B.device) == _BENDS - 1
    falls_B = (~rises_B & (log_BY[..., -1] < _NEGLIGIBLE)) | last_B
    return bend_B.gather(-1, falls_B.to(torch.int8).argmax(-1, keepdim=True))


def quadrature(saddle: Saddle) -> Tensor:
    """log Z from a saddle: the trapezoid rule on the parabola."""
    v, half = saddle.v, saddle.half_dim
    with torch.no_grad():
        delta_J = 1 + v.unsqueeze(-1) - saddle.mu_J
        k2 = (saddle.weight_J / delta_J**2 + 2 * saddle.g_J / delta_J**3).sum(-1)
        k3 = (2 * saddle.weight_J / delta_J**3 + 6 * saddle.g_J / delta_J**4).sum(-1)
        sharpest = k3 / (6 * k2)  # removes the cubic phase
        straighter = (0.5 / delta_J.amax(-1) / sharpest).clamp(max=1.0)
        part_B = torch.linspace(0, 1, _BENDS, dtype=torch.float64, device=v.device)
        bend_B = sharpest.unsqueeze(-1) * straighter.unsqueeze(-1) ** part_B
        deviation = (half * k2).rsqrt()
        count = _MORE * _NODES if saddle.linear else _NODES
        z_Y, dz_Y = _path(saddle, _best_bend(saddle, bend_B, deviation), deviation, count)
        z_Y, dz_Y = z_Y.squeeze(-2), dz_Y.squeeze(-2)
    peak = saddle.phi(v.unsqueeze(-1))  # (..., 1), real
    integral = (torch.exp(half * (saddle.phi(z_Y) - peak)) * dz_Y).real.sum(-1) / math.pi
    stirling = 0.5 * math.log(2 * math.pi * half) + stirling_remainder(half)
    return saddle.shift + half * peak.squeeze(-1) + (stirling + torch.log(integral))


def spectrum(
    eigenvalues: Tensor, multiplicities: Sequence[int] | Tensor, linear: Tensor | None = None
) -> tuple[Tensor, list[int], Tensor | None]:
    """Check a spectrum and bring it to fp64: (eigenvalues (..., J), J multiplicities, linear (..., J))."""
    checks.floating("eigenvalues", eigenvalues)
    counts = [int(m) for m in multiplicities]
    size = eigenvalues.shape[-1] if eigenvalues.ndim else 0
    checks.require(
        size == len(counts) and size > 0,
        f"multiplicities must name one count for each of the {size} eigenvalues, got {counts}",
    )
    checks.require(min(counts) >= 0 and sum(counts) >= 2, f"multiplicities must sum to d >= 2, got {counts}")
    if linear is not None:
        checks.last_dim("linear", linear, size)
        linear = linear.to(torch.float64)
    return eigenvalues.to(torch.float64), counts, linear


def log_normalizer(
    eigenvalues: Tensor, multiplicities: Sequence[int] | Tensor, linear: Tensor | None = None
) -> Tensor:
    """log E exp(xᵀAx + γᵀx) over the unit sphere of R^d, d = Σ multiplicities.

    eigenvalues (..., J): distinct (or repeated) eigenvalues of A, of any sign.
    multiplicities (J): how often each appears in A.
    linear (..., J): norm of γ's component in each eigenspace.

    Evaluated in fp64 without waiting for the device, returned in the dtype of `eigenvalues`. Gradients reach
    eigenvalues and linear; the contour is held fixed, because the integral does not depend on it. The relative error
    of Z is below 1e-13, or below 1e-15 times the largest |λ| or γ where that is more: the rounding of log Z in fp64.
    """
    dtype = eigenvalues.dtype
    eigenvalues, counts, linear = spectrum(eigenvalues, multiplicities, linear)
    return quadrature(find_saddle(eigenvalues, counts, linear)).to(dtype)
