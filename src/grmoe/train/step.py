"""One optimiser step.

Legend: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grmoe.optim import GrassmannAdam
from grmoe.parallel.shard import accumulate, clip_gradients, finish_gradients, sync_routers
from grmoe.parallel.world import mean
from grmoe.routing import set_alpha
from grmoe.train.nonfinite import find_nonfinite
from grmoe.train.objective import micro_batch_loss, overlap_term
from grmoe.train.schedule import alphas_at, prior_rate, rate_factors, set_rates
from grmoe.train.setup import Trainer


class NonFiniteError(RuntimeError):
    """A loss or a gradient is NaN or Inf. The model is as it was before this step."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step  # counted from zero, so it is also the number of good steps


@dataclass(frozen=True)
class StepResult:
    """What the log says about a step, as means over all processes."""

    loss: float
    """Cross-entropy, nats per token."""
    router_loss: float
    """The routers' own losses, with their coefficients."""
    overlap: float
    """Sum over layers of the overlap penalty, before its weight."""
    norm: float
    """Norm of the gradient before clipping."""


@dataclass(frozen=True)
class InFlightStep:
    """A step that was given to the device. Its numbers may not have arrived yet: `resolve` waits for them."""

    step: int
    batch_BS: Tensor
    numbers_4: Tensor  # those of `StepResult`, on the host
    arrived: torch.cuda.Event | None


def train_step(trainer: Trainer, step: int, batch_BS: Tensor) -> InFlightStep:
    """Forward, backward, both optimisers and the priors, on this process's sequences (B, S + 1). Steps count from zero.

    A step depends on weights, optimiser states and (seed, step, process) alone, so that a resumed run repeats it
    exactly. A step with NaN or Inf updates nothing. With `trainer.guards_on_device` the device sees to that, and the
    host learns of it in `resolve`. Otherwise the host looks before anything is updated, and raises here.
    """
    config, model, world = trainer.config, trainer.model, trainer.world

    # Schedules.
    set_rates(trainer.optimizers, rate_factors(config, step))
    if config.alpha.schedule != "constant":
        set_alpha(model, alphas_at(config, model.config.alphas, step))

    # Gradients of the objective, micro-batch by micro-batch.
    torch.manual_seed(_seed(config.seed, step))  # all processes sample the same pairs of experts
    overlap = overlap_term(model, config.routing)
    torch.manual_seed(_seed(config.seed, step, 1 + world.rank))
    micro_batches = _to_device(batch_BS, world.device).split(trainer.micro_rows)
    totals_3 = torch.zeros(3, device=world.device)
    for number, rows in enumerate(micro_batches):
        accumulate(model, world, last=number == len(micro_batches) - 1)
        output = trainer.run(trainer.forward, rows)
        loss, parts = micro_batch_loss(output, overlap, config.routing, number, len(micro_batches))
        totals_3 += torch.stack(parts)
        loss.backward()
    finish_gradients(model, world)
    active = [p for p in model.parameters() if p.grad is not None]
    norm = clip_gradients(active, config.optim.clip or math.inf, world)

    # The numbers travel to the host while the device updates the weights.
    numbers_4 = torch.cat([mean(world, totals_3), norm.reshape(1)])
    skip: Tensor | None = None
    if trainer.guards_on_device:
        # Once set it stays set, so that steps that are queued before the host looks change nothing either.
        is_bad = ~torch.isfinite(numbers_4[0] + numbers_4[3])
        skip = trainer.found_inf.copy_(torch.maximum(trainer.found_inf, is_bad.float()))
    in_flight = _send(step, batch_BS, numbers_4)
    if not trainer.guards_on_device:
        resolve(trainer, in_flight, step)

    # Updates.
    for optimizer in trainer.optimizers:
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        optimizer.step()
    trainer.zero_grad()
    sync_routers(model, world)
    model.update_priors(prior_rate(config, step), skip)
    return in_flight


def resolve(trainer: Trainer, in_flight: InFlightStep, newest: int) -> StepResult:
    """Wait for a step's numbers. Raises `NonFiniteError` if they are NaN or Inf.

    `newest` is the last step that was given to the device.
    """
    if in_flight.arrived is not None:
        in_flight.arrived.synchronize()
    result = StepResult(*in_flight.numbers_4.tolist())
    if math.isfinite(result.loss + result.norm):
        return result
    if trainer.guards_on_device:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, GrassmannAdam):
                optimizer.uncount_steps(newest - in_flight.step + 1)
    where = find_nonfinite(trainer, in_flight.batch_BS)
    trainer.zero_grad()
    text = f"loss {result.loss:g}, gradient norm {result.norm:g} at step {in_flight.step + 1}: {where}"
    raise NonFiniteError(text, in_flight.step)


def _send(step: int, batch_BS: Tensor, numbers_4: Tensor) -> InFlightStep:
    """Start copying the numbers to the host, without waiting."""
    if not numbers_4.is_cuda:
        return InFlightStep(step, batch_BS, numbers_4, None)
    host_4 = torch.empty(numbers_4.shape, dtype=numbers_4.dtype, pin_memory=True)
    host_4.copy_(numbers_4, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return InFlightStep(step, batch_BS, host_4, arrived)


def _to_device(batch_BS: Tensor, device: torch.device) -> Tensor:
    # A copy from memory that is not pinned would wait for all work before it.
    return batch_BS.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch_BS


def _seed(seed: int, step: int, stream: int = 0) -> int:
    """A different number for each combination, within the 64 bits of a generator's seed."""
    return ((seed * 10**9 + step) * 10**5 + stream) % 2**63
