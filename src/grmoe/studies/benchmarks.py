"""Studies that are benchmarks: each job is one `grmoe bench`, and its results.json, shortened, is the result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grmoe.bench.measure import Result
from grmoe.bench.models import ModelShape
from grmoe.bench.run import Benchmark, Plan, find_dtype
from grmoe.bench.run import run as run_benchmark
from grmoe.files import read_json, write_file
from grmoe.hardware import use_device
from grmoe.runs.folder import environment
from grmoe.studies.page import Verdict
from grmoe.studies.study import Place, State, short_revision
from grmoe.terminal import Progress, note

Measure = Callable[[Plan[Any], Progress], list[Result]]


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """One benchmark at some shapes."""

    name: str
    command: str
    """The command that measures the same."""
    benchmark: Callable[[torch.device], Benchmark[Any]]
    shapes: Callable[[torch.device], list[Any]]
    measure: Measure = run_benchmark
    rounds: int = 10
    wanted: list[str] = field(default_factory=list)

    def run(self, out: Path, device: torch.device, progress: Progress) -> dict[str, Any]:
        """Measure, and return what is kept. A contender of ours that failed is an error."""
        plan = Plan(
            benchmark=self.benchmark(device),
            shapes=self.shapes(device),
            device=device,
            dtype=find_dtype(None, device),
            rounds=self.rounds,
            out=out,
            wanted=self.wanted,
        )
        for result in self.measure(plan, progress):
            for row in result.rows:
                if row.kind == "ours" and row.failure:
                    raise RuntimeError(f"{row.name} failed: {row.failure}")
        content = read_json(plan.numbers)
        content.pop("command_line")
        return {**_shortened(content), "command": self.command}


class BenchStudy:
    """Jobs one after the other, because two on one GPU would disturb each other."""

    def __init__(self, name: str, jobs: tuple[BenchJob, ...]) -> None:
        self.name, self.jobs = name, jobs

    @property
    def parts(self) -> list[str]:
        return [job.name for job in self.jobs]

    def path(self, results: Path, job: str) -> Path:
        return results / self.name / f"{job}.json"

    def state(self, results: Path) -> State:
        return State(sum(self.path(results, job.name).is_file() for job in self.jobs), len(self.jobs))

    def run(self, place: Place, progress: Progress) -> None:
        device = use_device(place.device)
        longest = 0.0  # seconds of a job of this call: the next one may take as long
        for job in self.jobs:
            path = self.path(place.results, job.name)
            if path.is_file() or place.time_left <= longest or not place.wants(job.name):
                continue
            started = time.monotonic()
            try:
                content = job.run(place.work / self.name / job.name, device, progress)
            except (RuntimeError, ValueError) as error:
                # The others may still run. Without results it is tried again.
                note(f"{self.name}, {job.name}: {error}")
                continue
            finally:
                longest = max(longest, time.monotonic() - started)
            content["revision"] = short_revision(environment(), place.revision)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    def results(self, results: Path, job: str) -> dict[str, Any] | None:
        path = self.path(results, job)
        return read_json(path) if path.is_file() else None


def _shortened(value: Any) -> Any:
    """Without the single calls, and with six digits."""
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items() if key not in ("rounds_ms", "losses")}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


# -- reading results -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A ratio with the middle 80 % of its rounds."""

    value: float
    low: float
    high: float

    def inverse(self) -> Measured:
        return Measured(1 / self.value, 1 / self.high, 1 / self.low)

    def times(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    def excess(self) -> str:
        low, value, high = (f"{100 * (v - 1):+.1f}" for v in (self.low, self.value, self.high))
        return f"{value} % ({low} to {high})"


def find_ratio(content: dict[str, Any] | None, shape: int, name: str) -> Measured | None:
    """A ratio of a results file, by the number of its shape."""
    if content is None or shape >= len(content["shapes"]):
        return None
    for ratio in content["shapes"][shape]["ratios"]:
        if ratio["name"] == name:
            return Measured(ratio["value"], *(ratio["interval"] or (ratio["value"],) * 2))
    return None


def at_most(found: Measured | None, limit: float) -> Verdict:
    """Of "at most": the whole interval decides. If it includes the limit, nothing is decided."""
    if found is None:
        return Verdict.OPEN
    if found.high <= limit:
        return Verdict.HOLDS
    return Verdict.FAILS if found.low > limit else Verdict.UNDECIDED


def model_shape(preset: str, batch: int, length: int = 1024) -> Callable[[torch.device], list[ModelShape]]:
    return lambda device: [ModelShape.on(device, preset, batch, length)]
