"""Signals that end the training loop, and the clock that measures its speed."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType


class Signals:
    """Notes SIGINT and SIGTERM, so that the loop can save and stop after the current step.

    A second signal interrupts at once.
    """

    def __init__(self) -> None:
        self.caught: int | None = None

    def __enter__(self) -> Signals:
        self.before = {}
        if (
            threading.current_thread() is threading.main_thread()
        ):  # Python delivers signals to no other thread
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
        """(name of the signal, exit status): a shell script must not take the run for finished."""
        number = self.caught or signal.SIGTERM  # another process of the run caught it
        return signal.Signals(number).name, 128 + number


class Clock:
    """Tokens per second since the last lap, without the time that was paused."""

    def __init__(self) -> None:
        self.lap()

    def lap(self) -> None:
        self.since, self.tokens, self.paused_for = time.perf_counter(), 0, 0.0

    def count(self, tokens: int) -> None:
        self.tokens += tokens

    def rate(self) -> float:
        return self.tokens / max(1e-9, time.perf_counter() - self.since - self.paused_for)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.paused_for += time.perf_counter() - began
