"""What routers with frames share: concentrations, and frames that stay orthonormal whatever trains them."""

from __future__ import annotations

import warnings
from typing import Self

from torch import Tensor, nn

from grmoe import geometry
from grmoe.optim.polar import repair, take_note
from grmoe.routing.base import Router

# max|UᵀU − I| from which frames have left their manifold. `GrassmannAdam` keeps it below 1e-6.
_OFF_MANIFOLD = 1e-5
_FOREIGN_OPTIMIZER = (
    "an optimiser moved the experts' subspaces off their manifold; they were made orthonormal again. "
    "grmoe's own keeps them there: Trainer(..., optimizers=(grmoe.ModelOptimizer(model, lr=3e-4), None))"
)


class FrameRouter(Router):
    """A router with orthonormal `frames` (..., d, k) and the logarithms of their concentrations, `log_kappa`."""

    frames: nn.Parameter
    log_kappa: nn.Parameter

    @property
    def kappa(self) -> Tensor:
        """Concentrations, one per frame or one per column of a frame."""
        return self.log_kappa.exp()

    def train(self, mode: bool = True) -> Self:
        """As of any module. Called again while training, it retracts frames that an optimiser has moved.

        transformers' Trainer calls it before each step, so that its AdamW trains subspaces too.
        """
        if mode and self.training:
            self.retract()
        super().train(mode)
        return self

    def retract_if_moved(self) -> None:
        """`retract`, unless an optimiser that keeps frames orthonormal was the last to move them, or none moves them.
        Otherwise it reads the device."""
        frames = self._parameters.get("frames")  # none where another parameter gives the frames
        if frames is not None and frames.requires_grad and not take_note(frames):
            self.retract()

    def retract(self) -> None:
        """Make frames orthonormal again where an optimiser other than `GrassmannAdam` moved them, and warn.

        Reads the device. Sharded frames are left alone.
        """
        frames = self.frames.detach()
        if (
            frames.is_meta
            or type(frames) is not Tensor
            or geometry.orthonormality_error(frames) <= _OFF_MANIFOLD
        ):
            return
        repair(frames)
        warnings.warn(_FOREIGN_OPTIMIZER, stacklevel=1)  # one place, so it is shown once
