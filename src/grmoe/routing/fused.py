"""Gate and selection as one kernel, where one exists.

One kernel covers gates that are a linear map or squared projections, with any selection policy of this package, on
tensors the kernels run on (`grmoe.kernels.runtime`). Other gates of such parts take several kernels (`GateParts`).
Everything else goes through `Router.route`.

Legend: T tokens, D model width, N experts, K rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grmoe import checks
from grmoe.kernels import runtime
from grmoe.routing.budget import Budget
from grmoe.routing.buffers import for_backward
from grmoe.routing.result import Routing
from grmoe.routing.selection import AtLeast, Dense, Mass, Selection, Threshold, TopK

MAX_EXPERTS = 256  # a tile of gates is kept in registers
# Methods of routers that kernels replace.
_DESCRIBED = ("gate", "noise_like", "select", "route", "scores", "energies", "amortized", "kappa")


@dataclass(frozen=True)
class GateOperands:
    """A gate's numbers for the kernel (see `grmoe.kernels.gate.gate`)."""

    matrix: Tensor
    """Frames (N, D, K), or linear weights (N, D)."""
    prior_N: Tensor
    """The log-prior."""
    log_kappa: Tensor | None = None
    """With frames: (N,) or (N, K)."""
    energy_scale: float = 1.0
    """c of the Grassmann gate."""
    posterior: bool = True
    """The dial multiplies the prior too."""

    def scaled(self, log_alpha: Tensor) -> GateOperands:
        """Times a learned α. The kernel has no gradient by α, so κ or W and the prior carry it."""
        alpha = log_alpha.exp()
        prior_N = alpha * self.prior_N
        if self.log_kappa is None:
            return replace(self, matrix=alpha * self.matrix, prior_N=prior_N)
        return replace(self, log_kappa=self.log_kappa + log_alpha, prior_N=prior_N)


@dataclass(frozen=True)
class GateParts:
    """A gate that takes several kernels: its scores from some of them, the choice from another."""

    scores: Callable[[Tensor], Tensor]
    """From tokens (..., D) in any precision to scores (..., N) in fp32, without dial and prior."""
    prior_N: Tensor
    posterior: bool = True
    """The dial multiplies the prior too."""

    def scaled(self, log_alpha: Tensor) -> GateParts:
        """Times a learned α."""
        alpha, scores = log_alpha.exp(), self.scores
        return replace(self, scores=lambda x: alpha * scores(x), prior_N=alpha * self.prior_N)


# Exact types, because a subclass may select differently.
_MODES: dict[type, int] = {
    Dense: runtime.DENSE, TopK: runtime.LARGEST, Mass: runtime.LARGEST, AtLeast: runtime.LARGEST,
    Threshold: runtime.ABOVE
}  # fmt: skip
_RULES = {"mass": runtime.MASS, "count": runtime.COUNT}
_UNITS = {"token": runtime.PER_TOKEN, "sequence": runtime.PER_SEQUENCE}


def describes_gate(router: type) -> bool:
    """Whether the `gate_operands` of a class of routers describe the gate that it computes.

    They describe the `gate`, `select` and `route` of their own class, and what these call. A subclass that overrides
    only these must not run the kernel of its base class.
    """
    depth = {name: i for i, c in reversed(list(enumerate(router.__mro__))) for name in vars(c)}
    return depth["gate_operands"] <= min(depth[name] for name in _DESCRIBED if name in depth)


def fuses(x: Tensor, selection: Selection, num_experts: int) -> bool:
    """Whether the kernel runs for these tokens, this policy and this many experts."""
    return (
        runtime.available(x)
        and num_experts <= MAX_EXPERTS
        and not runtime.has_failed("gate")
        and type(selection) in _MODES
    )


def pack_operands(operands: GateOperands, dtype: torch.dtype) -> Tensor:
    """The kernel's copy of the matrix for tokens of this dtype."""
    from grmoe.kernels.gate import pack

    matrix = operands.matrix.detach()
    return pack(_wider(matrix, torch.empty(0, dtype=dtype)), dtype, operands.log_kappa is not None)


def _wider(matrix: Tensor, like: Tensor) -> Tensor:
    """Frames (N, D, K) or weights (N, D), with zeros up to rows of whole 16 bytes for tokens like these."""
    more = runtime.missing(matrix.shape[1], like)
    return matrix if not more else pad(matrix, (0, 0, 0, more) if matrix.ndim == 3 else (0, more))


