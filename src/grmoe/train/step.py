"""One optimiser step, and the search for the layer where it went wrong.

Legend: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from grmoe.optim import GrassmannAdam
from grmoe.parallel.shard import accumulate, clip_gradients, finish_gradients, sync_routers
from grmoe.parallel.world import mean, smallest
from grmoe.routing import set_alpha
from grmoe.runs.config import TrainConfig
from grmoe.train.schedule import rate_factors, set_rates
from grmoe.train.setup import Session


class NonFiniteError(RuntimeError):
    """A loss or gradient that is no number; nothing was updated by it or since."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step  # counted from zero: so many good ones were before it


@dataclass(frozen=True)
class StepResult:
    loss: float  # cross-entropy, nats a token, of all processes
    router_loss: float  # the routers' own
    overlap: float  # Σ of the overlap regulariser before its weight
    norm: float  # of the gradient, before clipping


@dataclass(frozen=True)
class Pending:
    """A step that was queued; its numbers may still be on their way from the device."""

    step: int
    batch_BS: Tensor
    numbers_4: Tensor  # of the host
    arrived: torch.cuda.Event | None


def train_step(session: Session, step: int, batch_BS: Tensor) -> Pending:
    """Forward, backward, both optimisers and the priors, on this process's sequences (B, S + 1).

    Nothing depends on the past but weights and optimiser states: randomness is a function of (seed, step, process).
    A bad step leaves the last good weights. `session.guarded`: the device sees to that, and `settle` may find out while
    it computes the next step; otherwise the host looks before anything is updated.
    """
    s, config, model = session, session.config, session.model
    factors = rate_factors(config, step)
    set_rates(s.optimizers, factors)
    if config.alpha.schedule != "constant":
        set_alpha(model, step_alpha(config, model.config.alphas, step))
    totals = torch.zeros(3, device=s.world.device)
    torch.manual_seed(_seed(config.seed, step))  # the sampled pairs are the same on all processes
    overlap = overlap_loss(session)
    totals[2] += overlap.detach()
    torch.manual_seed(_seed(config.seed, step, 1 + s.world.rank))

    parts = _to_device(batch_BS, s.world.device).split(s.micro_rows)
    for number, rows in enumerate(parts):
        accumulate(model, s.world, last=number == len(parts) - 1)
        out = s.run(s.forward, rows)
        router_loss = model.config.router_aux_loss_coef * out.aux_loss.detach()
        totals[0] += (out.loss.detach() - router_loss) / len(parts)
        totals[1] += router_loss / len(parts)
        loss = out.loss / len(parts)
        if number == 0 and overlap.requires_grad:
            loss = loss + config.routing.overlap_weight * overlap
        loss.backward()
    finish_gradients(model, s.world)
    limit = config.optim.clip or math.inf
    active = [p for p in model.parameters() if p.grad is not None]
    norm = clip_gradients(active, limit, s.world)
    numbers_4 = torch.cat([mean(s.world, totals), norm.reshape(1)])
    skip: Tensor | None = None
    if s.guarded:
        # Once bad, bad for good: steps that are queued before the host looks change nothing either.
        skip = s.bad.copy_(torch.maximum(s.bad, (~torch.isfinite(numbers_4[0] + numbers_4[3])).float()))
    pending = _send(step, batch_BS, numbers_4)
    if not s.guarded:
        settle(session, pending, step)
    for optimizer in s.optimizers:
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        optimizer.step()
    zero_grad(session)
    sync_routers(model, s.world)
    model.update_priors(config.routing.prior_rate * factors["weights"], skip)
    return pending


def settle(session: Session, pending: Pending, queued: int) -> StepResult:
    """Wait for a step's numbers; raise if they are none. `queued`: the last step that was given to the device."""
    if pending.arrived is not None:
        pending.arrived.synchronize()
    result = StepResult(*pending.numbers_4.tolist())
    if math.isfinite(result.loss + result.norm):
        return result
    if session.guarded:
        for optimizer in session.optimizers:
            if isinstance(optimizer, GrassmannAdam):
                optimizer.uncount_steps(queued - pending.step + 1)
    where = find_nonfinite(session, pending.batch_BS)
    zero_grad(session)
    text = f"loss {result.loss:g}, gradient norm {result.norm:g} at step {pending.step + 1}: {where}"
    raise NonFiniteError(text, pending.step)


