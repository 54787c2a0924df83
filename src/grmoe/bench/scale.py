"""Large models that take real optimiser steps on one GPU, and what the paper's training would cost at that rate.

A step is the trainer's own (`grmoe.train.step`), with full budgets: forward, backward, clipping, both optimisers,
overlap penalty, priors, learning rates with their warm-up. Tokens come from prepared data. Without any they are drawn
one by one by Zipf's law, so that their frequencies are all there is to learn. The model has the preset's vocabulary,
also where that of the data is smaller: its head is part of what a step costs.

Weights, gradients and moments are fp32 where they fit (16 bytes per parameter). Where they do not, they are bf16
(8 bytes), except for the routers. That is enough for the rate and the memory; nobody should train a model that way.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.bench.measure import SEED, Contender, Result, Row, Runs
from grmoe.bench.models import FORMS, ModelShape
from grmoe.bench.run import Benchmark, Plan
from grmoe.bench.train_step import STEP
from grmoe.data import TokenDataset
from grmoe.hardware import memory_bytes
from grmoe.model import preset
from grmoe.model.count import parameters
from grmoe.parallel.world import World
from grmoe.probe.routing import routing_figures
from grmoe.probe.timing import Times
from grmoe.runs.config import TrainConfig
from grmoe.runs.config_groups import DataConfig, ElasticConfig
from grmoe.tables import Table
from grmoe.terminal import Progress, Steps, silent
from grmoe.train.setup import Learner, build_learner
from grmoe.train.step import InFlightStep, resolve, train_step

NAME = "training"
ZIPF = "Zipf"  # the name of tokens that were drawn
FP32, BF16 = 16, 8  # bytes per parameter: it, its gradient and two moments
ROOM = 0.85  # of the memory, for parameters and their states
CROWDED = 0.6  # from this share on, activations are recomputed
SETTLING = 0.25  # of the steps, before times, load and memory count
FACTS = {
    "B parameters": ".2f", "bytes per parameter": "g", "tokens/s": ",.0f", "MFU %": ".1f", "first loss": ".3f",
    "last loss": ".3f", "load CV": ".3f", "min load": ".3f",
}  # fmt: skip


@dataclass(frozen=True)
class Usual:
    """How long a preset trains here if nothing else is asked for."""

    batch: int
    steps: int


# Batches that fit beside the states. The larger one is, the less of a step the optimisers take.
DEFAULTS = {"350m": Usual(32, 300), "1.3b": Usual(16, 80), "2.7b": Usual(4, 40)}
SMALL = Usual(2, 20)

# Tokens of the paper's training: steps × sequences × tokens. It states no steps for the 2.7B: those of the 1.3B.
BATCH, LENGTH = 256, 1024
STEPS = {"350m": 100_000, "350m-fine": 100_000, "1.3b": 150_000, "1.3b-fine": 150_000, "2.7b": 150_000}


def benchmark(peak: float | None) -> Benchmark[ModelShape]:
    """`peak`: FLOP/s of the device, None for no MFU."""
    return Benchmark(
        name="scale",
        contenders=lambda shape, device, dtype, _: [Contender(NAME, lambda: Runs({}))],
        compare=lambda shape, rows: compare(shape, rows, peak),
        facts=FACTS,
        tables=tables,
    )


def run(
    plan: Plan[ModelShape],
    progress: Progress = silent,
    *,
    steps: int,
    form: str,
    data: Path | None = None,
    checkpointing: bool | None = None,
) -> list[Result]:
    """Train every shape for some steps, one after the other. results.json is written after each.

    form: eager, compiled or graphs. checkpointing: recompute activations; None: if memory is short.
    """
    checks.positive_int("steps", steps, at_least=4)
    checks.one_of("form", form, tuple(FORMS))
    text = None if data is None else TokenDataset(data)
    plan.out.mkdir(parents=True, exist_ok=True)
    report = Steps(progress, steps * len(plan.shapes))
    results: list[Result] = []
    for shape in plan.shapes:
        torch.compiler.reset()
        row = Row(NAME, "ours", "grmoe")
        with row.catching():
            train(row, shape, plan, steps, form, text, checkpointing, report)
        if row.failure is not None:
            row.times.clear()
        gc.collect()
        torch.cuda.empty_cache()
        result = plan.benchmark.compare(shape, [row])
        result.extra |= {"steps": steps, "form": form, "data": ZIPF if data is None else data.name}
        results.append(result)
        plan.write(results)
    return results


def train(
    row: Row,
    shape: ModelShape,
    plan: Plan[ModelShape],
    steps: int,
    form: str,
    text: TokenDataset | None,
    checkpointing: bool | None,
    report: Callable[[str], None],
) -> None:
    """All steps of one model. The row receives what was measured, and the loss of every step."""
    device = plan.device
    learner, size = build(shape, device, plan.dtype, steps, form, text, checkpointing)
    batches = (
        zipf(learner.model.config.vocab_size, shape)
        if text is None
        else text.batches(shape.batch, shape.length, SEED)
    )
    settled = math.ceil(SETTLING * steps)
    losses: list[float] = []
    marks: list[Any] = []
    previous: InFlightStep | None = None
    for step in range(steps):
        if step == settled:
            learner.model.reset_routing_metrics()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            marks.append(_mark(device))
        now = train_step(learner, step, next(batches))
        if previous is not None:  # as in the trainer's loop: the host is one step ahead
            losses.append(resolve(learner, previous, step).loss)
        if step >= settled:
            marks.append(_mark(device))
        previous = now
        report(f"{shape.preset}: step {step + 1}")
    assert previous is not None
    losses.append(resolve(learner, previous, steps).loss)
    load, cost = routing_figures(learner.model), learner.cost
    row.times[STEP] = Times([[_between(a, b) for a, b in pairwise(marks)]])
    row.peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    few = max(1, steps // 20)
    row.facts |= {
        "B parameters": cost.total / 1e9,
        "bytes per parameter": size,
        "checkpointing": float(learner.config.activation_checkpointing),
        "flops": cost.train_flops,
        "first loss": losses[0],
        "last loss": sum(losses[-few:]) / few,
        "load CV": load.load_cv,
        "min load": load.min_load,
        "collapsed": float(load.collapsed),
        "losses": cast(Any, [round(loss, 4) for loss in losses]),
    }


def build(
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    steps: int,
    form: str,
    text: TokenDataset | None,
    checkpointing: bool | None,
) -> tuple[Learner, int]:
    """The learner, and its bytes per parameter."""
    size, crowded = state_bytes(shape, memory_bytes(device))
    config = TrainConfig(
        steps=steps,
        seed=SEED,
        precision="bf16" if dtype == torch.bfloat16 else "fp32",
        compile=False,  # below
        activation_checkpointing=crowded if checkpointing is None else checkpointing,
        model={"preset": shape.preset, "hidden_act": shape.hidden_act},
        data=DataConfig(batch_size=shape.batch, sequence_length=shape.length),
        elastic=ElasticConfig(unit="off"),
    ).resolved()
    vocabulary = max(preset(shape.preset).vocab_size, 0 if text is None else text.vocab_size)
    model_config = config.model_config(vocabulary, 0 if text is None else text.end_of_text)
    world = World(0, 1, 0, device, None)
    masked = text is not None and text.masked
    learner = build_learner(config, world, model_config, shape.length, masked)
    if size == BF16:
        nn.Module.to(learner.model, torch.bfloat16)  # routers stay in fp32
    mode = FORMS[form][1]
    if mode is not None:
        learner.forward = torch.compile(learner.model, dynamic=False, mode=mode)
    return learner, size


def state_bytes(shape: ModelShape, memory: int) -> tuple[int, bool]:
    """(bytes per parameter, whether activations should be recomputed), for a device of this memory."""
    total = parameters(shape.config("grassmann"))
    size = FP32 if FP32 * total <= ROOM * memory else BF16
    return size, size * total > CROWDED * memory


def zipf(vocabulary: int, shape: ModelShape) -> Iterator[Tensor]:
    """Endless batches (B, S + 1) of independent tokens: token i has a probability ∝ 1/(i + 1)."""
    generator = torch.Generator().manual_seed(SEED)
    weights = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    rows, length = shape.batch, shape.length + 1
    while True:
        drawn = torch.multinomial(weights, rows * length, replacement=True, generator=generator)
        yield drawn.view(rows, length)


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(a: Any, b: Any) -> float:
    if isinstance(a, float):
        return 1e3 * (b - a)
    b.synchronize()
    return float(a.elapsed_time(b))


# -- comparing -------------------------------------------------------------------------------------------------


def compare(shape: ModelShape, rows: list[Row], peak: float | None) -> Result:
    """Tokens/s, MFU, and the GPU-hours of the paper's training at this rate."""
    result = Result(shape, rows, extra={"peak_flops": peak})
    for row in rows:
        if STEP not in row.times:
            continue
        rate = row.facts["tokens/s"] = 1e3 * shape.batch * shape.length / row.times[STEP].median
        if peak is not None:
            row.facts["MFU %"] = 100 * rate * row.facts["flops"] / peak
        if shape.preset in STEPS:
            result.extra["paper"] = budget(shape.preset, rate)
    return result


def budget(name: str, rate: float) -> dict[str, float]:
    """The paper's training of a preset at a rate in tokens/s: its tokens and the GPU-hours."""
    tokens = STEPS[name] * BATCH * LENGTH
    return {"steps": STEPS[name], "tokens": tokens, "gpu_hours": tokens / rate / 3600}


def tables(result: Result) -> list[Table]:
    if "paper" not in result.extra:
        return []
    paper = result.extra["paper"]
    table = Table("The paper's training at this rate", ["steps", "tokens", "GPU-hours", "GPU-days"], left=0)
    hours = paper["gpu_hours"]
    table.add(
        f"{paper['steps']:,.0f}", f"{paper['tokens'] / 1e9:.1f} G", f"{hours:,.0f}", f"{hours / 24:,.1f}"
    )
    return [table]
