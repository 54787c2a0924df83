"""Merge experts: match their hidden units first, then average the weights.

An expert is a sum over hidden units r, f(x) = Σ_r d_r·act(x)_r. Its function does not depend on the order of the units.
With SwiGLU, act(x)_r = silu(g_rᵀx)·u_rᵀx, it does not depend on the sign of (u_r, d_r) either. Both must be aligned
before weights are averaged.

Legend: E experts, H model width, I expert width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grmoe.experts import ExpertWeights


@dataclass(frozen=True)
class Match:
    """Unit order_I[r] of the other expert, times sign_I[r], matches unit r of the first."""

    order_I: Tensor
    sign_I: Tensor


def match_units(experts: ExpertWeights, first: int, other: int) -> Match:
    """The order and signs that bring the weights of `other` nearest to those of `first`.

    Minimising Σ_r ‖unit_r − sign·unit'_order(r)‖² maximises Σ_r ⟨unit_r, sign·unit'⟩. That is an assignment problem.
    Its gains are inner products of gate row, up row and down column, the last two with the better sign.
    """
    from scipy.optimize import linear_sum_assignment

    up_EJH, down_EHI = experts.up.detach(), experts.down_proj.detach()
    a, b = up_EJH[first].float(), up_EJH[other].float()
    down_II = down_EHI[first].float().mT @ down_EHI[other].float()
    if experts.activation == "swiglu":
        I = experts.hidden
        signed_II = a[I:] @ b[I:].mT + down_II
        gain_II = a[:I] @ b[:I].mT + signed_II.abs()
    else:
        gain_II = a @ b.mT + down_II
        signed_II = torch.ones_like(gain_II)
    rows, order = linear_sum_assignment(gain_II.cpu().numpy(), maximize=True)
    order_I = torch.from_numpy(order).to(a.device)
    sign_I = torch.where(signed_II[torch.from_numpy(rows).to(a.device), order_I] < 0, -1.0, 1.0)
    return Match(order_I, sign_I)


def average(
    experts: ExpertWeights, members: Sequence[int], weights: Sequence[float], matches: Sequence[Match]
) -> tuple[Tensor, Tensor]:
    """The weighted mean of experts in fp32, with the units of members[0] in place.

    matches: of members[1:] to members[0].
    """
    up, down = (weights[0] * t[members[0]].detach().float() for t in (experts.up, experts.down_proj))
    for e, weight, match in zip(members[1:], weights[1:], matches, strict=True):
        other = experts.up[e].detach().float()
        if experts.activation == "swiglu":
            gate, linear = other.chunk(2)
            other = torch.cat([gate[match.order_I], match.sign_I[:, None] * linear[match.order_I]])
        else:
            other = other[match.order_I]
        up = up + weight * other
        down = down + weight * match.sign_I * experts.down_proj[e].detach().float()[:, match.order_I]
    return up, down


def resized(experts: ExpertWeights, up_EJH: Tensor, down_EHI: Tensor) -> ExpertWeights:
    """A copy of the module with these weights, and as many experts as they have."""
    # The memo keeps deepcopy from copying parameters that are replaced below.
    small = copy.deepcopy(experts, {id(p): p for p in experts.parameters()})
    setattr(small, small.up_name, nn.Parameter(up_EJH, requires_grad=False))
    small.down_proj = nn.Parameter(down_EHI, requires_grad=False)
    if hasattr(small, "num_experts"):  # the Hugging Face model's class has it
        setattr(small, "num_experts", len(down_EHI))  # noqa: B010
    return small


@torch.no_grad()
def outputs(experts: ExpertWeights, x_TD: Tensor) -> Tensor:
    """f_e(x) of every expert on every token, (E, T, H) in fp32."""
    weights = zip(experts.up, experts.down_proj, strict=True)
    return torch.stack([(experts.activate(x_TD @ up.T) @ down.T).float() for up, down in weights])
