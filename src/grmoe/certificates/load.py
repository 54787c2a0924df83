"""Bounds on the load of experts whose tokens are separated by a gap Δ: Theorem "Collapse Resistance".

Legend: N experts; `...` any batch.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from grmoe import checks
from grmoe.certificates.certificate import Certificate, as_scalar, over_experts

_SEPARATED = "alpha >= 0 is finite, the gap Δ is finite and > 0, every D_i leads its rivals by Δ"


def separation_gap(gamma: float | Tensor, rho: float | Tensor, kappa_N: Tensor) -> Certificate:
    """Δ = γ(κ_min − ρ κ_max), the hypothesis Δ > 0 of Theorem "Collapse Resistance"; shape (...).

    γ is the least affinity of a token to its own expert and ργ the largest to another, in the units of the affinity
    that κ multiplies. For κ ≥ 0 a Δ ≤ 0 is still a valid lower bound on the lead, and is returned. A negative κ breaks
    the argument: trivial value −∞.
    """
    kappa_N = over_experts("kappa", kappa_N)
    smallest, largest = kappa_N.amin(-1), kappa_N.amax(-1)
    g, p = as_scalar("gamma", gamma, 0.0, like=kappa_N), as_scalar("rho", rho, 0.0, like=kappa_N)
    gap = g * (smallest - p * largest)
    valid = (smallest >= 0) & (g >= 0) & (p >= 0) & torch.isfinite(gap)
    bound = torch.where(valid, gap, -math.inf)
    return Certificate(bound, valid & (gap > 0), "Δ > 0, finite; kappa, gamma and rho >= 0")


def _rival_ratio(
    alpha: float | Tensor, gap: float | Tensor, like: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """t = e^{−αΔ}, the largest weight of a rival relative to the target, and where the hypothesis holds."""
    a = as_scalar("alpha", alpha, 0.0, like=gap if like is None else like)
    delta = as_scalar("gap", gap, like=a)
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
    weights_N = over_experts("weights", weights_N)
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
