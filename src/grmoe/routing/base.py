"""The contract of a router: tokens in, a `Routing` out.

A router is a gate (logits over experts), a selection policy and optional losses. A new one overrides `gate`;
the dial α, the balanced prior, selection, metrics and fp32 arithmetic are here. Tensors keep their leading
dimensions; nothing in the forward reads a value on the host.

Legend: N experts, D model width, T tokens; `...` any leading dimensions of the input.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.kernels.runtime import INTERPRETED, attempt, available, has_failed, is_capturing
from grmoe.routing.fused import GateOperands, fused_gate, fuses, pack_operands
from grmoe.routing.metrics import MetricsAccumulator, RoutingMetrics
from grmoe.routing.selection import Dense, Selection


@dataclass
class SlotMixing:
    """Soft MoE's two maps between tokens and expert slots: (..., T, N, slots)."""

    dispatch: Tensor  # sums to one over tokens
    combine: Tensor  # sums to one over experts and slots


@dataclass
class Routing:
    """What a router decided. All shaped like the input with `dim` replaced by N, fp32 (fp64 for fp64 input)."""

    logits: Tensor  # scaled logits ℓ: dial and prior included
    probs: Tensor  # the gate, softmax(ℓ)
    selected: Tensor  # bool: the experts computed for each token
    weights: Tensor  # combine weights, zero where not selected
    aux_loss: Tensor  # 0-d, the router's own losses, already multiplied by their coefficients
    slots: SlotMixing | None = None


