"""The training loop."""

from __future__ import annotations

import contextlib
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from grmoe.parallel.shard import sync_metrics
from grmoe.parallel.world import World, any_process, start, stop
from grmoe.runs.checkpoint import Checkpoint, CheckpointError, Checkpoints
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import checkpoints_of, data_checksum, discard_start, find_start, open_folder
from grmoe.runs.lock import lock_folder
from grmoe.runs.state import gather, restore
from grmoe.train.first_frames import frames_from_first_batch
from grmoe.train.interrupt import Clock, Forecast, Signals
from grmoe.train.log import Logger, check_loggers, heads_line, open_logger, routing_line
from grmoe.train.nonfinite import find_bad_state
from grmoe.train.passes import flops_per_token
from grmoe.train.schedule import describe_more_steps, rates
from grmoe.train.setup import Trainer, build_trainer, load_start
from grmoe.train.step import InFlightStep, NonFiniteError, StepResult, resolve, train_step
from grmoe.train.validate import Validation, validate


class TrainingStopped(RuntimeError):
    """The run ended before its last step. It can continue from its last checkpoint."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status  # for the shell


@dataclass(frozen=True)
class Outcome:
    folder: Path
    checkpoint: Checkpoint
    validation: Validation | None
    """None if the run was already finished."""


def train(config: TrainConfig, resume: bool = False) -> Outcome:
    """Train from the configuration, or continue from the run's last checkpoint (bit for bit on a CPU)."""
    world = start(config.parallel, config.device)
    try:
        with lock_folder(Path(config.out), world):
            return _train(config, resume, world)
    except BaseException as error:
        if world.joined:
            stop()  # so that the others do not wait for this process
        if world.mesh is None or not (isinstance(error, RuntimeError) and _lost_process(error)):
            raise
        last = checkpoints_of(Path(config.out), config).latest()
        kept = "There is no checkpoint yet." if last is None else f"The last checkpoint is {last.path}."
        raise LostProcessError(
            f"process {world.rank}: another process of the run ended or cannot be reached. Its own output says why. "
            f"{kept}\nContinue with: grmoe train --resume out={quote(config.out)}"
        ) from error


class LostProcessError(RuntimeError):
    """Another process of a parallel run is gone."""

    status = 1


def _lost_process(error: RuntimeError) -> bool:
    """By what torch.distributed says: an error of its own, or gloo's texts, which come as a plain RuntimeError."""
    texts = ("gloo/transport", "Connection reset by peer", "Connection closed by peer")
    return isinstance(error, torch.distributed.DistError) or any(text in str(error) for text in texts)


def _train(config: TrainConfig, resume: bool, world: World) -> Outcome:
    """Build everything, restore the last checkpoint if there is one, and run the loop."""
    config, begin, saved = find_start(config, resume)
    check_loggers(config)
    trainer = build_trainer(config, world)
    checkpoints = checkpoints_of(Path(config.out), config)
    data = data_checksum(trainer.data.folder)
    if begin is None:
        if config.start_from is None:
            frames_from_first_batch(trainer)
        else:
            load_start(trainer, config.start_from)
    else:
        if begin.meta.get("data") != data:
            raise ValueError(
                f"data.path must be the data that {config.out} was trained on, got {config.data.path} "
                "with other content"
            )
        state = checkpoints.load(begin, gather(trainer.model, trainer.optimizers))
        restore(trainer.model, trainer.optimizers, state)
        if begin.step >= config.steps:
            return Outcome(Path(config.out), begin, None)
    first = 0 if begin is None else begin.step
    logger = Logger([])
    try:
        if world.first:
            open_folder(config, begin, trainer.data)
            logger = open_logger(trainer, first)
            logger.say(describe_more_steps(saved, config, first))
            logger.say(_describe_other_text(saved, config))
        return _loop(trainer, checkpoints, logger, begin, {"data": data})
    except Exception:
        if world.first and begin is None:
            discard_start(config)  # if nothing was logged or saved
        raise
    finally:
        logger.close()
        # A process must not leave before its checkpoint is written. If writing fails too, the run has already ended
        # for another reason.
        with contextlib.suppress(CheckpointError):
            checkpoints.wait()


