"""The forward passes of a step: which sequences, at which α, with which budgets.

Legend: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from grmoe.routing import FULL, set_alpha, set_draw, step_key, uncounted
from grmoe.runs.config import TrainConfig
from grmoe.train.objective import LossParts, loss_parts, model_loss, target_weights, weighted_loss
from grmoe.train.schedule import alphas_at
from grmoe.train.setup import Learner


def forward_passes(
    trainer: Learner, forward: Callable[..., Any], step: int, batch_BS: Tensor
) -> Iterator[tuple[Tensor, LossParts | None, bool]]:
    """(its part of the objective, what is logged, whether it is the last) of every pass over the sequences of a step.

    forward: the model, compiled or not. Run the backward of a pass before the next pass: activation checkpointing
    computes it again, with the numbers that routers hold then.

    With distillation a micro-batch has two passes, first with the full budget and then with the drawn one. The first
    is not logged, and routers do not count it.
    """
    config, model, world = trainer.config, trainer.model, trainer.world
    if config.alpha.schedule != "constant":
        set_alpha(model, alphas_at(config, model.config.alphas, step))
    key = _key(config, step)
    distills = computes_twice(config, step)
    micro_batches = batch_BS.split(trainer.micro_rows)
    count, coefficient = len(micro_batches), model.config.router_aux_loss_coef
    # Without context all micro-batches have as many targets, and nothing is weighted.
    weights = target_weights(micro_batches, world) if trainer.masked else [None] * count
    for number, (rows_BS, weight) in enumerate(zip(micro_batches, weights, strict=True)):
        first_row = world.rank * trainer.rows + number * trainer.micro_rows
        teacher = None
        if distills:
            set_draw(model, FULL, first_row)
            with uncounted(model):
                full = trainer.run(forward, rows_BS, return_hidden=True)
            teacher = full.last_hidden_state
            yield weighted_loss(full, weight, coefficient) / (2 * count), None, False
        if config.elastic.on:
            set_draw(model, key, first_row)
        output = trainer.run(forward, rows_BS, **({"teacher": teacher} if distills else {}))
        loss = model_loss(weighted_loss(output, weight, coefficient), output, config.elastic.distill, weight)
        yield loss / count, loss_parts(output, count, weight), number == count - 1


def computes_twice(config: TrainConfig, step: int) -> bool:
    """Whether a step distills. One with the full budget has nothing to learn from itself."""
    return config.elastic.distill > 0 and _key(config, step) != FULL


def _key(config: TrainConfig, step: int) -> int:
    """What the budgets of a step are drawn from."""
    return step_key(config.seed, step, config.elastic.full_share) if config.elastic.on else FULL


def flops_per_token(trainer: Learner, steps: range, experts_per_token: float) -> float:
    """FLOPs that the forward and backward passes of these steps needed, per token of text.

    experts_per_token: what the routers counted in these steps, the mean over layers. They do not count the first pass
    of a step that distills: it has the full budget (an upper bound with "mass"). Arithmetic done twice to save memory,
    for instance by activation checkpointing, does not count.
    """
    twice = sum(computes_twice(trainer.config, step) for step in steps) / len(steps)
    return trainer.cost.train_flops_at(experts_per_token) + twice * trainer.cost.train_flops
