"""Computing some experts only: the gate mass that they hold, and the error of leaving out the rest.

Legend: N experts, D model width d; `...` any batch.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from grmoe import checks
from grmoe.certificates.certificate import Certificate, as_scalar, over_experts, require_shape, widened


def topk_mass_bound(logits_N: Tensor, k: int, method: Literal["sharp", "paper"] = "sharp") -> Certificate:
    """Lower bound on the gate mass G_k of the k largest experts, gap = ℓ_(k) − ℓ_(k+1); shape (...).

    `paper` (Corollary "Top-k Mass Control"): 1 − (N−k) e^{−gap}; may be negative.
    `sharp`: k/(k+(N−k) e^{−gap}), attained by k equal logits above N−k equal ones.
    k = N gives 1. Logits of −∞ below the k-th are allowed. Trivial value: k/N.
    """
    checks.one_of("method", method, ("sharp", "paper"))
    logits_N = over_experts("logits", logits_N)
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


def truncation_error_bound(
    probs_N: Tensor, kept_N: Tensor, *, diameter: float | Tensor | None = None, outputs: Tensor | None = None
) -> Certificate:
    """Upper bound on ‖y − ŷ‖ when experts of total mass ε are dropped and the rest renormalised; shape (...).

    Give one of two: `diameter`, the largest ‖f_i − f_j‖, for ε·diameter; or `outputs` (..., N, D), the f_e, for
    min(ε·diam, √(ε/(1−ε) · Σ g_e‖f_e−y‖²)). Sharp form, attained when all kept outputs coincide and all dropped ones
    do. Trivial value: ∞.
    """
    probs_N = over_experts("probs", probs_N)
    checks.require(kept_N.dtype == torch.bool, f"kept must be a boolean tensor, got {kept_N.dtype}")
    require_shape("kept", kept_N, tuple(probs_N.shape))
    kept = (probs_N * kept_N).sum(-1)
    dropped = (probs_N * ~kept_N).sum(-1)  # ε, without the cancellation in 1 − kept
    holds = (kept > 0) & (probs_N >= 0).all(-1) & ((kept + dropped - 1).abs() <= 1e-3)
    if diameter is not None and outputs is None:
        length = as_scalar("diameter", diameter, 0.0, like=probs_N)
        holds, bound = holds & (length >= 0), dropped * length
    elif outputs is not None and diameter is None:
        f_ND = widened("outputs", outputs)
        require_shape("outputs", f_ND, (*probs_N.shape, *f_ND.shape[-1:]))
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
    holds = holds & torch.isfinite(bound)
    hypothesis = (
        "probs is a distribution, the kept experts have positive mass, diameter >= 0 and outputs are finite"
    )
    return Certificate(torch.where(holds, bound, math.inf), holds, hypothesis)
