"""The linear softmax gate with top-k selection (Shazeer et al. 2017): the usual baseline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grmoe import checks
from grmoe.routing.fused import GateOperands
from grmoe.routing.linear import LinearRouter
from grmoe.routing.result import Routing
from grmoe.routing.selection import TopK


class SoftmaxRouter(LinearRouter):
    """ℓ = α(Wx + b); the k largest gates, not renormalised, as for every other router.

    noise: standard deviation of Gaussian noise on the logits while training.
    z_loss: coefficient of the mean squared log-sum-exp (ST-MoE).
    load_loss: coefficient of the Switch load-balancing loss. It counts the experts of the full budget, also
        with random budgets, like the balanced prior ("candidates"). The loss evens out where the gate sends tokens. The
        drawn experts are a random part of that, mostly the leading ones, and their shares change with every draw.
    balance: learn b from the load instead (auxiliary-loss-free balancing).
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        noise: float = 0.0,
        z_loss: float = 0.0,
        load_loss: float = 0.0,
        **router: Any,
    ) -> None:
        given = router.get("selection")
        checks.require(
            top_k is None or given is None or getattr(given, "k", None) == top_k,
            f"top_k = {top_k} and selection = {given} both say how many experts: give one",
        )
        count = checks.positive_int("top_k", 2 if top_k is None else top_k)
        router.setdefault("selection", TopK(count))
        super().__init__(dim, num_experts, **router)
        checks.require(
            top_k is None or count <= num_experts,
            f"top_k must be at most num_experts = {num_experts}, got {top_k}",
        )
        self.noise = checks.finite("noise", noise, at_least=0)
        self.z_loss = checks.finite("z_loss", z_loss, at_least=0)
        self.load_loss = checks.finite("load_loss", load_loss, at_least=0)

    def noise_like(self, logits: Tensor) -> Tensor | None:
        return self.noise * torch.randn_like(logits) if self.noise and self.training else None

    def gate_operands(self) -> GateOperands | None:
        return None if self.noise and self.training else super().gate_operands()

    def losses(self, routing: Routing) -> Tensor:
        loss = super().losses(routing)
        if self.z_loss:
            squares = torch.logsumexp(routing.logits, -1).square()
            loss = loss + self.z_loss * _mean_over_tokens(squares.flatten())
        if self.load_loss:
            wanted = routing.selected
            if self.budget.draws(self.training):
                wanted = self.budget.select(routing.probs, training=False)
            loss = loss + self.load_loss * load_balancing_loss(routing.probs, wanted)
        return loss


def load_balancing_loss(probs: Tensor, selected: Tensor) -> Tensor:
    """N Σ_e f_e P_e (Fedus et al. 2022, eq. 4): f_e the share of assignments, P_e the mean probability.

    It is one for a uniform router. f_e counts what the gate asked for and carries no gradient.
    """
    N = probs.shape[-1]
    chosen = selected.reshape(-1, N).to(probs.dtype)
    share = chosen.sum(0) / chosen.sum().clamp(min=1)
    return N * (share * _mean_over_tokens(probs.reshape(-1, N))).sum()


def _mean_over_tokens(value: Tensor) -> Tensor:
    """Mean over the first dimension; zero for an empty batch, where `mean` would put NaN into the loss."""
    return value.sum(0) / max(value.shape[0], 1)  # `len` would fix the number of tokens in torch.export
