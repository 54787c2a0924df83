"""The thread that computes: takes waiting requests in, gives every running one a token in turn, hands pieces out.

Requests come from the event loop and events go back to it; what is shared between the two is behind one lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from grmoe.serve.choice import Choice, Sampling
from grmoe.serve.compute import Compute, Sequence
from grmoe.serve.text import Text

Reason = Literal["stop", "length"]


@dataclass(frozen=True)
class Piece:
    """More of an answer."""

    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Finished:
    reason: Reason


@dataclass(frozen=True)
class Failed:
    """An answer that ends without one: an HTTP status and why."""

    status: int
    message: str


Event = Piece | Finished | Failed


class Refused(Exception):
    """No place for a request; `failure` says why."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(eq=False)
class Job:
    """A request on its way. Events come one after the other, the last one is `Finished` or `Failed`."""

    prompt: list[int]
    alphas: tuple[float, ...]
    sampling: Sampling
    max_tokens: int
    stops: list[str]
    stream: bool  # pieces as they come, or one at the end
    deliver: Callable[[Event], None]  # called in the engine's thread
    cancelled: bool = False
    arrived: float = field(default_factory=time.monotonic)
    sequence: Sequence | None = None
    text: Text | None = None
    handed_out: int = 0  # tokens

    @property
    def tokens(self) -> int:
        return 0 if self.sequence is None else len(self.sequence.tokens)

    @property
    def experts_per_token(self) -> float | None:
        return None if self.sequence is None else self.sequence.experts_per_token


class Engine:
    """A model behind a queue."""

    def __init__(self, compute: Compute, tokenizer: Any, *, concurrency: int, queue: int) -> None:
        self.compute, self.tokenizer = compute, tokenizer
        self.concurrency, self.queue = concurrency, queue
        config = compute.model.config
        ends = config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.vocab_size = config.vocab_size
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.closing: str | None = None  # why nothing new is taken
        self._stopped = False
        self._change = threading.Condition()
        # OpenMP's number of threads belongs to a thread, and rounding to the number.
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Queue a request, or raise `Refused`."""
        with self._change:
            if self.closing is not None or not self.alive:
                raise Refused(Failed(503, self.closing or "the engine has stopped"))
            free = self.concurrency - len(self.running)
            if len(self.waiting) >= self.queue + max(0, free):
                busy = (
                    f"{len(self.running)} requests are computed and {len(self.waiting)} wait; try again later"
                )
                raise Refused(Failed(429, busy))
            self.waiting.append(job)
            self._change.notify()

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more: its place is free after the step that is being computed."""
        with self._change:
            job.cancelled = True
            if job in self.waiting:
                self.waiting.remove(job)

    def close(self, why: str) -> None:
        """Take nothing new; what runs and waits goes on."""
        with self._change:
            self.closing = why

    def stop(self) -> None:
        """End everything that still runs or waits, and the thread."""
        with self._change:
            self.closing = self.closing or "the server is shutting down"
            self._stopped = True
            self._change.notify()
        if self.alive:
            self._thread.join()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            with self._change:
                while not (self.running or self.waiting or self._stopped):
                    self._change.wait()
                if self._stopped:
                    break
                self.running = [job for job in self.running if not job.cancelled]
                new = None
                # One prompt between two steps: a crowd of new requests must not hold up those that run.
                if self.waiting and len(self.running) < self.concurrency:
                    new = self.waiting.popleft()
                    self.running.append(new)
            self._turn(new)
        left = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        for job in left:
            job.deliver(Failed(503, self.closing or "the server is shutting down"))

    def _turn(self, new: Job | None) -> None:
        """A token for everybody. What cannot be computed (no memory, say) gets an error, and the server goes on."""
        old = [job for job in self.running if job is not new]
        try:
            if old:
                self.compute.step([job.sequence for job in old if job.sequence is not None])
                for job in old:
                    self._hand_out(job)
        except Exception as error:
            self._fail([job for job in self.running if job is not new], error)
        if new is None:
            return
        try:
            new.sequence = Sequence(new.prompt, new.alphas, Choice(new.sampling, self.vocab_size))
            new.text = Text(self.tokenizer, new.stops)
            self.compute.start(new.sequence)
            self._hand_out(new)
        except Exception as error:
            self._fail([new], error)

    def _fail(self, jobs: list[Job], error: Exception) -> None:
        for job in jobs:
            self.running.remove(job)
            job.deliver(Failed(500, f"{type(error).__name__}: {error}".splitlines()[0]))

    def _hand_out(self, job: Job) -> None:
        """Deliver what is new of a job; drop the job if that was the last of it."""
        assert job.sequence is not None
        assert job.text is not None
        tokens = job.sequence.tokens
        ended = tokens[-1] in self.ends
        reason: Reason | None = "stop" if ended else "length" if len(tokens) >= job.max_tokens else None
        if reason is None and not (job.stream or job.stops):
            return
        shown = tokens[:-1] if ended else tokens
        piece, stopped = job.text.add(shown, last=reason is not None)
        reason = "stop" if stopped else reason
        if piece or len(shown) > job.handed_out:
            job.deliver(Piece(piece, shown[job.handed_out :]))
            job.handed_out = len(shown)
        if reason is not None:
            self.running.remove(job)
            job.deliver(Finished(reason))
