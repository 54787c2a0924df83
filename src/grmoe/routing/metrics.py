"""The same routing metrics for every router, accumulated on the device and read on demand.

Legend: N experts, T tokens (all leading dimensions together).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

COLLAPSE_SHARE = 0.01  # an expert with a load below 1 % counts as collapsed (paper, setup)


@dataclass(frozen=True)
class RoutingMetrics:
    """What one router did since the last reset.

    soft_load and top1_load are shares of tokens and sum to at most one. computed_load is the work the experts get: with
    top-k the load that a balanced prior evens out, without selection uniform whatever the gate does.
    """

    tokens: int
    nonfinite_tokens: int  # left out of everything else
    soft_load: list[float]  # mean gate probability of each expert
    top1_load: list[float]  # share of tokens whose largest combine weight is the expert's
    computed_load: list[
        float
    ]  # share of all computed (token, expert) pairs that are the expert's; sums to one
    load_cv: float  # std / mean of soft_load
    top1_cv: float  # std / mean of top1_load
    computed_cv: float  # std / mean of computed_load
    min_load: float  # smallest top1_load
    collapsed: bool  # min_load < 1 %
    entropy: float  # mean entropy of the gate, nats
    effective_experts_entropy: float  # exp(entropy)
    effective_experts_inverse: float  # mean of 1/Σg²
    experts_computed: float  # mean number of experts selected per token
    # Of routers that have frames or concentrations; None elsewhere.
    max_overlap: float | None = None  # largest ‖UᵢᵀUⱼ‖²_F / k, i ≠ j
    max_cosine: float | None = None  # largest principal cosine between two experts
    orthonormality_error: float | None = None
    kappa_min: float | None = None
    kappa_max: float | None = None


class MetricsAccumulator(nn.Module):
    """Sums in one fp64 buffer.

    [soft load (N), top-1 load (N), computed load (N), entropy, 1/Σg², computed, tokens, non-finite]
    """

    sums: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        # fp64: a count in fp32 stops growing at 2^24 tokens. Not persistent: metrics are not part of a model.
        self.register_buffer("sums", torch.zeros(3 * num_experts + 5, dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def update(self, probs: Tensor, weights: Tensor, selected: Tensor) -> None:
        """Add a batch of gates. No value is read by the host."""
        N = self.num_experts
        probs_TN, weights_TN = probs.detach().reshape(-1, N), weights.detach().reshape(-1, N)
        selected_TN = selected.reshape(-1, N)
        finite_T = torch.isfinite(probs_TN).all(-1)
        # A token with NaN in it must not reach the sums, nor through the balanced prior other tokens.
        probs_TN = torch.where(finite_T.unsqueeze(-1), probs_TN, 0.0)
        selected_TN = selected_TN & finite_T.unsqueeze(-1)
        entropy_T = -torch.xlogy(probs_TN, probs_TN).sum(-1)
        inverse_T = torch.where(finite_T, 1 / probs_TN.square().sum(-1).clamp(min=1e-30), 0.0)
        served_T = selected_TN.any(-1)
        top1_T = torch.where(selected_TN, weights_TN, -1.0).argmax(-1)
        top1_TN = (top1_T.unsqueeze(-1) == torch.arange(N, device=probs.device)) & served_T.unsqueeze(-1)
        batch = torch.cat(
            [
                probs_TN.sum(0, dtype=torch.float64),
                top1_TN.sum(0, dtype=torch.float64),
                selected_TN.sum(0, dtype=torch.float64),
                entropy_T.sum(0, dtype=torch.float64, keepdim=True),
                inverse_T.sum(0, dtype=torch.float64, keepdim=True),
                selected_TN.sum((0, 1), dtype=torch.float64).view(1),
                finite_T.sum(0, dtype=torch.float64, keepdim=True),
                (~finite_T).sum(0, dtype=torch.float64, keepdim=True),
            ]
        )
        self.sums.add_(batch)

    def reset(self) -> None:
        self.sums.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MetricsAccumulator:
        """Moves between devices, stays fp64: `model.float()` must not shorten the counts."""

        def keep_precision(t: Tensor) -> Tensor:
            out = fn(t)
            return out if out.dtype == t.dtype else t.to(out.device)

        return super()._apply(keep_precision, recurse)

    def read(self) -> RoutingMetrics:
        """Waits for the device."""
        return summarize(self.sums, self.num_experts)


def summarize(sums: Tensor, num_experts: int) -> RoutingMetrics:
    """Turn one vector of sums into metrics (no tokens seen: loads and entropy are NaN).

    Where every token was dropped computed_load is NaN too: it has nothing to be a share of.
    """
    values = sums.tolist()
    N = num_experts
    entropy, inverse, computed, tokens, bad = values[3 * N :]
    per = (lambda total: total / tokens) if tokens else (lambda total: math.nan)
    soft, top1 = [per(v) for v in values[:N]], [per(v) for v in values[N : 2 * N]]
    share = [v / computed if computed else math.nan for v in values[2 * N : 3 * N]]
    return RoutingMetrics(
        tokens=int(tokens),
        nonfinite_tokens=int(bad),
        soft_load=soft,
        top1_load=top1,
        computed_load=share,
        load_cv=coefficient_of_variation(soft),
        top1_cv=coefficient_of_variation(top1),
        computed_cv=coefficient_of_variation(share),
        min_load=min(top1) if tokens else math.nan,
        collapsed=bool(tokens) and min(top1) < COLLAPSE_SHARE,
        entropy=per(entropy),
        effective_experts_entropy=math.exp(per(entropy)) if tokens else math.nan,
        effective_experts_inverse=per(inverse),
        experts_computed=per(computed),
    )


def coefficient_of_variation(load: list[float]) -> float:
    """std / mean over experts (population std, as in the paper's proof of Theorem "Collapse Resistance")."""
    mean = sum(load) / len(load)
    if not mean > 0:
        return math.nan
    return math.sqrt(sum((v - mean) ** 2 for v in load) / len(load)) / mean
