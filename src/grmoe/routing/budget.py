"""A router's budget as data: τ, cap, the α of the weights and the bias of the choice, on the device.

Changing one of these numbers recompiles nothing, and a captured CUDA graph sees the change. Each is a 0-d tensor, or
one number per sequence with shape (B, 1, 1). The bias has shape (N,), or (B, 1, N).

Legend: N experts, B sequences; `...` any leading dimensions of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from grmoe import checks
from grmoe.routing.buffers import Restarted
from grmoe.routing.elastic import FULL, Elastic, elastic_numbers
from grmoe.routing.selection import (
    BY_RANK,
    NO_LIMIT,
    AtLeast,
    Selection,
    Threshold,
    TopK,
    above,
    largest,
    numbers,
)

Balances = Literal["computed", "candidates", "leading", "both"]


def _require_policy(policy: Any) -> None:
    """Here, because the first forward pass would fail without naming the argument."""
    is_policy = callable(policy) and hasattr(policy, "renormalize") and not isinstance(policy, type)
    checks.require(is_policy, f"selection must be a policy such as TopK(2), got {policy!r}")


class Budget(Restarted):
    """How many experts a token gets: a policy, and its numbers on the device. Not part of a checkpoint.

    policy: the rule, the room (the most experts a token can get, which sizes the dispatch list) and whether weights are
        renormalised. These are fixed when a model is compiled.
    biased: experts may be chosen by gate and bias (`set_bias`). Fixed when a model is compiled, like the policy.
    elastic, layer: random budgets while training (`grmoe.routing.elastic`).
    balances: the experts for which the balanced prior evens out the load (`grmoe.routing.counting.prior_shares`).
        "computed": those computed. "candidates": those of the full budget, whatever was drawn. "leading": the most
        probable one, always so for a dense gate, where all are computed. "both": the mean of the last two.
        With `weight_alpha` or a bias it reads "computed", whatever was set: the gate of the weights does not tell who
        else was a candidate, or who led.
    """

    tau: Tensor
    cap: Tensor
    weight_alpha: Tensor
    bias: Tensor
    key: Tensor
    first_row: Tensor

    def __init__(self, policy: Selection, num_experts: int) -> None:
        super().__init__()
        _require_policy(policy)
        self.num_experts = num_experts
        self.elastic: Elastic | None = None
        self.layer = 0
        self.weighs_apart = False
        self._weight_alpha = 1.0
        self.biased = False
        self._balances: Balances = "computed"
        tau, cap = numbers(policy, num_experts)
        self.register_buffer("tau", torch.tensor(tau), persistent=False)
        self.register_buffer("cap", torch.tensor(cap, dtype=torch.int32), persistent=False)
        self.register_buffer("weight_alpha", torch.tensor(1.0), persistent=False)
        self.register_buffer("bias", torch.zeros(num_experts), persistent=False)
        self.register_buffer("key", torch.tensor(FULL), persistent=False)
        self.register_buffer("first_row", torch.tensor(0), persistent=False)
        self.policy = policy

    @property
    def balances(self) -> Balances:
        """What the prior counts. Where the choice has a bias or an α of its own, the gate does not tell candidates.

        What was set is kept, and holds again without them.
        """
        if self.policy.dense:
            return "leading"
        return "computed" if self.weighs_apart or self.biased else self._balances

    @balances.setter
    def balances(self, kind: Balances) -> None:
        self._balances = checks.one_of("balances", kind, ("computed", "candidates", "leading", "both"))

    @property
    def room(self) -> int:
        """The most experts a token can get without another policy."""
        return self.policy.max_experts(self.num_experts)

    def use(self, policy: Selection) -> None:
        """Another policy, and its numbers."""
        _require_policy(policy)
        self.policy = policy
        tau, cap = numbers(policy, self.num_experts)
        self._fill("tau", tau)
        self._fill("cap", cap)

    @torch.no_grad()
    def restart(self, name: str) -> None:
        tau, cap = numbers(self.policy, self.num_experts)
        starts = {
            "tau": tau,
            "cap": cap,
            "weight_alpha": self._weight_alpha,
            "bias": 0.0,
            "key": FULL,
            "first_row": 0,
        }
        getattr(self, name).fill_(starts[name])

    def set_tau(self, value: Any) -> None:
        """τ of `Mass` and `TopK` (a top-k with a τ stops early), the weight of `AtLeast` or of `Threshold`."""
        self._needs(*BY_RANK, Threshold)
        tau = checks.fraction("tau", value)
        if type(self.policy) is TopK and tau == 1:
            tau = NO_LIMIT
        if type(self.policy) is Threshold:
            needed = Threshold(tau).max_experts(self.num_experts)
            checks.require(needed <= self.room, f"tau must leave at most {self.room} experts, got {value!r}")
        self._fill("tau", -tau if type(self.policy) is AtLeast else tau)

    def set_cap(self, value: Any) -> None:
        """The most experts per token, at most the policy's own."""
        self._needs(*BY_RANK)
        cap = checks.positive_int("cap", value)
        checks.require(
            cap <= self.room, f"cap must be at most {self.room}, the room of {self.policy}, got {cap}"
        )
        self._fill("cap", cap)

    def set_numbers(self, tau: float, cap: int, bias: Sequence[float] | None = None) -> None:
        """τ, cap and bias together. The caller has checked them for this policy.

        τ may be `NO_LIMIT`, or negative as in `grmoe.routing.selection.largest`.
        """
        fits = cap <= self.room or type(self.policy) not in BY_RANK
        checks.require(fits, f"cap must be at most {self.room}, the room of {self.policy}, got {cap}")
        self._fill("tau", tau)
        self._fill("cap", cap)
        self.set_bias(bias)

    def set_weight_alpha(self, value: Any | None) -> None:
        """α of the combine weights; None: that of the choice, as in the paper."""
        self.weighs_apart = value is not None
        if value is not None:
            self._weight_alpha = checks.alpha("weight_alpha", value)
            self._fill("weight_alpha", self._weight_alpha)

    def set_bias(self, bias: Sequence[float] | None) -> None:
        """What is added to the logits for the choice alone; None: nothing. Weights stay those of the gate.

        A bias evens out the load of experts, or ranks them by more than the gate. `biased` must be set before, because
        compiled code and kernels without a bias do not read one.
        """
        if bias is None:
            values = self.bias.new_zeros(self.num_experts)  # on the device: nothing waits
        else:
            values = torch.tensor([checks.finite("bias", value) for value in bias], dtype=torch.float32)
            right = len(bias) == self.num_experts
            checks.require(
                right, f"bias must have one number per expert, {self.num_experts}, got {len(bias)}"
            )
            checks.require(self.biased, "a bias needs a budget with biased = True")
        if self.bias.ndim == 1:
            self.bias.copy_(values)
        else:
            self.bias = values.to(self.bias)

    def rank(self, logits: Tensor, probs: Tensor) -> Tensor:
        """What experts are chosen by, (..., N): the gate, or softmax(ℓ + bias)."""
        if not self.biased:
            return probs
        return torch.softmax(logits + self.bias.to(logits.dtype), dim=-1)

    def select(self, probs: Tensor, training: bool) -> Tensor:
        """Mask (..., N) of the experts computed."""
        # Exact types, because a subclass may select differently.
        if type(self.policy) is Threshold:
            return above(probs, self.tau)
        if type(self.policy) not in BY_RANK:
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
        return training and self.elastic is not None and type(self.policy) in BY_RANK

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
