"""Signals that end the training loop, and the clock that measures its speed."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

# What ends a run with a checkpoint: Ctrl-C, a scheduler, a closed terminal, a job that is about to be pre-empted.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# A second one of these interrupts at once. The others may come several times: the kernel and the shell both send
# SIGHUP, and a scheduler's SIGTERM follows its SIGUSR1 while the checkpoint is being written.
_IMPATIENT = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Notes a signal, so that the loop can save and stop after the current step.

    A second SIGINT or SIGTERM interrupts at once. A signal that was ignored before stays ignored: `nohup` does that.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self._asked = False

    def __enter__(self) -> Signals:
        self.before = {}
        if (
            threading.current_thread() is threading.main_thread()
        ):  # Python delivers signals to no other thread
            heard = [s for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
            self.before = {s: signal.signal(s, self._note) for s in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in _IMPATIENT:
            if self._asked:
                raise KeyboardInterrupt
            self._asked = True
        self.caught = self.caught or number

    def describe(self) -> tuple[str, int]:
        """(name of the signal, exit status): a shell script must not take the run for finished."""
        number = self.caught or signal.SIGTERM  # another process of the run caught it
        return signal.Signals(number).name, 128 + number


class Forecast:
    """How long a run will take, from its first steps. The very first is left out: it allocates and may compile."""

    STEPS = 3

    def __init__(self, first: int, steps: int) -> None:
        self.first, self.steps, self.began = first, steps, 0.0

    def after(self, done: int) -> str | None:
        """A line once enough steps are done, else None. Call it after every step."""
        now = time.perf_counter()
        if done == self.first + 1:
            self.began = now
        if done != self.first + 1 + self.STEPS or self.steps - done < 10:
            return None
        each = (now - self.began) / self.STEPS
        left = self.steps - done
        return f"step {done}: {each:.2g} s per step, about {duration(each * left)} for the {left} steps left"


def duration(seconds: float) -> str:
    """3725 → '1:02:05', 65 → '1:05'."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


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