def try_fused(
    x: Tensor,
    operands_of: Callable[[], GateOperands | None],
    parts_of: Callable[[], GateParts | None],
    alpha: Tensor,
    budget: Budget,
    training: bool,
    pack: Callable[[GateOperands, Tensor], Tensor | None] | None,
) -> Routing | None:
    """Gate and selection by kernels, or None where that is not possible.

    operands_of, parts_of: the gate for one kernel, or else for several.
    pack: returns a packed copy that is kept between calls.
    """
    if not fuses(x, budget.policy, budget.num_experts):
        return None
    # Numbers per sequence: for sequences (B, S, D), and without gradients.
    if _by_row(alpha, budget) and (x.ndim != 3 or torch.is_grad_enabled()):
        return None
    operands = operands_of()
    if operands is not None:
        # A router in fp64 computes in fp64, whatever the tokens are.
        if operands.matrix.dtype == torch.float64:
            return None
        packed = None if pack is None else pack(operands, x)
        return runtime.attempt(
            "gate", lambda: fused_gate(x, operands, alpha, budget, training, packed), lambda: None
        )
    parts = parts_of()
    if parts is None or parts.prior_N.dtype == torch.float64:
        return None
    return runtime.attempt(
        "gate", lambda: fused_choice(parts.scores(x), parts, alpha, budget, training), lambda: None
    )


def _by_row(alpha: Tensor, budget: Budget) -> bool:
    single = (alpha, budget.tau, budget.cap, budget.weight_alpha)
    return budget.bias.ndim > 1 or any(t.ndim > 0 for t in single)


def fused_gate(
    x: Tensor,
    operands: GateOperands,
    alpha: Tensor,
    budget: Budget,
    training: bool = False,
    packed: Tensor | None = None,
) -> Routing:
    """Gate and selection of tokens x by one kernel."""
    from grmoe.kernels.gate import gate

    x_TD = x.reshape(-1, x.shape[-1])
    more = runtime.missing(x.shape[-1], x)  # zeros change neither products nor lengths
    results = gate(
        pad(x_TD, (0, more)) if more else x_TD,
        _wider(operands.matrix, x),
        operands.log_kappa,
        operands.prior_N,
        energy_scale=operands.energy_scale,
        posterior=operands.posterior,
        **_numbers(x, len(operands.matrix), alpha, budget, training),
        thin=not training,
        packed=packed,
    )
    return _routing(x, results)


def fused_choice(
    scores: Tensor, parts: GateParts, alpha: Tensor, budget: Budget, training: bool = False
) -> Routing:
    """Everything after the scores (..., N) by one kernel."""
    from grmoe.kernels.choose import choose

    N = scores.shape[-1]
    numbers = _numbers(scores, N, alpha, budget, training)
    results = choose(scores.reshape(-1, N), parts.prior_N, posterior=parts.posterior, **numbers)
    return _routing(scores, results)


def _numbers(x: Tensor, N: int, alpha: Tensor, budget: Budget, training: bool) -> dict[str, Any]:
    """The dial and the budget of tokens (..., D) or scores (..., N), as the kernels take them."""
    policy = budget.policy
    checks.require(budget.room <= N, f"k must be at most the number of experts {N}, got {budget.room}")
    alpha = for_backward(alpha)
    weight_alpha = for_backward(budget.weight_alpha) if budget.weighs_apart else None
    tau, cap, bias = budget.tau, budget.cap, budget.bias if budget.biased else None
    if _by_row(alpha, budget):
        alpha, tau, cap = (t.reshape(-1).expand(len(x)).contiguous() for t in (alpha, tau, cap))
        if weight_alpha is not None:
            weight_alpha = weight_alpha.reshape(-1).expand(len(x)).contiguous()
        if bias is not None:
            bias = bias.reshape(-1, N).expand(len(x), N).contiguous()
    drawn: dict[str, Any] = {}
    if budget.draws(training):
        assert budget.elastic is not None
        unit = budget.elastic.unit
        drawn = {
            "key": budget.key,
            "first_row": budget.first_row,
            "layer": 0 if unit == "step" else 1 + budget.layer,
            "elastic": _RULES[budget.elastic.rule],
            "unit": _UNITS.get(unit, runtime.PER_STEP),
        }
    return {
        "alpha": alpha,
        "weight_alpha": weight_alpha,
        "tau": tau,
        "cap": cap,
        "bias": bias,
        "mode": _MODES[type(policy)],
        "max_experts": budget.room,
        "renormalize": policy.renormalize,
        "length": x.shape[-2] if x.ndim > 2 else max(1, x[..., 0].numel()),
        **drawn,
    }


def _routing(x: Tensor, results: tuple[Tensor, ...]) -> Routing:
    *found, zero = results
    logits, probs, weights, selected = (r.view(*x.shape[:-1], r.shape[-1]) for r in found)
    return Routing(logits=logits, probs=probs, selected=selected, weights=weights, aux_loss=zero)
