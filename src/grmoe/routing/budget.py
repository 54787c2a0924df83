"""A router's budget as data: τ, cap, the α of the weights and the rank of experts, on the device.

Changing one of these numbers recompiles nothing, and a captured CUDA graph sees the change. Each is a 0-d tensor, or
one number per sequence with shape (B, 1, 1).

Legend: N experts, B sequences; `...` any leading dimensions of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.routing.elastic import FULL, Elastic, elastic_numbers
from grmoe.routing.selection import Mass, Selection, Threshold, TopK, above, largest, numbers

_BY_RANK = (TopK, Mass)
Balances = Literal["computed", "candidates", "leading", "both"]


class Budget(nn.Module):
    """How many experts a token gets: a policy, and its numbers on the device. Not part of a checkpoint.

    policy: the rule, the room (the most experts a token can get, which sizes the dispatch list) and whether weights are
        renormalised. These are fixed when a model is compiled.
    elastic, layer: random budgets while training (`grmoe.routing.elastic`).
    balances: the experts for which the balanced prior evens out the load (`grmoe.routing.counting.prior_shares`).
        "computed": those computed. "candidates": those of the full budget, whatever was drawn. "leading": the most
        probable one, always so for a dense gate, where all are computed. "both": the mean of the last two.
    """

    tau: Tensor
    cap: Tensor
    weight_alpha: Tensor
    by_norm: Tensor
    log_norm_N: Tensor
    key: Tensor
    first_row: Tensor

    def __init__(self, policy: Selection, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.elastic: Elastic | None = None
        self.layer = 0
        self.weighs_apart = False
        self.ranks_apart = False
        self._balances: Balances = "computed"
        tau, cap = numbers(policy, num_experts)
        self.register_buffer("tau", torch.tensor(tau), persistent=False)
        self.register_buffer("cap", torch.tensor(cap, dtype=torch.int32), persistent=False)
        self.register_buffer("weight_alpha", torch.tensor(1.0), persistent=False)
        self.register_buffer("by_norm", torch.tensor(0.0), persistent=False)
        self.register_buffer("log_norm_N", torch.zeros(num_experts), persistent=False)
        self.register_buffer("key", torch.tensor(FULL), persistent=False)
        self.register_buffer("first_row", torch.tensor(0), persistent=False)
        self.policy = policy

    @property
    def balances(self) -> Balances:
        return "leading" if self.policy.dense else self._balances

    @balances.setter
    def balances(self, kind: Balances) -> None:
        self._balances = checks.one_of("balances", kind, ("computed", "candidates", "leading", "both"))

    @property
    def room(self) -> int:
        """The most experts a token can get without another policy."""
        return self.policy.max_experts(self.num_experts)

    def use(self, policy: Selection) -> None:
        """Another policy, and its numbers."""
        self.policy = policy
        tau, cap = numbers(policy, self.num_experts)
        self._fill("tau", tau)
        self._fill("cap", cap)

    def reset(self, weight_alpha: float | None, norms: Sequence[float] | None = None) -> None:
        """Fill all numbers again: a model made on the meta device has none."""
        self.use(self.policy)
        self.set_weight_alpha(weight_alpha)
        self.set_norms(norms)
        self._fill("by_norm", 0.0)
        self.key.fill_(FULL)
        self.first_row.zero_()

    def set_tau(self, value: Any) -> None:
        """τ of `Mass` and `TopK` (a top-k with a τ stops early), or the minimum of `Threshold`."""
        self._needs(*_BY_RANK, Threshold)
        tau = checks.fraction("tau", value)
        if type(self.policy) is Threshold:
            needed = Threshold(tau).max_experts(self.num_experts)
            checks.require(needed <= self.room, f"tau must leave at most {self.room} experts, got {value!r}")
        self._fill("tau", tau)

    def set_cap(self, value: Any) -> None:
        """The most experts per token, at most the policy's own."""
        self._needs(*_BY_RANK)
        cap = checks.positive_int("cap", value)
        checks.require(
            cap <= self.room, f"cap must be at most {self.room}, the room of {self.policy}, got {cap}"
        )
        self._fill("cap", cap)

    def set_numbers(self, tau: float, cap: int, by_norm: bool = False) -> None:
        """τ and cap together; τ may be `NO_LIMIT`. The caller has checked them for this policy.

        by_norm: rank experts by gate × norm (`set_norms`).
        """
        checks.require(
            self.ranks_apart or not by_norm, "by_norm needs the norms of the experts: call set_norms"
        )
        fits = cap <= self.room or type(self.policy) not in _BY_RANK
        checks.require(fits, f"cap must be at most {self.room}, the room of {self.policy}, got {cap}")
        self._fill("tau", tau)
        self._fill("cap", cap)
        if self.ranks_apart:
            self._fill("by_norm", float(by_norm))

    def set_weight_alpha(self, value: Any | None) -> None:
        """α of the combine weights; None: that of the choice, as in the paper."""
        self.weighs_apart = value is not None
        if value is not None:
            self._fill("weight_alpha", checks.alpha("weight_alpha", value))

    def set_norms(self, norms: Sequence[float] | None) -> None:
        """n_e, the mean output norm of each expert; None: experts are ranked by the gate alone.

        With them, `by_norm` chooses experts by g_e·n_e / Σ g·n, the share of an expert in the layer's output if outputs
        have their mean norms. τ is then a share of that. The weights stay those of the gate. The fused gate has no such
        rank, so the gate runs in PyTorch.
        """
        self.ranks_apart = norms is not None
        if norms is not None:
            checks.require(
                len(norms) == self.num_experts,
                f"norms must be one for each of {self.num_experts} experts, got {len(norms)}",
            )
            self.log_norm_N.copy_(torch.tensor(norms).log())

    def rank(self, logits: Tensor, probs: Tensor) -> Tensor:
        """What experts are chosen by: the gate, or gate × norm as probabilities, softmax(ℓ + log n)."""
        if not self.ranks_apart:
            return probs
        return torch.softmax(logits + self.by_norm * self.log_norm_N, dim=-1)

    def select(self, probs: Tensor, training: bool) -> Tensor:
        """Mask (..., N) of the experts computed."""
        # Exact types, because a subclass may select differently.
        if type(self.policy) is Threshold:
            return above(probs, self.tau)
        if type(self.policy) not in _BY_RANK:
            return self.policy(probs)
        checks.require(
            self.room <= probs.shape[-1],
            f"k must be at most the number of experts {probs.shape[-1]}, got {self.room}",
        )
        tau, cap = self.tau.to(probs.dtype), self.cap
        if self.draws(training):
            assert self.elastic is not None
            tau, cap = elastic_numbers(
                self.elastic, self.key, self.first_row, self.layer, probs.shape, tau, cap
            )
        return largest(probs, tau, cap)

    def draws(self, training: bool) -> bool:
        """Whether budgets are random in this pass."""
        return training and self.elastic is not None and type(self.policy) in _BY_RANK

    def _needs(self, *kinds: type) -> None:
        checks.require(
            type(self.policy) in kinds,
            f"selection must be one of {', '.join(k.__name__ for k in kinds)} to change this, got {self.policy}",
        )

    def _fill(self, name: str, value: float) -> None:
        """In place where the buffer holds one number, so that captured graphs see it."""
        now: Tensor = getattr(self, name)
        if now.ndim == 0:
            now.fill_(value)
        else:
            setattr(self, name, now.new_tensor(value))