class Router(nn.Module):
    """Base of all routers.

    alpha: the dial, ℓ = α·score. 0 gives the uniform gate, ∞ top-1. Changeable at any time, no recompilation.
    balance: learn a log-prior b_e without gradients, b ← b + η(1 − N·load_e) (see `update_prior`).
    backend: attribute. "auto" and "triton" run gate and selection as one kernel where there is one for them (see
    `grmoe.routing.fused`; "auto" not in Triton's interpreter), "reference" never does.
    checked: raise on NaN or Inf in the input. This waits for the device; without it such a token gets a NaN
    gate of its own and touches no other token, no metric and no prior.
    """

    log_prior: Tensor
    prior_sums: Tensor
    alpha_value: Tensor

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        selection: Selection | None = None,
        alpha: float = 1.0,
        balance: bool = False,
        checked: bool = False,
    ) -> None:
        super().__init__()
        self.dim = checks.positive_int("dim", dim)
        self.num_experts = checks.positive_int("num_experts", num_experts, at_least=2)
        self.selection: Selection = Dense() if selection is None else selection
        self.balance = balance
        self.checked = checked
        self.backend: Literal["auto", "reference", "triton"] = "auto"
        self._packed: tuple[weakref.ref[Tensor], tuple[Any, ...], Tensor] | None = None
        self.record = True  # off: forward passes leave metrics and prior sums as they are
        self.register_buffer("alpha_value", torch.tensor(_dial(alpha)))
        self.register_buffer("log_prior", torch.zeros(num_experts))
        # Load since the last prior update: N sums and the token count.
        self.register_buffer("prior_sums", torch.zeros(num_experts + 1), persistent=False)
        self.metrics = MetricsAccumulator(num_experts)

    # -- what a router defines -------------------------------------------------------------------------

    def gate(self, x: Tensor, token_ids: Tensor | None) -> Tensor:
        """Scaled logits (..., N) for tokens x (..., D), dial and prior included."""
        raise NotImplementedError(f"{type(self).__name__} must define gate()")

    def gate_operands(self) -> GateOperands | None:
        """The gate in the fused kernel's terms; None where its logits are anything else."""
        return None

    def select(self, probs: Tensor) -> Tensor:
        """Mask of the experts computed, (..., N)."""
        return self.selection(probs)

    def most_experts(self) -> int:
        """The most experts a token can be computed by."""
        return self.selection.most(self.num_experts)

    def losses(self, routing: Routing) -> Tensor:
        """The router's own loss, 0-d."""
        return routing.aux_loss

    def geometry_metrics(self) -> dict[str, float]:
        """Frame and concentration figures for `read_metrics`, where a router has them."""
        return {}

    # -- what all routers share ------------------------------------------------------------------------

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> Routing:
        checks.last_dim("x", x, self.dim)
        if token_ids is not None:
            ok = token_ids.shape == x.shape[:-1]
            checks.require(
                ok, f"token_ids must have shape {tuple(x.shape[:-1])}, got {tuple(token_ids.shape)}"
            )
        if self.checked:
            checks.all_finite("x", x)
        # Autocast would turn the projections into bf16, where near ties route differently in serving.
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(device_type=x.device.type, enabled=False):
                return self._forward(x, token_ids)
        return self._forward(x, token_ids)

    def _forward(self, x: Tensor, token_ids: Tensor | None) -> Routing:
        routing = self._fused(x)
        if routing is None:
            routing = self.route(x if x.dtype == torch.float64 else x.float(), token_ids)
        routing.aux_loss = self.losses(routing)
        self._record(routing)
        return routing

    def _wants_kernels(self) -> bool:
        return self.backend == "triton" or (self.backend == "auto" and not INTERPRETED)

    def _fused(self, x: Tensor) -> Routing | None:
        """The routing by one kernel, or None where that is not possible."""
        if not self._wants_kernels() or type(self).select is not Router.select:
            return None
        if self.alpha_value.ndim:  # one α for each sequence: the kernel knows one for all
            return None
        if not fuses(x, self.selection, self.num_experts) or (operands := self.gate_operands()) is None:
            return None
        # A router in fp64 computes in fp64, whatever the tokens are.
        if operands.matrix.dtype == torch.float64:
            return None
        packed = self._packed_operands(operands, x)
        results = attempt(
            "gate", lambda: fused_gate(x, operands, self.alpha_value, self.selection, packed), lambda: None
        )
        if results is None:
            return None
        logits, probs, weights, selected, zero = results
        return Routing(logits, probs, selected, weights, zero)

    def _packed_operands(self, operands: GateOperands, x: Tensor) -> Tensor | None:
        """The kernel's copy of frames or weights, kept in eval mode, where nobody trains them.

        `train()` forgets it, another tensor in the parameter's place is not taken for it, and a write in place
        changes the version; one through `.data` changes nothing that could be seen. Not for a graph that is being
        captured, which must see later changes, nor in inference mode, whose tensors autograd refuses.
        """
        matrix = operands.matrix
        if self.training or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return None
        if matrix.is_inference() or is_capturing(x):
            return None
        state = (matrix._version, matrix.data_ptr(), x.dtype)
        if self._packed is None or self._packed[0]() is not matrix or self._packed[1] != state:
            packed = attempt("gate", lambda: pack_operands(operands, x.dtype), lambda: None)
            self._packed = None if packed is None else (weakref.ref(matrix), state, packed)
        return None if self._packed is None else self._packed[2]

    def train(self, mode: bool = True) -> Router:
        self._packed = None
        return super().train(mode)

    def route(self, x: Tensor, token_ids: Tensor | None) -> Routing:
        logits = self.gate(x, token_ids)
        probs = torch.softmax(logits, dim=-1)
        selected = self.select(probs)
        weights = torch.where(selected, probs, 0.0)
        if self.selection.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(logits, probs, selected, weights, logits.new_zeros(()))

    @torch.no_grad()
    def _record(self, routing: Routing) -> None:
        """Add to metrics and prior sums, once a token: activation checkpointing runs the forward again."""
        # That second run happens inside the backward, which is what the graph task tells. Dynamo cannot trace it.
        if not self.record or (not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1):
            return
        keep_prior = self.balance and self.training
        if self._wants_kernels() and available(routing.probs) and not has_failed("metrics"):
            attempt("metrics", lambda: self._record_fused(routing, keep_prior), lambda: None)
            if not has_failed("metrics"):
                return
        self.metrics.update(routing.probs, routing.weights, routing.selected)
        if keep_prior:
            N, probs_TN = self.num_experts, routing.probs.reshape(-1, self.num_experts)
            # Count what the selection computes. A dense layer computes everything; there the expert that leads
            # counts, for the gate's mass can be balanced while an expert never leads and starves.
            chosen_TN = routing.selected.reshape(-1, N)
            if self.selection.dense:
                chosen_TN = probs_TN.argmax(-1, keepdim=True) == torch.arange(N, device=probs_TN.device)
            finite_T = torch.isfinite(probs_TN).all(-1)
            chosen_TN = chosen_TN & finite_T.unsqueeze(-1)
            share_TN = chosen_TN / chosen_TN.sum(-1, keepdim=True).clamp(min=1)
            tokens = finite_T.sum(0, keepdim=True)
            self.prior_sums.add_(torch.cat([share_TN.sum(0), tokens]).to(self.prior_sums.dtype))

    def _record_fused(self, routing: Routing, keep_prior: bool) -> None:
        from grmoe.kernels.metrics import record

        N, dense = self.num_experts, self.selection.dense
        probs, weights, selected = (
            t.reshape(-1, N) for t in (routing.probs, routing.weights, routing.selected)
        )
        record(probs, weights, selected, self.metrics.sums, self.prior_sums, prior=keep_prior, dense=dense)

    @torch.no_grad()
    def update_prior(self, rate: float) -> None:
        """b ← b + rate·(1 − N·load), centred; load is the share since the last call. One call a step.

        Read as the prior p(z = e) of the Bayesian gate. Without tokens since the last call nothing moves.
        """
        checks.finite("rate", rate, at_least=0)
        if not self.balance:
            return
        self.log_prior.copy_(next_log_prior(self.log_prior, self.prior_sums, rate))
        self.prior_sums.zero_()

    @property
    def alpha(self) -> float:
        """The dial. Reading it waits for the device; setting it does not."""
        return float(self.alpha_value)

    @alpha.setter
    def alpha(self, value: float) -> None:
        self.alpha_value.fill_(_dial(value))

    def read_metrics(self) -> RoutingMetrics:
        """Metrics since the last `reset_metrics`. Waits for the device."""
        return RoutingMetrics(**{**vars(self.metrics.read()), **self.geometry_metrics()})

    def reset_metrics(self) -> None:
        self.metrics.reset()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Moves between devices but stays out of half precision: frames in bf16 lose orthonormality and stall
        training, so `model.bfloat16()` leaves a router in fp32."""

        self._packed = None

        def keep_precision(t: Tensor) -> Tensor:
            out = fn(t)
            return t.to(out.device) if out.dtype in (torch.bfloat16, torch.float16) else out

        return super()._apply(keep_precision, recurse)

    def __getstate__(self) -> dict[str, Any]:
        # The packed copy is the kernel's affair, and holds a weak reference, which neither copies nor pickles.
        return {**self.__dict__, "_packed": None}

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_experts={self.num_experts}, selection={self.selection}, balance={self.balance}"


def _dial(value: float) -> float:
    """α as the buffer can hold it: finite in fp32 too."""
    checks.finite("alpha", value, at_least=0)
    checks.require(value <= torch.finfo(torch.float32).max, f"alpha must fit into fp32, got {value!r}")
    return float(value)


def next_log_prior(log_prior: Tensor, sums: Tensor, rate: float) -> Tensor:
    """One step of the balanced prior from load sums (..., N+1), the last entry being the token count."""
    tokens = sums[..., -1:]
    load = sums[..., :-1] / tokens.clamp(min=1)
    updated = log_prior + (rate * (1 - load.shape[-1] * load)).to(log_prior.dtype)
    return torch.where(tokens > 0, updated - updated.mean(-1, keepdim=True), log_prior)


@torch.no_grad()
def update_priors(found: Iterable[Router], rate: float, skip: Tensor | None = None) -> None:
    """`Router.update_prior` of many routers; those of one size and device in a few operations altogether.

    skip: a 0-d tensor; where it is one, priors stay as they are.
    """
    checks.finite("rate", rate, at_least=0)
    alike: dict[Any, list[Router]] = {}
    for router in found:
        if router.balance:
            alike.setdefault((router.num_experts, router.log_prior.device), []).append(router)
    for group in alike.values():
        priors, sums = [r.log_prior for r in group], [r.prior_sums for r in group]
        stacked = torch.stack(priors)
        updated = next_log_prior(stacked, torch.stack(sums), rate)
        if skip is not None:
            updated = torch.where(skip.bool(), stacked, updated)
        torch._foreach_copy_(priors, updated.unbind())
        torch._foreach_zero_(sums)


def linear_weight(num_experts: int, dim: int, generator: torch.Generator | None) -> nn.Parameter:
    """Gate rows N(0, 1/d): logits of order one on RMS-normed tokens."""
    return nn.Parameter(torch.randn(num_experts, dim, generator=generator) / dim**0.5)


def routers(module: nn.Module) -> list[Router]:
    """All routers inside a model, in module order (the order of its layers)."""
    return [m for m in module.modules() if isinstance(m, Router)]


def set_alpha(module: nn.Module, alpha: float | Iterable[float]) -> None:
    """Turn the dial of a whole model: one α, or one for each of its routers in layer order."""
    found = routers(module)
    checks.require(bool(found), f"module must contain a router, got {type(module).__name__} without one")
    values: list[Any] = [alpha] * len(found) if isinstance(alpha, int | float) else list(alpha)
    checks.require(len(values) == len(found), f"alpha must give {len(found)} values, got {len(values)}")
    for value in values:  # all are checked before any is set
        _dial(value)
    for router, value in zip(found, values, strict=True):
        router.alpha = value
