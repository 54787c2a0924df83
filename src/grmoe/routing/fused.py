"""A router's whole forward as one kernel, where there is one for it.

Covers gates that are a linear map or squared projections, with any selection policy of this package, on tensors the
kernels run on (`grmoe.kernels.runtime`). Everything else goes through `Router.route`.

Legend: T tokens, D model width, N experts, K rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grmoe import checks
from grmoe.kernels import runtime
from grmoe.routing.selection import Dense, Mass, Selection, Threshold, TopK

MOST_EXPERTS = 256  # a tile of gates is kept in registers


@dataclass(frozen=True)
class GateOperands:
    """What the kernel needs of a gate (see `grmoe.kernels.gate.gate`)."""

    matrix: Tensor  # frames (N, D, K), or linear weights (N, D)
    prior_N: Tensor
    log_kappa: Tensor | None = None  # (N,) or (N, K) with frames
    energy_scale: float = 1.0
    posterior: bool = True  # the dial multiplies the prior too


def selection_rule(selection: Selection, num_experts: int) -> tuple[int, int, float] | None:
    """(mode, most experts, limit) in the kernel's terms; None for a policy it does not know."""
    most = selection.most(num_experts)
    # Exact types: a subclass may choose otherwise.
    if type(selection) is Dense:
        return runtime.DENSE, most, 0.0
    if type(selection) is TopK:
        checks.require(
            most <= num_experts, f"k must be at most the number of experts {num_experts}, got {most}"
        )
        return runtime.LARGEST, most, 2.0  # a mass never reached: the count decides
    if type(selection) is Mass:
        return runtime.LARGEST, most, selection.tau
    if type(selection) is Threshold:
        return runtime.ABOVE, most, selection.minimum
    return None


def fuses(x: Tensor, selection: Selection, num_experts: int) -> bool:
    return (
        runtime.runs_on(x)
        and num_experts <= MOST_EXPERTS
        and not runtime.has_failed("gate")
        and selection_rule(selection, num_experts) is not None
    )


def pack_operands(operands: GateOperands, dtype: torch.dtype) -> Tensor:
    """The kernel's copy of the matrix for tokens of this dtype."""
    from grmoe.kernels.gate import pack

    return pack(operands.matrix.detach(), dtype, operands.log_kappa is not None)


def fused_gate(
    x: Tensor, operands: GateOperands, alpha: Tensor, selection: Selection, packed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(logits, probs, weights, selected), shaped as x with its last dimension replaced by N, and a zero."""
    from grmoe.kernels.gate import gate

    rule = selection_rule(selection, len(operands.matrix))
    assert rule is not None
    mode, most, limit = rule
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
        most=most,
        limit=limit,
        renormalize=selection.renormalize,
        packed=packed,
    )
    logits, probs, weights, selected = (r.view(shape) for r in results)
    return logits, probs, weights, selected, zero
