"""Bounds on the entropy of a gate: from its logits, or from a bound on their range alone.

Legend: N experts, M = 1 … N−1 experts at the top; `...` any batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grmoe import checks
from grmoe.certificates.certificate import FINITE, Certificate, as_scalar, over_experts, range_of


@dataclass(frozen=True)
class EntropyBounds:
    """`lower` ≤ H ≤ `upper`."""

    lower: Certificate
    upper: Certificate


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
    logits_N = over_experts("logits", logits_N)
    N = logits_N.shape[-1]
    log_N = math.log(N)
    holds = torch.isfinite(range_of(logits_N))
    logits_N = torch.where(holds.unsqueeze(-1), logits_N, 0.0)
    r = range_of(logits_N)
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
        Certificate(torch.where(holds, lower, 0.0), holds, FINITE),
        Certificate(torch.where(holds, upper, log_N), holds, FINITE),
    )


def entropy_bounds_from_range(range_: float | Tensor, num_experts: int) -> EntropyBounds:
    """Bounds on H for any token when only r ≤ `range_` is known; shapes (...).

    Sharp form of Theorem "Concentration–Entropy Bound": below, the least entropy over all logits of range at most
    `range_`; above, log N, because equal logits are allowed. Trivial value of the lower bound: 0.
    """
    N = checks.positive_int("num_experts", num_experts, at_least=2)
    r = as_scalar("range_", range_, 0.0)
    holds = torch.isfinite(r) & (r >= 0)
    lower = _lowest_entropy(torch.where(holds, r, 0.0), N).clamp(min=0.0)
    return EntropyBounds(
        Certificate(torch.where(holds, lower, 0.0), holds, "range_ is finite, no logit range exceeds it"),
        Certificate(torch.full_like(r, math.log(N)), torch.ones_like(holds), "none"),
    )
