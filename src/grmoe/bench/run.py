"""A benchmark from its plan to its tables and files: `run`, `show`, `save`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import torch

from grmoe import checks
from grmoe.bench.measure import Contender, Result, Row, measure, parts, pick
from grmoe.bench.plot import bars
from grmoe.bench.shapes import Shape
from grmoe.bench.tables import describe_machine, ratio_table, row_table, write_json
from grmoe.tables import Table
from grmoe.terminal import Progress, Steps, silent

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
S = TypeVar("S", bound=Shape)


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[S]):
    """What one command measures."""

    name: str
    contenders: Callable[[S, torch.device, torch.dtype, int | None], list[Contender]]
    """From the shape, the device, the dtype and the rank of the Grassmann gate (None: the default)."""
    compare: Callable[[S, list[Row]], Result]
    cuda_shapes: tuple[S, ...] = ()
    """Shapes to measure on a GPU if none is given; below on a CPU."""
    cpu_shapes: tuple[S, ...] = ()
    named_shapes: dict[str, tuple[S, ...]] = field(default_factory=dict)
    """Lists of shapes for `--shapes NAME`."""
    facts: dict[str, str] = field(default_factory=dict)
    """Facts of a row to show before its times, and how to format each."""
    lines: Callable[[Result], list[str]] = lambda result: []
    """Text below the table."""
    tables: Callable[[Result], list[Table]] = lambda result: []
    """Further tables, below the text."""
    draw: Callable[[list[Result], Path, str], Path] = bars


@dataclass(frozen=True, kw_only=True)
class Plan(Generic[S]):
    """A benchmark at some shapes on a device."""

    benchmark: Benchmark[S]
    shapes: list[S]
    device: torch.device
    dtype: torch.dtype
    rounds: int
    out: Path
    rank: int | None = None
    wanted: list[str] = field(default_factory=list)
    """Run only contenders with one of these words in their name. Empty: all."""

    @property
    def title(self) -> str:
        return f"{self.benchmark.name}, {str(self.dtype).removeprefix('torch.')}, {describe_machine(self.device)}"

    @property
    def numbers(self) -> Path:
        return self.out / "results.json"

    def contenders(self, shape: S) -> list[Contender]:
        found = self.benchmark.contenders(shape, self.device, self.dtype, self.rank)
        return pick(found, self.wanted)

    def write(self, results: list[Result]) -> None:
        name, lines = self.benchmark.name, [self.benchmark.lines(result) for result in results]
        write_json(name, results, lines, self.device, self.dtype, self.rounds, self.numbers)


def run(plan: Plan[S], progress: Progress = silent) -> list[Result]:
    """Measure shape by shape. results.json is written after each, so an interrupted run leaves what it has."""
    contenders = [plan.contenders(shape) for shape in plan.shapes]
    plan.out.mkdir(parents=True, exist_ok=True)  # better to fail now than after the measurement
    steps = Steps(progress, sum(parts(each, plan.rounds) for each in contenders))
    results: list[Result] = []
    for shape in plan.shapes:
        torch.compiler.reset()  # each shape compiles again: together they would hit Dynamo's limit
        # Contenders hold the tensors of their shape: they must not outlive it.
        rows = measure(contenders.pop(0), plan.device, plan.rounds, steps, shape.text)
        results.append(plan.benchmark.compare(shape, rows))
        plan.write(results)
    return results


def show(plan: Plan[S], results: list[Result]) -> Iterator[Table | str]:
    for result in results:
        yield row_table(result, plan.title, plan.benchmark.facts)
        yield from (f"{row.name}: {row.failure}" for row in result.rows if row.failure)
        yield from plan.benchmark.lines(result)
        yield from plan.benchmark.tables(result)
        if result.ratios:
            yield ratio_table(result)


def save(plan: Plan[S], results: list[Result]) -> dict[str, Path]:
    """Draw the figure. The numbers were written on the way."""
    name = plan.benchmark.name
    figure = plan.benchmark.draw(results, plan.out / f"{name}.png", plan.title)
    return {"Numbers": plan.numbers, "Figure": figure}


def find_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """bf16 or fp32 by name; by default bf16 on a GPU and fp32 on a CPU."""
    name = name or ("bf16" if device.type == "cuda" else "fp32")
    return DTYPES[checks.one_of("dtype", name, tuple(DTYPES))]