def _loop(
    trainer: Trainer, checkpoints: Checkpoints, logger: Logger, begin: Checkpoint | None, meta: dict[str, Any]
) -> Outcome:
    first = 0 if begin is None else begin.step
    config, model, world = trainer.config, trainer.model, trainer.world
    batches = trainer.data.batches(
        trainer.rows, trainer.length, config.seed, world.rank, world.size, start_step=first
    )
    clock = Clock()
    validation: Validation | None = None
    previous: InFlightStep | None = None
    # On a GPU the host runs ahead of the device, and the log is soon there.
    forecast = Forecast(first, config.steps) if world.device.type == "cpu" else None

    def save(step: int, background: bool = False, after: str = "") -> Checkpoint:
        metric: dict[str, Any] = {"metric": None if validation is None else validation.loss}
        metric["measured_on"] = config.validation.tokens
        if validation is None and begin is not None and step == begin.step:
            # The same state again, after a step with NaN.
            metric = {name: begin.meta[name] for name in metric if name in begin.meta}
        about = {**meta, **metric, "processes": world.size}
        state = gather(model, trainer.optimizers)
        bad = find_bad_state(state, world)
        if bad is not None:
            raise TrainingStopped(after + _bad_state_message(config, checkpoints, step, bad))
        return checkpoints.save(step, state, about, background)

    with Signals() as signals:
        for step in range(first, config.steps):
            done = step + 1
            last = done == config.steps
            validates = last or _every(config.validation.every, done)
            logs = validates or _every(config.log.every, done)

            # One step. The host reads its numbers while the device computes the next one, unless it needs them now.
            try:
                in_flight = train_step(trainer, step, next(batches))
                stopping = any_process(world, signals.caught is not None)
                saves = stopping or last or _every(config.checkpoint.every, done)
                if previous is not None:
                    resolve(trainer, previous, step)
                previous = None if logs or saves else in_flight
                if logs or saves:
                    result = resolve(trainer, in_flight, step)
            except NonFiniteError as error:
                kept = save(error.step, after=f"{error}. ")
                raise TrainingStopped(_nonfinite_message(config, error, kept)) from error
            clock.count(trainer.tokens_per_step)
            if forecast is not None:
                logger.say(forecast.after(done))

            if logs:
                sync_metrics(model, world)
                if world.first:
                    logger.write(_train_line(trainer, done, result, clock))
                model.reset_routing_metrics()
                clock.lap()

            with clock.paused():
                validation = validate(trainer) if validates else None
                if validation is not None and world.first:
                    logger.write(_validation_line(done, validation))
                if config.checkpoint.background and any_process(world, checkpoints.failed):
                    checkpoints.wait()  # raises, on all processes at the same step
                if saves:
                    kept = save(done, config.checkpoint.background and not (stopping or last))

            if stopping and not last:
                name, status = signals.describe()
                raise TrainingStopped(
                    f"{name}: stopped after step {done}, saved as {kept.path}\n"
                    f"Continue with: grmoe train --resume out={quote(config.out)}",
                    status,
                )
    return Outcome(Path(config.out), kept, validation)


def _describe_other_text(old: TrainConfig | None, new: TrainConfig) -> str | None:
    """What it means that a resumed run measures another part of the validation text; None where it does not."""
    if old is None or old.validation.tokens == new.validation.tokens:
        return None
    return (
        f"validation.tokens was {old.validation.tokens} and is {new.validation.tokens} now: losses before and after do "
        "not compare, and the best checkpoint is one of those from here on"
    )


def _every(interval: int, done: int) -> bool:
    """Whether something that happens every `interval` steps (0: never) happens now."""
    return interval > 0 and done % interval == 0


def _nonfinite_message(config: TrainConfig, error: NonFiniteError, kept: Checkpoint) -> str:
    saved = f"{error}. The last good step is saved: {kept.path}\n"
    if not error.repeats:
        return f"{saved}To resume from it: grmoe train --resume out={quote(config.out)}"
    return (
        f"{saved}"
        "Resuming hits the same step. To change `optim.lr`, start a new run (`out=…`). "
        f"To resume anyway: grmoe train --resume out={quote(config.out)}"
    )


def _bad_state_message(config: TrainConfig, checkpoints: Checkpoints, step: int, bad: str) -> str:
    """A state with NaN is not saved: it would replace a good one, and no training can continue from it."""
    checkpoints.wait()  # the one being written is good
    last = checkpoints.latest()
    kept = (
        f"The last good checkpoint is {last.path}\nTo resume from it: grmoe train --resume out={quote(config.out)}"
        if last is not None
        else "There is no earlier checkpoint: start again, with a lower `optim.lr`"
    )
    return f"After step {step} {bad} hold NaN or Inf: nothing is saved. {kept}"


def _train_line(trainer: Trainer, step: int, result: StepResult, clock: Clock) -> dict[str, Any]:
    rate, now = clock.rate(), rates(trainer.optimizers)
    routing = routing_line(trainer.model.routing_metrics())
    steps = range(step - clock.tokens // trainer.tokens_per_step, step)  # since the last line
    flops, peak = flops_per_token(trainer, steps, routing["experts_per_token"]), trainer.peak_flops
    return {
        "kind": "train",
        "step": step,
        "tokens": step * trainer.tokens_per_step,
        **asdict(result),
        "lr": now["weights"],
        "kappa_lr": now.get("kappa"),
        "frames_lr": now.get("frames"),
        "alpha": trainer.model.alpha,
        "tokens_per_second": rate,
        "flops_per_token": flops,
        "mfu": None if peak is None else rate * flops / (peak * trainer.world.size),
        "memory_gb": _memory_gb(trainer.world.device),
        "seconds_left": (trainer.config.steps - step) * trainer.tokens_per_step / rate,
        **routing,
        **heads_line(trainer.model.head_metrics()),
    }


def _validation_line(step: int, validation: Validation) -> dict[str, Any]:
    return {
        "kind": "validation",
        "step": step,
        "loss": validation.loss,
        "perplexity": validation.perplexity,
        "domains": validation.domains,
        **routing_line(validation.routing),
    }


def _memory_gb(device: torch.device) -> float:
    """The most memory this process has held: of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
