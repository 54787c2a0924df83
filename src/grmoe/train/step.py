"""One optimiser step.

Legend: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grmoe.optim import GrassmannAdam, step_together
from grmoe.parallel.shard import accumulate, clip_gradients, finish_gradients, sync_routers
from grmoe.parallel.world import mean
from grmoe.train.nonfinite import find_nonfinite
from grmoe.train.objective import overlap_term
from grmoe.train.passes import forward_passes
from grmoe.train.schedule import prior_rate, rate_factors, set_rates
from grmoe.train.setup import Learner


class NonFiniteError(RuntimeError):
    """A loss or a gradient is NaN or Inf. The model is as it was before this step."""

    def __init__(self, message: str, step: int, repeats: bool = True) -> None:
        super().__init__(message)
        self.step = step  # counted from zero, so it is also the number of good steps
        self.repeats = repeats  # whether the same step gave NaN or Inf once more


@dataclass(frozen=True)
class StepResult:
    """What the log says about a step, as means over all processes."""

    loss: float
    """Cross-entropy, nats per token; with random budgets that of the drawn ones."""
    router_loss: float
    """The routers' own losses, with their coefficients."""
    divergence: float
    """From the predictions of the full budget, nats per token, before its weight. 0 without distillation."""
    overlap: float
    """Sum over layers of the overlap penalty, before its weight."""
    norm: float
    """Norm of the gradient before clipping."""


@dataclass(frozen=True)
class InFlightStep:
    """A step that was given to the device. Its numbers may not have arrived yet: `resolve` waits for them."""

    step: int
    batch_BS: Tensor
    numbers_5: Tensor  # those of `StepResult`, on the host
    arrived: torch.cuda.Event | None


def train_step(trainer: Learner, step: int, batch_BS: Tensor) -> InFlightStep:
    """Forward, backward, both optimisers and the priors, on this process's sequences (B, S + 1). Steps count from zero.

    A step depends on weights, optimiser states and (seed, step, process) alone, so that a resumed run repeats it
    exactly. A step with NaN or Inf updates nothing. With `trainer.guards_on_device` the device sees to that, and the
    host learns of it in `resolve`. Otherwise the host looks before anything is updated, and raises here.
    """
    config, model, world = trainer.config, trainer.model, trainer.world

    # Gradients of the objective, pass by pass.
    set_rates(trainer.optimizers, rate_factors(config, step))
    torch.manual_seed(_seed(config.seed, step))  # all processes sample the same pairs of experts
    overlap = overlap_term(model, config.routing)
    torch.manual_seed(_seed(config.seed, step, 1 + world.rank))
    totals_3 = torch.zeros(3, device=world.device)
    batch_on_device_BS = _to_device(batch_BS, world.device)
    for number, (loss, parts, last) in enumerate(
        forward_passes(trainer, trainer.forward, step, batch_on_device_BS)
    ):
        accumulate(model, world, last)
        if parts is not None:
            totals_3 += torch.stack(parts)
        if number == 0 and overlap.requires_grad:
            loss = loss + config.routing.overlap_weight * overlap
        loss.backward()
    finish_gradients(model, world)
    active = [p for p in model.parameters() if p.grad is not None]
    norm = clip_gradients(active, config.optim.clip or math.inf, world)

    # The numbers travel to the host while the device updates the weights.
    numbers_5 = torch.cat([mean(world, totals_3), torch.stack([overlap.detach(), norm])])
    skip: Tensor | None = None
    if trainer.guards_on_device:
        # Once set it stays set, so that steps that are queued before the host looks change nothing either.
        is_bad = ~torch.isfinite(numbers_5[0] + numbers_5[4])
        skip = trainer.found_inf.copy_(torch.maximum(trainer.found_inf, is_bad.float()))
    in_flight = _send(step, batch_BS, numbers_5)
    if not trainer.guards_on_device:
        resolve(trainer, in_flight, step)

    # Updates.
    for optimizer in trainer.optimizers:
        optimizer.found_inf = skip  # type: ignore[attr-defined]
    step_together(trainer.optimizers)
    trainer.zero_grad()
    sync_routers(model, world)
    model.update_priors(prior_rate(config, step), skip)
    return in_flight


def resolve(trainer: Learner, in_flight: InFlightStep, newest: int) -> StepResult:
    """Wait for a step's numbers. Raises `NonFiniteError` if they are NaN or Inf.

    `newest` is the last step that was given to the device.
    """
    if in_flight.arrived is not None:
        in_flight.arrived.synchronize()
    result = StepResult(*in_flight.numbers_5.tolist())
    if math.isfinite(result.loss + result.norm):
        return result
    if trainer.guards_on_device:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, GrassmannAdam):
                optimizer.uncount_steps(newest - in_flight.step + 1)
    where = find_nonfinite(trainer, in_flight.step, in_flight.batch_BS)
    trainer.zero_grad()
    text = f"loss {result.loss:g}, gradient norm {result.norm:g} at step {in_flight.step + 1}: "
    text += where or "the same step, run once more, is finite"
    raise NonFiniteError(text, in_flight.step, repeats=where is not None)


def _send(step: int, batch_BS: Tensor, numbers_5: Tensor) -> InFlightStep:
    """Start copying the numbers to the host, without waiting."""
    if not numbers_5.is_cuda:
        return InFlightStep(step, batch_BS, numbers_5, None)
    host_5 = torch.empty(numbers_5.shape, dtype=numbers_5.dtype, pin_memory=True)
    host_5.copy_(numbers_5, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return InFlightStep(step, batch_BS, host_5, arrived)


def _to_device(batch_BS: Tensor, device: torch.device) -> Tensor:
    # A copy from memory that is not pinned would wait for all work before it.
    return batch_BS.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch_BS


def _seed(seed: int, step: int, stream: int = 0) -> int:
    """A different number for each combination, within the 64 bits of a generator's seed."""
    return ((seed * 10**9 + step) * 10**5 + stream) % 2**63
