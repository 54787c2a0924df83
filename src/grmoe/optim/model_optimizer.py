"""AdamW and `GrassmannAdam` as one optimiser, for loops that take one: transformers' Trainer, accelerate, Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from grmoe.optim.grassmann_adam import GrassmannAdam
from grmoe.optim.parameters import optimizer_groups
from grmoe.optim.together import step_together


class ModelOptimizer(Optimizer):
    """Trains a whole model: subspaces by `GrassmannAdam`, so that they stay orthonormal, all else by AdamW.

        Trainer(model=model, args=args, optimizers=(grmoe.ModelOptimizer(model, lr=3e-4), None))

    The None lets the Trainer make its usual schedule, which scales all learning rates. Its own `learning_rate` and
    `weight_decay` are not used.

    lr, betas, eps: of the weights. weight_decay: of matrices. frames_lr: lr·√(d·k) by default, for d × k frames; they
    have `GrassmannAdam`'s own betas and eps. kappa_lr: lr by default.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        frames_lr: float | None = None,
        kappa_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        groups, frames = optimizer_groups(model, lr, weight_decay, frames_lr, kappa_lr)
        self._parts: list[Optimizer] = [AdamW(groups, lr=lr, betas=betas, eps=eps)] if groups else []
        self._parts += [GrassmannAdam(frames)] if frames else []
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only at the start: a later group would belong to neither part, and would never be trained."""
        if any(part.state is self.state for part in self._parts):
            raise ValueError(
                "a ModelOptimizer takes no more groups: make a new one after requires_grad_(True)"
            )
        super().add_param_group(param_group)

    def _share(self) -> None:
        """The parts use the groups and the state of the whole: a schedule and a checkpoint then see all of them."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()
        for part in self._parts:  # each prepares what was loaded for it
            own = {
                p: self.state[p] for group in part.param_groups for p in group["params"] if p in self.state
            }
            part.__setstate__({"state": own, "param_groups": part.param_groups})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step_together(self._parts)
        return loss
