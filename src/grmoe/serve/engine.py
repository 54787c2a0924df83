"""The thread that computes: it starts waiting answers and gives every running answer one token per turn.

Requests come from the event loop, events go back to it. One lock protects what both sides use.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from grmoe.serve.answer_text import AnswerText
from grmoe.serve.batching import BatchGenerator, Sequence
from grmoe.serve.scores import Score

Reason = Literal["stop", "length"]


@dataclass(frozen=True)
class Piece:
    """More of an answer."""

    text: str
    tokens: list[int]
    scores: list[Score] = field(default_factory=list)
    """With log-probabilities: one per token, the end of text included; with `echo`, those of the prompt first."""


@dataclass(frozen=True)
class Finished:
    reason: Reason


@dataclass(frozen=True)
class Failed:
    """The request ends without an answer, or without the rest of it."""

    status: int
    """HTTP status."""
    message: str


Event = Piece | Finished | Failed


class Refused(Exception):
    """The engine does not take a request; `failure` says why."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(eq=False, kw_only=True)
class Job:
    """One answer of a request, which waits or runs. Its last event is `Finished` or `Failed`."""

    request: object
    """What the answers of one request have in common."""
    sequence: Sequence
    text: AnswerText
    max_tokens: int
    echo: str = ""
    """Text to send before the answer: the prompt."""
    stream: bool
    """Deliver pieces as they come, or one at the end."""
    deliver: Callable[[Event], None]
    """Called in the engine's thread."""
    cancelled: bool = False
    arrived: float = field(default_factory=time.monotonic)
    delivered: int = 0
    """Tokens."""
    scored: int = 0
    """Scores delivered."""


class Engine:
    """A model behind a queue."""

    def __init__(self, generator: BatchGenerator, *, concurrency: int, queue: int) -> None:
        self.generator, self.concurrency, self.queue = generator, concurrency, queue
        ends: Any = generator.model.config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.closing: str | None = None  # why no new request is taken
        self._stopped = False
        self._change = threading.Condition()
        # The number of threads is a setting of each thread, and rounding depends on it.
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, jobs: list[Job]) -> None:
        """Queue all answers of a request, or raise `Refused`."""
        with self._change:
            if self.closing is not None or not self.alive:
                raise Refused(Failed(503, self.closing or "the engine has stopped"))
            free = max(0, self.concurrency - len(self.running))
            begun = {id(job.request) for job in self.running}
            waiting = len({id(job.request) for job in self.waiting} - begun)
            if waiting >= self.queue + free:
                busy = f"{len(self.running)} answers are being computed and {waiting} requests wait; try again later"
                raise Refused(Failed(429, busy))
            self.waiting += jobs
            self._change.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """The client is gone. A running job frees its place after the current step."""
        with self._change:
            for job in jobs:
                job.cancelled = True
            self.waiting = deque(job for job in self.waiting if not job.cancelled)

    def close(self, why: str) -> None:
        """Take no new requests. Those that run or wait continue."""
        with self._change:
            self.closing = why

    def stop(self) -> None:
        """End all requests that still run or wait, then the thread."""
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
                new = self._next_jobs()
            self._turn(new)
        left = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        for job in left:
            job.deliver(Failed(503, self.closing or "the server is shutting down"))

    def _next_jobs(self) -> list[Job]:
        """Waiting jobs that start now. They are few: many new prompts must not hold up the answers that run."""
        new: list[Job] = []
        running = Counter(id(job.request) for job in self.running)
        while self.waiting and len(self.running) < self.concurrency:
            # A request with many prompts leaves room for others: the one with fewest running is next.
            job = min(self.waiting, key=lambda job: running[id(job.request)])
            if not self.generator.takes([j.sequence for j in (*new, job)]):
                break
            self.waiting.remove(job)
            self.running.append(job)
            running[id(job.request)] += 1
            new.append(job)
        return new

    def _turn(self, new: list[Job]) -> None:
        """One token for every job. A job that cannot be computed (out of memory) fails, the server goes on."""
        old = self.running[: len(self.running) - len(new)]
        try:
            if old:
                self.generator.step([job.sequence for job in old])
                for job in old:
                    self._deliver(job)
        except Exception as error:
            self._fail([job for job in old if job in self.running], error)
        self._start(new)

    def _start(self, jobs: list[Job]) -> None:
        """Read the prompts of these jobs. If they cannot be read together, each gets its own try."""
        if not jobs:
            return
        try:
            self.generator.start([job.sequence for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                self._fail(jobs, error)
        for job in jobs:
            if job.sequence.started:
                self._deliver(job)
            elif len(jobs) > 1:
                self._start([job])

    def _fail(self, jobs: list[Job], error: Exception) -> None:
        for job in jobs:
            self.running.remove(job)
            job.deliver(Failed(500, f"{type(error).__name__}: {error}".splitlines()[0]))

    def _deliver(self, job: Job) -> None:
        """Deliver what is new. Remove the job if its answer is complete."""
        tokens, scores = job.sequence.tokens, job.sequence.scores
        ended = bool(tokens) and tokens[-1] in self.ends
        reason: Reason | None = "stop" if ended else "length" if len(tokens) >= job.max_tokens else None
        if reason is None and not (job.stream or job.text.stops):
            return
        shown = tokens[:-1] if ended else tokens
        piece, stopped = job.text.add(shown, last=reason is not None)
        reason = "stop" if stopped else reason
        piece, job.echo = job.echo + piece, ""
        if piece or len(shown) > job.delivered or len(scores) > job.scored:
            job.deliver(Piece(piece, shown[job.delivered :], scores[job.scored :]))
            job.delivered, job.scored = len(shown), len(scores)
        if reason is not None:
            self.running.remove(job)
            job.deliver(Finished(reason))
