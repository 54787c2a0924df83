"""Gate and selection as one kernel, where one exists.

It covers gates that are a linear map or squared projections, with any selection policy of this package, on tensors the
kernels run on (`grmoe.kernels.runtime`). Everything else goes through `Router.route`.

Legend: T tokens, D model width, N experts, K rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grmoe import checks
from grmoe.kernels import runtime
from grmoe.routing.result import Routing
from grmoe.routing.selection import Dense, Mass, Selection, Threshold, TopK

MAX_EXPERTS = 256  # a tile of gates is kept in registers


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


def _selection_rule(selection: Selection, num_experts: int) -> tuple[int, int, float] | None:
    """(mode, largest number of experts, limit) for the kernel; None for a policy it does not know."""
    count = selection.max_experts(num_experts)
    # Exact types, because a subclass may select differently.
    if type(selection) is Dense:
        return runtime.DENSE, count, 0.0
    if type(selection) is TopK:
        checks.require(
            count <= num_experts, f"k must be at most the number of experts {num_experts}, got {count}"
        )
        return runtime.LARGEST, count, 2.0  # no mass reaches 2: the count decides
    if type(selection) is Mass:
        return runtime.LARGEST, count, selection.tau
    if type(selection) is Threshold:
        return runtime.ABOVE, count, selection.minimum
    return None


def fuses(x: Tensor, selection: Selection, num_experts: int) -> bool:
    """Whether the kernel runs for these tokens, this policy and this many experts."""
    return (
        runtime.runs_on(x)
        and num_experts <= MAX_EXPERTS
        and not runtime.has_failed("gate")
        and _selection_rule(selection, num_experts) is not None
    )


def pack_operands(operands: GateOperands, dtype: torch.dtype) -> Tensor:
    """The kernel's copy of the matrix for tokens of this dtype."""
    from grmoe.kernels.gate import pack

    return pack(operands.matrix.detach(), dtype, operands.log_kappa is not None)


def try_fused(
    x: Tensor,
    operands_of: Callable[[], GateOperands | None],
    alpha: Tensor,
    selection: Selection,
    num_experts: int,
    pack: Callable[[GateOperands, Tensor], Tensor | None] | None,
) -> Routing | None:
    """`fused_gate`, or None where that is not possible. pack: returns a packed copy that is kept between calls."""
    # The kernel takes one α for all tokens. A router in fp64 computes in fp64, whatever the tokens are.
    if alpha.ndim or not fuses(x, selection, num_experts):
        return None
    operands = operands_of()
    if operands is None or operands.matrix.dtype == torch.float64:
        return None
    packed = None if pack is None else pack(operands, x)
    return runtime.attempt("gate", lambda: fused_gate(x, operands, alpha, selection, packed), lambda: None)


def fused_gate(
    x: Tensor, operands: GateOperands, alpha: Tensor, selection: Selection, packed: Tensor | None = None
) -> Routing:
    """Gate and selection of tokens x by one kernel."""
    from grmoe.kernels.gate import gate

    rule = _selection_rule(selection, len(operands.matrix))
    assert rule is not None
    mode, max_experts, limit = rule
    shape = (*x.shape[:-1], len(operands.matrix))
    *results, zero = gate(
        x.reshape(-1, x.shape[-1]),
        operands.matrix,
        operands.log_kappa,
        operands.prior_N,
        alpha,
        energy_scale=operands.energy_scale,
        posterior=operands.posterior,
        mode=mode,
        max_experts=max_experts,
        limit=limit,
        renormalize=selection.renormalize,
        packed=packed,
    )
    logits, probs, weights, selected = (r.view(shape) for r in results)
    return Routing(logits=logits, probs=probs, selected=selected, weights=weights, aux_loss=zero)
