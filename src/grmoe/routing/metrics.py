"""Routing metrics: one definition of load, balance and collapse for every router.

Legend: N experts, T tokens (all leading dimensions together), K mean experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

COLLAPSE_FRACTION = 0.1  # of the fair share K/N
_PAPER_COLLAPSE_SHARE = 0.01  # of the tokens (the paper's rule, made for N = 8)


@dataclass(frozen=True, kw_only=True)
class RoutingMetrics:
    """What one router did since the last reset. Shares are of the tokens with a finite gate.

    Load, CV, smallest load and collapse speak of the tokens an expert *receives*, that is, computes. A dense selection
    computes every expert for every token, so its load is uniform by construction; look at `leading_*` there.

    Identity experts compute nothing. They are in `identity_load` and in the entropy, and in no other figure.
    """

    tokens: int
    """Tokens counted."""
    nonfinite_tokens: int
    """Tokens with NaN or Inf in their gate. All other figures leave them out."""
    experts_per_token: float
    """K, the mean number of experts computed per token. Soft MoE: expert rows (slots) per token."""
    load: list[float]
    """Share of tokens each expert receives. Sums to K; the fair share is K/N. Soft MoE: slots over tokens."""
    load_cv: float
    """Standard deviation over mean of `load`."""
    min_load: float
    """The smallest `load`."""
    collapsed: bool
    """Some expert receives less than a tenth of its fair share K/N."""
    collapsed_paper: bool
    """The paper's rule: some expert receives less than 1 % of the tokens. Meaningful for about 8 experts."""
    leading_load: list[float]
    """Share of tokens in which each expert has the largest combine weight. Sums to one without dropped tokens."""
    leading_cv: float
    """Standard deviation over mean of `leading_load`."""
    leading_min_load: float
    """The smallest `leading_load`."""
    gate_load: list[float]
    """Mean gate probability of each expert. Sums to one, less what identity experts have."""
    gate_cv: float
    """Standard deviation over mean of `gate_load`."""
    entropy: float
    """Mean entropy of the gate, in nats."""
    effective_experts_entropy: float
    """exp(entropy)."""
    effective_experts_inverse: float
    """Mean of 1/Σg²."""
    identity_load: list[float] = field(default_factory=list)
    """Share of tokens that choose each identity expert. Their sum is the choices per token that compute nothing."""
    max_overlap: float | None = None
    """Largest ‖UᵢᵀUⱼ‖²_F / k over i ≠ j. None without frames."""
    orthonormality_error: float | None = None
    """Largest |UᵀU − I|. None without frames."""
    kappa_min: float | None = None
    """Smallest concentration. None without concentrations."""
    kappa_max: float | None = None
    """Largest concentration. None without concentrations."""


def routing_sums(probs: Tensor, weights: Tensor, selected: Tensor, slot_rows: int | None = None) -> Tensor:
    """The sums of one forward pass, fp64 (3N+4,):

    [gate probability (N), led tokens (N), received tokens (N), entropy, 1/Σg², tokens, non-finite tokens]

    slot_rows: Soft MoE's rows per expert, which it computes in place of tokens.
    """
    N = probs.shape[-1]
    probs_TN, weights_TN = probs.detach().reshape(-1, N), weights.detach().reshape(-1, N)
    finite_T = torch.isfinite(probs_TN).all(-1)
    # A NaN token must not reach the sums: through the balanced prior it would reach other tokens.
    probs_TN = torch.where(finite_T.unsqueeze(-1), probs_TN, 0.0)
    selected_TN = selected.reshape(-1, N) & finite_T.unsqueeze(-1)
    entropy_T = -torch.xlogy(probs_TN, probs_TN).sum(-1)
    inverse_T = torch.where(finite_T, 1 / probs_TN.square().sum(-1), 0.0)
    leading_T = torch.where(selected_TN, weights_TN, -1.0).argmax(-1)
    leads_TN = leading_T.unsqueeze(-1) == torch.arange(N, device=probs.device)
    leads_TN = leads_TN & selected_TN.any(-1, keepdim=True)
    received_N = selected_TN.sum(0, dtype=torch.float64)
    if slot_rows is not None:
        received_N = torch.full_like(received_N, slot_rows)
    return torch.cat(
        [
            probs_TN.sum(0, dtype=torch.float64),
            leads_TN.sum(0, dtype=torch.float64),
            received_N,
            entropy_T.sum(0, dtype=torch.float64, keepdim=True),
            inverse_T.sum(0, dtype=torch.float64, keepdim=True),
            finite_T.sum(0, dtype=torch.float64, keepdim=True),
            (~finite_T).sum(0, dtype=torch.float64, keepdim=True),
        ]
    )


def summarize(sums: Tensor, num_experts: int, identity_experts: int = 0) -> RoutingMetrics:
    """Metrics from a vector of `routing_sums`. Reads it on the host. Without tokens every share is NaN.

    identity_experts: how many of the experts, the last ones, compute nothing.
    """
    values, all_experts, N = sums.tolist(), num_experts, num_experts - identity_experts
    gate, led, received = (values[i * all_experts :][:N] for i in range(3))
    skipped = values[2 * all_experts + N : 3 * all_experts]
    entropy, inverse, tokens, bad = values[3 * all_experts :]

    def per_token(total: float) -> float:
        return total / tokens if tokens else math.nan

    # CV and collapse come from the counts, because equal whole numbers stay equal under rounding.
    return RoutingMetrics(
        tokens=int(tokens),
        nonfinite_tokens=int(bad),
        experts_per_token=per_token(sum(received)),
        load=[per_token(v) for v in received],
        load_cv=coefficient_of_variation(received),
        min_load=per_token(min(received)),
        collapsed=min(received) < COLLAPSE_FRACTION * sum(received) / N,
        collapsed_paper=min(received) < _PAPER_COLLAPSE_SHARE * tokens,
        leading_load=[per_token(v) for v in led],
        leading_cv=coefficient_of_variation(led),
        leading_min_load=per_token(min(led)),
        gate_load=[per_token(v) for v in gate],
        gate_cv=coefficient_of_variation(gate),
        entropy=per_token(entropy),
        effective_experts_entropy=math.exp(per_token(entropy)),
        effective_experts_inverse=per_token(inverse),
        identity_load=[per_token(v) for v in skipped],
    )


def coefficient_of_variation(load: list[float]) -> float:
    """std / mean over experts (population std, as in the paper's proof of Theorem "Collapse Resistance")."""
    mean = sum(load) / len(load)
    if not mean > 0:
        return math.nan
    return math.sqrt(sum((v - mean) ** 2 for v in load) / len(load)) / mean
