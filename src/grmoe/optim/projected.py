"""Adam on the entries of frames, followed by a projection: what the paper advises against, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW

from grmoe.geometry import orthonormalize
from grmoe.optim.polar import note_orthonormal


class ProjectedAdam(AdamW):
    """One step, for each frame U with gradient G (paper, "Training Objective": "the projection problem"):

        Y = U − lr · m̂ / (√v̂ + eps)      Adam, entry by entry, without weight decay
        U ← Q,  Y = QR                    the frame of the same subspace, with a positive diagonal of R

    The gradient is not projected, so moments count directions that the projection then removes. `lr` is that of
    ordinary weights. Use `GrassmannAdam` for training.
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

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss: float | None = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(orthonormalize(p))
                    note_orthonormal([p])
        return loss