def _send(step: int, batch_BS: Tensor, numbers_4: Tensor) -> Pending:
    """The numbers on their way to the host, which does not wait."""
    if not numbers_4.is_cuda:
        return Pending(step, batch_BS, numbers_4, None)
    host_4 = torch.empty(numbers_4.shape, dtype=numbers_4.dtype, pin_memory=True)
    host_4.copy_(numbers_4, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return Pending(step, batch_BS, host_4, arrived)


def _to_device(batch_BS: Tensor, device: torch.device) -> Tensor:
    # From memory that is not pinned the copy would wait for everything before it.
    return batch_BS.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch_BS


def overlap_loss(session: Session) -> Tensor:
    """Σ over layers of the overlap regulariser, before its weight."""
    routing = session.config.routing
    if not routing.overlap_weight:
        return torch.zeros((), device=session.world.device)
    pairs: Literal["auto"] | None = None if routing.overlap_pairs == "all" else "auto"
    return session.model.overlap_penalty(routing.overlap_rho, relative=True, num_pairs=pairs)


def step_alpha(config: TrainConfig, own: list[float], step: int) -> list[float]:
    """The dial of each layer at a step."""
    low, high = config.alpha.low, config.alpha.high
    if config.alpha.schedule == "anneal":
        done = step / max(1, config.steps - 1)
        return [low ** (1 - done) * a**done for a in own]
    if config.alpha.schedule == "sample":
        drawn = random.Random(f"{config.seed}/{step}").uniform(math.log(low), math.log(high))
        return [math.exp(drawn)] * len(own)
    return own


def zero_grad(session: Session) -> None:
    for optimizer in session.optimizers:
        optimizer.zero_grad(set_to_none=True)


def find_nonfinite(session: Session, batch_BS: Tensor) -> str:
    """Where NaN or Inf first appears: in the weights, else in the forward pass, else in the gradients.

    Runs the step again, uncompiled: clipping has spread a NaN over all gradients. All processes call it together and
    get the same answer, for one may find in its shards or its sequences what others do not.
    """
    model, world = session.model, session.world
    names = [name for name, _ in model.named_parameters()]

    def first_bad(tensors: list[Tensor | None]) -> int:
        bad = (i for i, t in enumerate(tensors) if t is not None and not _finite(t))
        return smallest(world, next(bad, len(tensors)))

    number = first_bad(list(model.parameters()))
    if number < len(names):
        return f"the weights {names[number]} hold NaN or Inf"

    calls: list[str] = []  # in the same order on all processes
    bad_calls: list[int] = []

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: object, output: object) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if not all(_finite(t) for t in tensors if isinstance(t, Tensor)):
                bad_calls.append(len(calls))
            calls.append(name)

        return look

    parts = ("embed_tokens", "self_attn", "mlp", "norm")
    hooks = [
        m.register_forward_hook(watch(name)) for name, m in model.named_modules() if name.endswith(parts)
    ]
    zero_grad(session)
    try:
        for rows in batch_BS.to(world.device).split(session.micro_rows):
            session.run(model, rows).loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    number = smallest(world, min(bad_calls, default=len(calls)))
    if number < len(calls):
        return f"the output of {calls[number]} holds NaN or Inf"
    # From the loss backwards.
    number = first_bad([p.grad for p in reversed(list(model.parameters()))])
    if number < len(names):
        return f"the forward pass is finite, the gradient of {names[-1 - number]} is not"
    return "every layer is finite: the loss overflowed"


def _finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(torch.isfinite(local).all())


def _seed(seed: int, step: int, stream: int = 0) -> int:
    """A different number for each, in the 64 bits a generator takes."""
    return ((seed * 10**9 + step) * 10**5 + stream) % 2**63
