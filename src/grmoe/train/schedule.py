"""Learning rates over time: linear warm-up, then cosine decay to a floor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from grmoe.runs.config import KINDS, TrainConfig


def cosine_factor(step: int, steps: int, warmup: int, floor: float) -> float:
    """What multiplies the peak rate at a step, counted from zero.

    (step+1)/warmup while warming up; then floor + (1−floor)·(1+cos πt)/2 with t from 0 to 1 at the last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    t = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * t)) / 2


def rate_factors(config: TrainConfig, step: int) -> dict[str, float]:
    """The factor on the peak rate of each kind of parameters at a step, counted from zero."""
    return {kind: cosine_factor(step, config.steps, *config.schedule(kind)) for kind in KINDS}


def remember_peaks(optimizers: Iterable[Optimizer]) -> None:
    """Note each group's rate as its peak, once: a resumed optimiser brings its own."""
    for group in _groups(optimizers):
        group.setdefault("peak_lr", group["lr"])


def set_rates(optimizers: Iterable[Optimizer], factors: Mapping[str, float]) -> None:
    """Every group at its kind's share of its peak."""
    for group in _groups(optimizers):
        group["lr"] = group["peak_lr"] * factors[group["kind"]]


def rates(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """The present rate of each kind of parameters."""
    return {group["kind"]: group["lr"] for group in _groups(optimizers)}


def _groups(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]
