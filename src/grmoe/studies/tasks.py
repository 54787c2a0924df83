"""Tasks side by side: each is a process of its own that writes one file.

A task that fails does not stop the others. When the time is up, running tasks stop: trainings save, and the next call
continues them. No task starts that would not finish in the time that is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from grmoe.files import write_file
from grmoe.studies.study import Place
from grmoe.terminal import Progress, note, silent

POLL = 1.0  # seconds between looks at the running tasks
GRACE = 90.0  # seconds that a task gets to save and stop
LOG_LINES = 5  # of a failed task that are shown
_ENOUGH = 0.1  # share of a running task from which its end is foretold
_FIXED = 0.3  # share of a task's time that neither progress nor free places shorten: starting, compiling, measuring


class StudyError(RuntimeError):
    """Some tasks failed. The message has their last lines."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """`python -m MODULE PATH.order.json`, which writes PATH.result.json."""

    name: str
    module: str
    order: Mapping[str, Any]
    path: Path
    like: str
    """Tasks with the same word here take about as long."""
    finish: Callable[[Path], None]
    """Gets the result's file."""
    steps: int | None = None
    """Of a training. Tasks of another kind with steps foretell its time by theirs."""
    ready: Callable[[], bool] = lambda: True
    """Whether it can start: a model must be trained before it is measured."""
    saved: Callable[[], float] = lambda: 0.0
    """Share that was done in calls before, which this one continues."""
    progress: Callable[[], float] = lambda: 0.0
    """Share that is done while it runs, what was saved included."""
    before: Callable[[], float | None] = lambda: None
    """Seconds that such tasks took in other calls; None if unknown."""

    @property
    def result(self) -> Path:
        return result_file(self.path)


def result_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.result.json")


def run_tasks(tasks: Sequence[Task], place: Place, progress: Progress = silent) -> None:
    """Do the tasks, the first ones first. Raises `StudyError` at the end if some failed."""
    if tasks:
        _Slice(list(tasks), place, progress).run()


@dataclass
class _Running:
    task: Task
    process: subprocess.Popen[bytes]
    screen: IO[bytes]
    started: float
    saved: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class _Slice:
    """One call: the tasks that wait, those that run, and the time that is left."""

    def __init__(self, tasks: list[Task], place: Place, progress: Progress) -> None:
        self.waiting, self.place, self.progress = tasks, place, progress
        self.total, self.done = len(tasks), 0
        self.running: list[_Running] = []
        self.failures: list[str] = []
        self.seconds: dict[str, list[float]] = {}  # of finished tasks, by `like`
        self.per_step: list[float] = []  # seconds of finished trainings over their steps

    def run(self) -> None:
        try:
            with _killed_as_exit():
                while self.waiting or self.running:
                    self._start_all()
                    if not self.running or self.place.time_left <= 0:
                        break
                    self._report()
                    time.sleep(POLL)
                    self._collect()
        finally:
            stopped = self._stop_all()
        left = len(self.waiting) + stopped
        if left:
            note(f"{left} of {self.total} jobs are left; the same command continues")
        if self.failures:
            raise StudyError("\n".join(self.failures))

    # -- what starts -----------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        """Fill the free places with the first tasks that can start and would finish in time."""
        known: dict[str, float] = {}  # seconds of a whole task, by `like`
        for task in list(self.waiting):
            if len(self.running) >= self.place.at_once:
                return
            if task.ready() and self._fits(task, known):
                self.waiting.remove(task)
                self.running.append(self._start(task))

    def _fits(self, task: Task, known: dict[str, float]) -> bool:
        """Whether a task would finish in time. One that nothing is known of is tried."""
        if self.place.until is None:
            return True
        if task.like not in known:
            known[task.like] = self._whole(task)
        # Times are those of a full house. With free places each task has more of the machine, so the last minutes are
        # filled with fewer and fewer tasks.
        company = min(1.0, (len(self.running) + 1) / self.place.at_once)
        rest = _FIXED + (1 - _FIXED) * (1 - task.saved()) * company
        return known[task.like] * rest <= self.place.time_left

    def _whole(self, task: Task) -> float:
        """Seconds of the task from its beginning: by those of this call that are like it, then by others."""
        if finished := self.seconds.get(task.like):
            return max(finished)
        of_kind = [one for one in self.running if one.task.like == task.like]
        gained = [(one.seconds, one.task.progress() - one.saved) for one in of_kind]
        if foretold := [seconds / share for seconds, share in gained if share >= _ENOUGH]:
            return max(foretold)
        if task.steps is not None and self.per_step:
            return max(self.per_step) * task.steps
        return task.before() or 0.0

    def _start(self, task: Task) -> _Running:
        task.path.parent.mkdir(parents=True, exist_ok=True)
        task.result.unlink(missing_ok=True)  # of a call before
        path = task.path.with_name(f"{task.path.name}.order.json")
        write_file(path, json.dumps(task.order, indent=1).encode())
        screen = task.path.with_name(f"{task.path.name}.txt").open("wb")
        command = [sys.executable, "-m", task.module, str(path)]
        saved = task.saved()
        process = subprocess.Popen(
            command, stdout=screen, stderr=subprocess.STDOUT, env=_environment(self.place.at_once)
        )
        return _Running(task, process, screen, time.monotonic(), saved)

    # -- what ends -------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        for one in list(self.running):
            status = one.process.poll()
            if status is None:
                continue
            self.running.remove(one)
            one.screen.close()
            if status == 0 and one.task.result.is_file():
                self._finish(one)
            else:
                self.failures.append(_failure(one, status))
                note(self.failures[-1])

    def _finish(self, one: _Running) -> None:
        if one.saved == 0:  # else the time says little of a whole one
            self.seconds.setdefault(one.task.like, []).append(one.seconds)
            if one.task.steps is not None:
                self.per_step.append(one.seconds / one.task.steps)
        one.task.finish(one.task.result)
        self.done += 1

    def _report(self) -> None:
        names = ", ".join(one.task.name for one in self.running[:3])
        more = f" and {len(self.running) - 3} more" if len(self.running) > 3 else ""
        self.progress(f"{self.done} of {self.total} jobs done; now {names}{more}", self.done, self.total)

    def _stop_all(self) -> int:
        """Ask the running tasks to save and stop, and wait for them. A training that only has to be measured may end.

        Returns how many did not finish.
        """
        for one in self.running:
            if one.process.poll() is None and one.task.progress() < 1:
                one.process.terminate()
        end, stopped = time.monotonic() + GRACE, 0
        for one in self.running:
            try:
                one.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            one.screen.close()
            if one.process.poll() == 0 and one.task.result.is_file():
                self._finish(one)
            else:
                stopped += 1
        self.running.clear()
        return stopped


@contextmanager
def _killed_as_exit() -> Iterator[None]:
    """SIGTERM ends this process by an exception, so that its tasks are stopped too and do not train on alone."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _environment(at_once: int) -> dict[str, str]:
    """Of a task: its share of the processor, unless the caller chose."""
    threads = str(max(1, (os.cpu_count() or 1) // at_once))
    return {"OMP_NUM_THREADS": threads, **os.environ}


def _failure(one: _Running, status: int) -> str:
    screen = Path(one.screen.name)
    last = "\n".join(screen.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
    return f"{one.task.name} ended with status {status} ({screen}):\n{last}"
