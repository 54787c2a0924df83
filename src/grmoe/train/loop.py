"""The training loop."""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from grmoe.parallel.shard import sync_metrics
from grmoe.parallel.world import World, any_process, start, stop
from grmoe.runs.checkpoint import Checkpoint, CheckpointError, Checkpoints
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import checkpoints_of, data_checksum, find_start, open_folder
from grmoe.runs.lock import lock_folder
from grmoe.runs.state import gather, restore
from grmoe.train.log import Logger, open_logger, routing_line
from grmoe.train.schedule import rates
from grmoe.train.setup import Session, open_session
from grmoe.train.step import NonFiniteError, Pending, StepResult, settle, train_step
from grmoe.train.validate import Validation, validate


class TrainingStopped(RuntimeError):
    """The run ended before its last step and can go on from its last checkpoint."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Outcome:
    folder: Path
    checkpoint: Checkpoint
    validation: Validation | None  # None where the run had ended before


def train(config: TrainConfig, resume: bool = False) -> Outcome:
    """Train from the configuration, or go on from the run's last checkpoint, to the bit where it would have been."""
    world = start(config.parallel, config.device)
    try:
        with lock_folder(Path(config.out), world):
            return _train(config, resume, world)
    finally:
        stop()


def _train(config: TrainConfig, resume: bool, world: World) -> Outcome:
    begin = find_start(config, resume)
    session = open_session(config, world)
    checkpoints = checkpoints_of(Path(config.out), config)
    data = data_checksum(session.data.folder)
    if begin is not None:
        if begin.meta["data"] != data:
            raise ValueError(f"{config.data.path} is not the data that {config.out} was trained on")
        state = checkpoints.load(begin, gather(session.model, session.optimizers))
        restore(session.model, session.optimizers, state)
    if begin is not None and begin.step >= config.steps:
        return Outcome(Path(config.out), begin, None)
    first = 0 if begin is None else begin.step
    if world.first:
        open_folder(config, begin, session.data)
    logger = open_logger(session, first) if world.first else Logger([])
    try:
        return _run(session, checkpoints, logger, first, {"data": data})
    finally:
        logger.close()
        # Processes part when it is written. If that fails too, the run has ended for another reason already.
        with contextlib.suppress(CheckpointError):
            checkpoints.wait()


def _run(
    session: Session, checkpoints: Checkpoints, logger: Logger, first: int, meta: dict[str, Any]
) -> Outcome:
    config, world = session.config, session.world
    batches = session.data.batches(
        session.rows, session.length, config.seed, world.rank, world.size, start_step=first
    )
    clock = Clock()
    validation: Validation | None = None

    def save(step: int, background: bool = False) -> Checkpoint:
        about = {**meta, "metric": None if validation is None else validation.loss, "processes": world.size}
        return checkpoints.save(step, gather(session.model, session.optimizers), about, background)

    waiting: Pending | None = None
    with Signals() as signals:
        for step in range(first, config.steps):
            done = step + 1
            last = done == config.steps
            due = _due(config.validation.every, done) or last
            logs = done % config.log.every == 0 or due
            try:
                pending = train_step(session, step, next(batches))
                stopping = any_process(world, signals.caught is not None)
                saves = stopping or last or _due(config.checkpoint.every, done)
                # A step's numbers are read while the device computes the next one, unless they are needed at once.
                if waiting is not None:
                    settle(session, waiting, step)
                waiting = None if logs or saves else pending
                if waiting is None:
                    result = settle(session, pending, step)
            except NonFiniteError as error:
                kept = save(error.step)
                raise TrainingStopped(f"{error}. The last good step is saved: {kept.path}") from error
            clock.count(session.tokens_per_step)
            if logs:
                sync_metrics(session.model, world)
                if world.first:
                    logger.write(_train_line(session, done, result, clock))
                session.model.reset_routing_metrics()
                clock.lap()
            with clock.paused():
                validation = validate(session) if due else None
                if validation is not None and world.first:
                    logger.write(_validation_line(done, validation))
                if config.checkpoint.background and any_process(world, checkpoints.failed):
                    checkpoints.wait()  # raises, on all processes at the same step
                if saves:
                    kept = save(done, config.checkpoint.background and not (stopping or last))
            if stopping and not last:
                name, status = signals.describe()
                raise TrainingStopped(f"{name}: stopped after step {done}, saved as {kept.path}", status)
    return Outcome(Path(config.out), kept, validation)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _train_line(session: Session, step: int, result: StepResult, clock: Clock) -> dict[str, Any]:
    rate, now = clock.rate(), rates(session.optimizers)
    peak = session.peak_flops
    left = (session.config.steps - step) * session.tokens_per_step / rate
    return {
        "kind": "train",
        "step": step,
        "tokens": step * session.tokens_per_step,
        **asdict(result),
        "lr": now["weights"],
        "kappa_lr": now.get("kappa"),
        "frames_lr": now.get("frames"),
        "alpha": session.model.alpha,
        "tokens_per_second": rate,
        "mfu": None if peak is None else rate * session.flops_per_token / (peak * session.world.size),
        "memory_gb": _memory_gb(session.world.device),
        "seconds_left": left,
        **routing_line(session.model.routing_metrics()),
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
    """The most this process has held: of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Clock:
    """Tokens a second since the last lap, without what is paused."""

    def __init__(self) -> None:
        self.lap()

    def lap(self) -> None:
        self.since, self.tokens, self.away = time.perf_counter(), 0, 0.0

    def count(self, tokens: int) -> None:
        self.tokens += tokens

    def rate(self) -> float:
        return self.tokens / max(1e-9, time.perf_counter() - self.since - self.away)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.away += time.perf_counter() - began


class Signals:
    """SIGINT and SIGTERM are noted, and acted on after the step; the second one interrupts at once."""

    def __init__(self) -> None:
        self.caught: int | None = None

    def __enter__(self) -> Signals:
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python delivers none
            self.before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None:
            raise KeyboardInterrupt
        self.caught = number

    def describe(self) -> tuple[str, int]:
        """(its name, the exit status a shell gives it): a script must not take the run for finished."""
        number = self.caught or signal.SIGTERM  # another process of the run caught it
        return signal.Signals(number).name, 128 + number
