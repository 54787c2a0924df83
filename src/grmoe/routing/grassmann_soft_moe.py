"""Grassmannian Soft MoE: Soft MoE's slots, mixed by subspace energies.

    L_s(x) = κ_s · (d/k)·‖U_sᵀx‖²/‖x‖²,      slot ← Σ_t softmax_t(L)·x_t,      y_t = Σ_s softmax_s(αL)·f_e(s)(slot_s)

The paper names the combination (appendix "Comparison with Soft MoE") and leaves it open.

Legend: T tokens of a sequence, N experts, P slots per expert, S = N·P slots, D model width d, K rank k of a slot.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from grmoe import checks, geometry
from grmoe.routing.frames import FrameRouter
from grmoe.routing.soft_moe import SlotRouter

# Floor of ‖x‖²: energies of shorter tokens fade to zero. All logits of a zero token (padding) are zero.
_ZERO_TOKEN = 1e-12


class GrassmannSoftMoERouter(FrameRouter, SlotRouter):
    """Every slot owns a subspace of rank `slot_rank` and a concentration κ.

    The subspace belongs to the slot and not to the expert, because slots of one expert with a common subspace would
    compute the same mean. The factor d/k gives random subspaces a mean energy of one, as in `GrassmannRouter`.

    slot_rank: k. With rank one the router has as many parameters as Soft MoE, and one κ per slot more. The gate costs
        k times as much as that of Soft MoE.
    kappa: initial concentration, κ > 0.
    slots, max_tokens: see `SlotRouter`. There is no prior: it would cancel in the mean over tokens. A model's overlap
        penalty leaves slots alone, because as many slots as tokens do not fit apart into d dimensions.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        slot_rank: int = 1,
        kappa: float = 1.5,
        generator: torch.Generator | None = None,
        **router: Any,
    ) -> None:
        super().__init__(dim, num_experts, **router)
        self.rank = checks.positive_int("slot_rank", slot_rank)
        checks.require(slot_rank <= dim, f"slot_rank must be at most dim = {dim}, got {slot_rank}")
        total = num_experts * self.slots
        self.frames = nn.Parameter(geometry.haar_frames(dim, slot_rank, total, generator=generator))
        self.log_kappa = nn.Parameter(torch.full((total,), math.log(checks.finite("kappa", kappa, above=0))))

    def slot_logits(self, x: Tensor) -> Tensor:
        frames, kappa = self.frames.to(x.dtype), self.kappa.to(x.dtype)
        if (used := self.slots_for(x.shape[-2])) < self.slots:
            shape = (self.num_experts, self.slots)
            frames, kappa = (t.unflatten(0, shape)[:, :used].flatten(0, 1) for t in (frames, kappa))
        S, D, K = frames.shape
        squares = (x @ frames.permute(1, 0, 2).reshape(D, S * K)).square().unflatten(-1, (S, K)).sum(-1)
        return kappa * (D / K) * squares / x.square().sum(-1, keepdim=True).clamp(min=_ZERO_TOKEN)

    def geometry_figures(self) -> dict[str, Tensor]:
        frames = self.frames.float()
        overlap_SS = geometry.overlap(frames)
        return {
            "max_overlap": (overlap_SS - overlap_SS.diagonal().diag()).max() / self.rank,
            "orthonormality_error": geometry.orthonormality_error(frames),
            "kappa_min": self.kappa.min(),
            "kappa_max": self.kappa.max(),
        }

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, slots={self.slots}, slot_rank={self.rank}"


def grassmann_soft_moe_reference(
    x_TD: Tensor, frames_SDK: Tensor, kappa_S: Tensor, *, alpha: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The specification, by loops in fp64: (weights of tokens in slots, weights of slots in tokens), (T, S) each."""
    x, U, kappa = x_TD.double(), frames_SDK.double(), kappa_S.double()
    (T, D), (S, _, K) = x.shape, U.shape
    L = torch.empty(T, S, dtype=torch.float64)
    for t in range(T):
        for s in range(S):
            inside = U[s].T @ x[t]
            L[t, s] = kappa[s] * D / K * (inside @ inside) / (x[t] @ x[t])
    to_slots, from_slots = torch.empty_like(L), torch.empty_like(L)
    for s in range(S):
        to_slots[:, s] = L[:, s].exp() / L[:, s].exp().sum()
    for t in range(T):
        from_slots[t] = (alpha * L[t]).exp() / (alpha * L[t]).exp().sum()
    return to_slots, from_slots
