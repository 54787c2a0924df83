"""Everything that follows the step number: learning rates, the rate of the balanced prior, and α.

Learning rates: linear warm-up, then cosine decay to a floor. Steps count from zero.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from grmoe.runs.config import KINDS, TrainConfig


def cosine_factor(step: int, steps: int, warmup: int, floor: float) -> float:
    """The factor on the peak rate.

    (step+1)/warmup during the warm-up, then floor + (1−floor)·(1+cos πt)/2 with t from 0 to 1 at the last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    t = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * t)) / 2


def rate_factors(config: TrainConfig, step: int) -> dict[str, float]:
    """The factor on the peak rate of each kind of parameters."""
    return {kind: cosine_factor(step, config.steps, *config.schedule(kind)) for kind in KINDS}


def describe_more_steps(old: TrainConfig | None, new: TrainConfig, step: int) -> str | None:
    """What happens to the learning rate where a resumed run has more steps than before; None where it has not."""
    if old is None or old.steps >= new.steps:
        return None
    before = old.optim.lr * rate_factors(old, max(0, step - 1))["weights"]  # at 0: a first step with NaN
    after = new.optim.lr * rate_factors(new, step)["weights"]
    return (
        f"steps raised from {old.steps} to {new.steps}: learning rates now follow the schedule of {new.steps} steps. "
        f"The weights' rate goes from {before:.3g} to {after:.3g}, then down to {new.optim.floor * new.optim.lr:.3g}"
    )


def prior_rate(config: TrainConfig, step: int) -> float:
    """η of the balanced prior: it follows the schedule of the weights."""
    return config.routing.prior_rate * rate_factors(config, step)["weights"]


def alphas_at(config: TrainConfig, model_alphas: Sequence[float], step: int) -> list[float]:
    """α of each MoE layer. `model_alphas` are those of validation and of the saved model."""
    low, high = config.alpha.low, config.alpha.high
    if config.alpha.schedule == "anneal":
        done = step / max(1, config.steps - 1)
        return [low ** (1 - done) * a**done for a in model_alphas]
    if config.alpha.schedule == "sample":
        drawn = random.Random(f"{config.seed}/{step}").uniform(math.log(low), math.log(high))
        return [math.exp(drawn)] * len(model_alphas)
    return list(model_alphas)


def remember_peaks(optimizers: Iterable[Optimizer]) -> None:
    """Note each group's rate as its peak, once. A resumed optimiser has its peaks already."""
    for group in _groups(optimizers):
        group.setdefault("peak_lr", group["lr"])


def set_rates(optimizers: Iterable[Optimizer], factors: Mapping[str, float]) -> None:
    """Set each group's rate to its peak times the factor of its kind."""
    for group in _groups(optimizers):
        group["lr"] = group["peak_lr"] * factors[group["kind"]]


def rates(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """The current rate of each kind of parameters."""
    return {group["kind"]: group["lr"] for group in _groups(optimizers)}


def _groups(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]
