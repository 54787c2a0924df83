"""The contract of a router: tokens in, a `Routing` out.

A router is a gate (logits over experts), a selection policy and optional losses. A new one overrides `gate`. The
dial α, the balanced prior, selection and metrics are here; `grmoe.routing.precision` has what keeps routers in fp32.
Tensors keep their leading dimensions. Nothing in the forward pass reads a value on the host.

Legend: N experts, D model width; `...` any leading dimensions of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.kernels.combine import combine_weights
from grmoe.kernels.runtime import INTERPRETED
from grmoe.routing.budget import Budget
from grmoe.routing.counting import LoadCounter, read_all
from grmoe.routing.entropy import EntropyTerm
from grmoe.routing.fused import GateOperands, GateParts, describes_gate, try_fused
from grmoe.routing.leading import leading_loss, next_leading_share
from grmoe.routing.metrics import RoutingMetrics
from grmoe.routing.packed import PackedCopy
from grmoe.routing.precision import FullPrecision
from grmoe.routing.prior import next_log_prior
from grmoe.routing.result import Routing
from grmoe.routing.selection import Dense, Selection


class Router(FullPrecision):
    """Base of all routers.

    selection: which experts compute a token, given its gate. Default: all of them. Its numbers are in `budget`, on the
        device, and change at any time without recompiling (`tau`, `cap`).
    alpha: the dial, ℓ = α·score. 0 gives the uniform gate, ∞ top-1. Changeable at any time without recompiling.
    identity: how many of the experts, the last ones, are identity experts: a choice like any other, but they compute
        nothing, and the residual stream carries the token past them (mixture of depths). Default: none.
    balance: learn a log-prior b_e without gradients, b ← b + η(1 − N·load_e) (see `update_prior`).
    checked: raise on NaN or Inf in the input. This waits for the device. Without it such a token gets a NaN gate and
        touches no other token, no metric and no prior. Losses that are means over tokens become NaN or Inf: a training
        loop must see it and skip the step. Nothing of it stays in the router.
    backend: attribute. "auto" and "triton" run gate and selection as one kernel where one exists (see
        `grmoe.routing.fused`; "auto" does not in Triton's interpreter). "reference" never does.
    entropy: attribute. A term of the training loss that keeps the gate's entropy near a target. Default: none.
    leading_weight: attribute. Weight of the leading term in the training loss (`grmoe.routing.leading`). Default: 0.
        `use_leading` sets it. `leading_share` is then its state: the share of the tokens that each expert led in the
        step before. Checkpoints of a training run have it; exported models do not.
    """

    reads_prior: ClassVar[bool] = True  # False: the gate has no prior, so `balance` would do nothing
    own_choice: ClassVar[bool] = False  # True: no selection can change which experts compute a token
    of_experts: ClassVar[bool] = True  # False: it chooses something else, and `routers` leaves it out
    _fusable: ClassVar[bool] = False
    log_prior: Tensor
    alpha_value: Tensor
    log_alpha: nn.Parameter | None
    leading_share: Tensor | None

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        selection: Selection | None = None,
        alpha: float = 1.0,
        balance: bool = False,
        identity: int = 0,
        checked: bool = False,
    ) -> None:
        super().__init__()
        self.dim = checks.positive_int("dim", dim)
        self.num_experts = checks.positive_int("num_experts", num_experts, at_least=2)
        self.budget = Budget(Dense() if selection is None else selection, num_experts)
        if balance and not self.reads_prior:
            kind = type(self).__name__
            raise ValueError(f"balance must be False for {kind}: its gate has no prior to learn")
        self.balance, self.checked = balance, checked
        self.backend: Literal["auto", "reference", "triton"] = "auto"
        self.register_buffer("alpha_value", torch.tensor(checks.alpha("alpha", alpha)))
        self.register_buffer("log_prior", torch.zeros(num_experts))
        self.register_parameter("log_alpha", None)  # see `learn_alpha`
        self.identity_experts = checks.positive_int("identity", identity, at_least=0)
        checks.require(
            identity < num_experts,
            f"identity must leave an expert that computes, got {identity} of num_experts = {num_experts}",
        )
        self.counter = LoadCounter(num_experts, identity)
        self.entropy: EntropyTerm | None = None
        self.leading_weight = 0.0
        self.register_buffer("leading_share", None, persistent=False)
        self._packed = PackedCopy()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._fusable = describes_gate(cls)

    # -- what a router defines -------------------------------------------------------------------------

    def gate(self, x: Tensor, token_ids: Tensor | None) -> Tensor:
        """Scaled logits (..., N) for tokens x (..., D): `for_backward(self.alpha_value) * (score + self.log_prior)`."""
        raise NotImplementedError(f"{type(self).__name__} must define gate()")

    def noise_like(self, logits: Tensor) -> Tensor | None:
        """Noise on logits (..., N), if any. It is drawn once per pass: the weights belong to the choice, also with an α
        of their own."""
        return None

    def gate_operands(self) -> GateOperands | None:
        """The gate as the fused kernel computes it; None where the kernel cannot."""
        return None

    def gate_parts(self) -> GateParts | None:
        """The gate by several kernels, where `gate_operands` is None; None where there are none."""
        return None

    def select(self, probs: Tensor) -> Tensor:
        """Mask (..., N) of the experts computed."""
        return self.budget.select(probs, self.training)

    def max_experts(self) -> int:
        """The largest number of experts that compute a token. It sizes the dispatch list."""
        return min(self.budget.room, self.num_experts - self.identity_experts)

    def experts_per_token(self, tokens: int) -> float:
        """Experts computed per token in a sequence of `tokens` tokens: the mean, or an upper bound of it."""
        return float(self.max_experts())

    def losses(self, routing: Routing) -> Tensor:
        """The router's own loss, 0-d."""
        return routing.aux_loss

    def geometry_figures(self) -> dict[str, Tensor]:
        """Frame and concentration figures for `read_metrics`, 0-d tensors, where a router has them."""
        return {}

    # -- what all routers share ------------------------------------------------------------------------

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> Routing:
        checks.last_dim("x", x, self.dim)
        if token_ids is not None:
            checks.shape("token_ids", token_ids, x.shape[:-1])
        if self.checked:
            checks.all_finite("x", x)
        # Autocast would turn the projections into bf16, where near ties route differently in serving.
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(device_type=x.device.type, enabled=False):
                return self._forward(x, token_ids)
        return self._forward(x, token_ids)

    def _forward(self, x: Tensor, token_ids: Tensor | None) -> Routing:
        kernels = self.backend == "triton" or (self.backend == "auto" and not INTERPRETED)
        routing: Routing | None = None
        if kernels and self._fusable:
            pack = None if self.training else self._packed.get
            gate = (self._scaled_operands, self._scaled_parts)
            routing = try_fused(x, *gate, self.alpha_value, self.budget, self.training, pack)
        if routing is None:
            routing = self.route(x if x.dtype == torch.float64 else x.float(), token_ids)
        routing.identity_experts = self.identity_experts
        routing.aux_loss = self.losses(routing)
        if self.entropy is not None and self.training:
            routing.aux_loss = routing.aux_loss + self.entropy(routing.logits)
        if self.leading_share is not None and self.training:
            leading = self.leading_weight * leading_loss(routing.probs, self.leading_share)
            routing.aux_loss = routing.aux_loss + leading
        prior = self.budget if self.balance and self.training else None
        self.counter.add(routing, prior=prior, leads=self.training, kernels=kernels)
        return routing

    def route(self, x: Tensor, token_ids: Tensor | None) -> Routing:
        """The same step by step, in PyTorch: gate, softmax, selection, combine weights."""
        logits = self.gate(x, token_ids)
        if self.log_alpha is not None:
            logits = self.log_alpha.exp() * logits
        noise = self.noise_like(logits)
        logits = logits if noise is None else logits + noise
        probs = torch.softmax(logits, dim=-1)
        selected = self.select(self.budget.rank(logits, probs))
        if self.budget.weighs_apart:
            logits = self._gate_at(self.budget.weight_alpha, x, token_ids)
            logits = logits if noise is None else logits + noise
            probs = torch.softmax(logits, dim=-1)
        weights = combine_weights(logits, probs, selected, self.budget.policy.renormalize)
        zero = logits.new_zeros(())
        return Routing(logits=logits, probs=probs, selected=selected, weights=weights, aux_loss=zero)

    def _gate_at(self, alpha: Tensor, x: Tensor, token_ids: Tensor | None) -> Tensor:
        """`gate` at another α.

        By a second module with the same tensors, because other threads may compute with this one at the same time.
        """
        if torch.compiler.is_compiling():  # which traces no copies; what it traces sets nothing when it runs
            before, self.alpha_value = self.alpha_value, alpha
            try:
                return self.gate(x, token_ids)
            finally:
                self.alpha_value = before
        # Not `copy.copy`: modules with a parametrisation and those of FSDP2 refuse it.
        other = object.__new__(type(self))
        vars(other).update(vars(self), _buffers={**self._buffers, "alpha_value": alpha})
        return other.gate(x, token_ids)

    def _scaled_operands(self) -> GateOperands | None:
        """`gate_operands` times a learned α."""
        operands = self.gate_operands()
        return operands if operands is None or self.log_alpha is None else operands.scaled(self.log_alpha)

    def _scaled_parts(self) -> GateParts | None:
        """`gate_parts` times a learned α."""
        parts = self.gate_parts()
        return parts if parts is None or self.log_alpha is None else parts.scaled(self.log_alpha)

    def learn_alpha(self) -> None:
        """Make α a parameter, `log_alpha`, that starts at the present α. `alpha_value` becomes one, a factor on it."""
        if self.log_alpha is not None:
            self.keep_alpha()
        now, kind = self.alpha, type(self).__name__
        learns = type(self).route is Router.route and getattr(self, "dial", "posterior") == "posterior"
        checks.require(learns, f"a learned α must multiply all of a gate; that of this {kind} does not")
        checks.require(
            not self.budget.weighs_apart, "a learned α must set the weights: weight_alpha must be None"
        )
        checks.require(now > 0, f"a learned α must start above zero, got {now}")
        self.log_alpha = nn.Parameter(self.alpha_value.log())
        self.alpha = 1.0

    def keep_alpha(self) -> None:
        """End of learning: the learned α is the dial again."""
        now, self.log_alpha = self.alpha, None
        self.alpha = now

    def use_leading(self, weight: float) -> None:
        """Add the leading term to the training loss, from uniform shares on. 0: no longer."""
        checks.finite("weight", weight, at_least=0)
        own = type(self).route is not Router.route or type(self).select is not Router.select
        kind = type(self).__name__
        checks.require(
            not (weight and own), f"a leading term needs a router that a selection chooses for, got a {kind}"
        )
        self.leading_weight = weight
        self.leading_share = torch.full_like(self.log_prior, 1 / self.num_experts) if weight else None
        self.counter.count_leads(weight > 0)

    def uncounted(self) -> AbstractContextManager[None]:
        """A context in which forward passes leave metrics and prior sums unchanged."""
        return self.counter.pause()

    @torch.no_grad()
    def update_prior(self, rate: float) -> None:
        """One step of the balanced prior (`grmoe.routing.prior`) from the load since the last call; once per
        optimiser step. Without `balance`, or if the router is frozen, the prior stays. With a leading term
        `leading_share` is updated too."""
        checks.finite("rate", rate, at_least=0)
        if self.balance and self.frozen:
            self.prior_sums.zero_()
        elif self.balance:
            self.log_prior.copy_(next_log_prior(self.log_prior, self.prior_sums, rate))
            self.prior_sums.zero_()
        sums = self.counter.leading_sums
        if self.leading_share is not None and sums is not None:
            self.leading_share.copy_(next_leading_share(self.leading_share, sums))
            sums.zero_()

    @property
    def frozen(self) -> bool:
        """Whether it has parameters and none is trained, as below an adapter: an adapter's file has no prior."""
        trained = [p.requires_grad for p in self.parameters()]
        return bool(trained) and not any(trained)

    @property
    def prior_sums(self) -> Tensor:
        """Load since the last prior update: N sums and the token count. Several processes add theirs up."""
        return self.counter.prior_sums

    @property
    def alpha(self) -> float:
        """The dial. Reading it waits for the device; setting it does not."""
        learned = 1.0 if self.log_alpha is None else self.log_alpha.detach().exp()
        return float(self.alpha_value * learned)

    @alpha.setter
    def alpha(self, value: Any) -> None:
        number = checks.alpha("alpha", value)
        if self.alpha_value.ndim:  # one number per sequence
            self.alpha_value = self.alpha_value.new_tensor(number)
        self.alpha_value.fill_(number)

    @property
    def selection(self) -> Selection:
        """The policy, with the numbers it was given. The numbers in use are `tau` and `cap`."""
        return self.budget.policy

    @selection.setter
    def selection(self, policy: Selection) -> None:
        self.require_selection()
        self.budget.use(policy)

    @property
    def takes_selection(self) -> bool:
        """Whether the selection alone decides. Switch and Expert Choice also use a capacity, Soft MoE selects nothing,
        and a hash gives one expert all the probability."""
        return type(self).select is Router.select and not self.own_choice

    def require_selection(self) -> None:
        """Raise if another selection would not decide."""
        kind = type(self).__name__
        checks.require(
            self.takes_selection, f"selection must be None for a {kind}, which makes its own choice"
        )

    @property
    def tau(self) -> float:
        """τ in use: experts are added while those before hold less than τ. One: no limit. Reading waits for the device.

        Of `AtLeast` it is the weight, of `Threshold` the least probability.
        """
        return min(1.0, abs(float(self.budget.tau)))

    @tau.setter
    def tau(self, value: Any) -> None:
        self.budget.set_tau(value)

    @property
    def cap(self) -> int:
        """The most experts per token in use. Reading waits for the device."""
        return int(self.budget.cap)

    @cap.setter
    def cap(self, value: Any) -> None:
        self.budget.set_cap(value)

    def read_metrics(self) -> RoutingMetrics:
        """Metrics since the last `reset_metrics`. Waits for the device."""
        return read_metrics_of([self])[0]

    def reset_metrics(self) -> None:
        self.counter.reset()

    def train(self, mode: bool = True) -> Router:
        self._packed.clear()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        self._packed.clear()
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_experts={self.num_experts}, selection={self.selection}, balance={self.balance}"


@torch.no_grad()
def read_metrics_of(found: Sequence[Router]) -> list[RoutingMetrics]:
    """`Router.read_metrics` of several. The host waits once for all routers."""
    if not found:
        return []
    return read_all([router.counter for router in found], [router.geometry_figures() for router in found])
