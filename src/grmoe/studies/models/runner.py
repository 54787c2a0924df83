"""Jobs side by side: each trains and measures one model in a process of its own.

Jobs with results are skipped. A job that fails does not stop the others. When the time is up, running trainings save
and stop; the next call continues them. No job starts that would not finish in the time that is left.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from grmoe.files import read_json, write_file
from grmoe.studies.models.recipes import Base, Recipe
from grmoe.studies.models.store import Point, Row, Run, Store, Trained
from grmoe.studies.study import Place
from grmoe.terminal import Progress, note, silent

POLL = 1.0  # seconds between looks at the running jobs
GRACE = 90.0  # seconds that a job gets to save and stop
LOG_LINES = 5  # of a failed job that are shown


class StudyError(RuntimeError):
    """Some jobs failed. The message has their last lines."""


@dataclass(frozen=True)
class Job:
    base: Base
    recipe: Recipe
    seed: int

    @property
    def name(self) -> str:
        return f"{self.recipe.name}-{self.seed}"


@dataclass
class _Running:
    job: Job
    folder: Path
    process: subprocess.Popen[bytes]
    screen: IO[bytes]
    started: float


def run_folder(work: Path, job: Job) -> Path:
    """Where a job trains its model. The folder is a run of `grmoe train`."""
    return work / "models" / job.base.name / job.name


def run_jobs(jobs: Sequence[Job], place: Place, progress: Progress = silent) -> None:
    """Do the jobs that have no results yet. Raises `StudyError` at the end if some failed."""
    store = Store(place.results)
    plans = _plans(jobs, place, store)
    todo = [job for job in dict.fromkeys(jobs) if not has_results(store, job)]
    if todo:
        _Slice(todo, plans, place, store, progress).run()


def has_results(store: Store, job: Job) -> bool:
    return any(run.seed == job.seed for run in store.runs(job.base, job.recipe))


def _plans(jobs: Sequence[Job], place: Place, store: Store) -> dict[tuple[str, str], Trained]:
    """What will be kept of each recipe, without its runs. Every recipe is checked before anything is trained."""
    from grmoe.config import read_tree
    from grmoe.runs.start import starting_config
    from grmoe.studies.models.worker import default_identity, describe, identity

    if place.data is None:
        raise ValueError("this study trains language models: give prepared text with --data FOLDER")
    data, defaults = describe(place.data), default_identity()
    found: dict[tuple[str, str], Trained] = {}
    for job in jobs:
        key = job.base.name, job.recipe.name
        settings = (*job.base.settings, *job.recipe.settings, *place.settings)
        if key in found:
            if found[key].settings != settings:
                raise ValueError(f"two recipes of {job.base.name} have the name {job.recipe.name!r}")
            continue
        try:
            config = identity(starting_config(read_tree(None, (*settings, f"device={place.device}"))))
        except ValueError as error:
            raise ValueError(f"recipe {job.recipe.name!r}: {error}") from error
        found[key] = Trained(
            recipe=job.recipe.name, label=job.recipe.label, settings=settings, config=config, data=data
        )
        store.check(job.base, found[key], defaults)
    return found


class _Slice:
    """One call: the jobs that wait, those that run, and the time that is left."""

    def __init__(
        self,
        todo: list[Job],
        plans: dict[tuple[str, str], Trained],
        place: Place,
        store: Store,
        progress: Progress,
    ) -> None:
        self.waiting, self.plans, self.place, self.store = todo, plans, place, store
        self.progress, self.total, self.done = progress, len(todo), 0
        self.running: list[_Running] = []
        self.failures: list[str] = []
        self.seconds: dict[str, list[float]] = {}  # of finished jobs, by base

    def run(self) -> None:
        try:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self.place.at_once and self._fits(self.waiting[0]):
                    self.running.append(self._start(self.waiting.pop(0)))
                if not self.running or self._time_is_up():
                    break
                self._report()
                time.sleep(POLL)
                self._collect()
        finally:
            stopped = len(self.running)
            self._stop_all()
        left = len(self.waiting) + stopped
        if left:
            note(f"{left} of {self.total} models are left; the same command continues")
        if self.failures:
            raise StudyError("\n".join(self.failures))

    def _time_is_up(self) -> bool:
        return self.place.until is not None and time.monotonic() >= self.place.until

    def _fits(self, job: Job) -> bool:
        """Whether a job would finish in time, by those that finished before. Without any it is tried."""
        if self.place.until is None:
            return True
        return time.monotonic() + self._expected(job) <= self.place.until

    def _expected(self, job: Job) -> float:
        if mine := self.seconds.get(job.base.name):
            return max(mine)
        kept = [run.seconds for run in self.store.runs(job.base, job.recipe) if run.seconds is not None]
        return statistics.median(kept) if kept else 0.0

    def _start(self, job: Job) -> _Running:
        place, folder = self.place, run_folder(self.place.work, job)
        folder.parent.mkdir(parents=True, exist_ok=True)
        settings = (
            *self.plans[job.base.name, job.recipe.name].settings, f"seed={job.seed}", f"out={folder}",
            f"data.path={place.data}", f"device={place.device}",
        )  # fmt: skip
        order = {
            "settings": settings, "result": str(_result(folder)), "texts": [str(text) for text in place.texts],
            "tokens": place.tokens, "revision": place.revision, "at_once": place.at_once,
        }  # fmt: skip
        path = folder.with_name(f"{folder.name}.order.json")
        write_file(path, json.dumps(order, indent=1).encode())
        screen = folder.with_name(f"{folder.name}.txt").open("wb")
        command = [sys.executable, "-m", "grmoe.studies.models.worker", str(path)]
        process = subprocess.Popen(
            command, stdout=screen, stderr=subprocess.STDOUT, env=_environment(place.at_once)
        )
        return _Running(job, folder, process, screen, time.monotonic())

    def _collect(self) -> None:
        for one in list(self.running):
            status = one.process.poll()
            if status is None:
                continue
            self.running.remove(one)
            one.screen.close()
            result = _result(one.folder)
            if status == 0 and result.is_file():
                self._keep(one, result)
            else:
                self.failures.append(_failure(one, status))
                note(self.failures[-1])

    def _keep(self, one: _Running, result: Path) -> None:
        job = one.job
        self.seconds.setdefault(job.base.name, []).append(time.monotonic() - one.started)
        plan = self.plans[job.base.name, job.recipe.name]
        self.store.add(job.base, replace(plan, runs=[_read_run(result)]))
        keep = self.place.keep
        if keep is not None and job.recipe.name not in keep:
            shutil.rmtree(one.folder, ignore_errors=True)
        self.done += 1

    def _report(self) -> None:
        names = ", ".join(one.job.name for one in self.running[:3])
        more = f" and {len(self.running) - 3} more" if len(self.running) > 3 else ""
        self.progress(
            f"{self.done} of {self.total} models done; training {names}{more}", self.done, self.total
        )

    def _stop_all(self) -> None:
        """Ask the running jobs to save and stop, and wait for them."""
        for one in self.running:
            if one.process.poll() is None:
                one.process.terminate()
        end = time.monotonic() + GRACE
        for one in self.running:
            try:
                one.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            one.screen.close()
        self.running.clear()


def _environment(at_once: int) -> dict[str, str]:
    """Of a job: its share of the processor, unless the caller chose."""
    threads = str(max(1, (os.cpu_count() or 1) // at_once))
    return {"OMP_NUM_THREADS": threads, **os.environ}


def _result(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.result.json")


def _read_run(path: Path) -> Run:
    tree: dict[str, Any] = read_json(path)
    curve, rows = [Point(**p) for p in tree["curve"]], [Row(**r) for r in tree["rows"]]
    return Run(**{**tree, "curve": curve, "rows": rows})


def _failure(one: _Running, status: int) -> str:
    screen = Path(one.screen.name)
    last = "\n".join(screen.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
    return f"{one.job.name} ended with status {status} ({screen}):\n{last}"
