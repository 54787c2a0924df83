"""Adam on a matrix without constraints. The frame of its QR is the parameter. For comparison with `GrassmannAdam`.

Legend: A (..., d, k) a matrix of full rank, U (..., d, k) its frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from grmoe.geometry import orthonormalize


class QRAdam(AdamW):
    """The QR parametrisation U = Q(A), A = QR with a positive diagonal of R. One step, for each frame with gradient G:

        H = (∂Q/∂A)ᵀ G                    the gradient by A, from the gradient G by U
        A ← A − lr · m̂ / (√v̂ + eps)      Adam on H, entry by entry, without weight decay
        U ← Q(A)

    This is QR in the forward pass and AdamW on A. Here the optimiser does both, so the model and its checkpoints have
    plain frames, and QR runs once per step and not once per forward pass. A starts at U and is part of the state, as
    `matrix`. Where gradients are clipped, their norm is that of G.

    H is orthogonal to A, so A grows with every step, and later steps turn the subspace less. `lr` is that of ordinary
    weights. Use `GrassmannAdam` for training.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=fused)

    @staticmethod
    def initial_state(p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        moments = {name: torch.zeros_like(p, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros(()), **moments, "matrix": p.detach().clone()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in active:
            A = self.state[p].get("matrix", p) if p in self.state else p
            p.grad = gradient_by_matrix(A, p.grad)
            p.copy_(A)
        super().step()
        for p in active:
            self.state[p]["matrix"] = p.detach().clone()
            p.copy_(orthonormalize(p))
        return loss


def gradient_by_matrix(A: Tensor, G: Tensor) -> Tensor:
    """∂L/∂A from G = ∂L/∂U for U = Q(A): the backward pass of QR."""
    with torch.enable_grad():
        A = A.detach().clone().requires_grad_()
        (found,) = torch.autograd.grad(orthonormalize(A), A, G)
    return found
