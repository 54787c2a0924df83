"""What random budgets cost in training, and that a turned budget compiles and captures nothing.

Three contenders take turns in one process, each a step of the trainer itself (`grmoe.train.step`): forward, backward,
clipping, both optimisers, priors. On a GPU the model is compiled into CUDA graphs.

    off                     all budgets full, nothing is drawn
    elastic                 random budgets. Fewer experts are computed, so that it may be faster than "off".
    elastic, full budgets   the same compiled model, told to use the full budget: what the drawing itself costs

Then τ, cap and α are turned on the compiled model, in training steps and in prefill, while compilations and captures
of CUDA graphs are counted. Tokens are random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from grmoe.bench.measure import SEED, Contender, Result, Row, Runs
from grmoe.bench.models import FORMS, ModelShape
from grmoe.bench.run import Benchmark, Plan
from grmoe.bench.train_model import measure
from grmoe.bench.train_step import STEP
from grmoe.model import preset
from grmoe.parallel.world import World
from grmoe.probe.timing import WARM_UPS, time_ratio
from grmoe.routing import routers
from grmoe.runs.config import TrainConfig
from grmoe.runs.config_groups import DataConfig, ElasticConfig
from grmoe.terminal import Progress, Steps, silent
from grmoe.train.setup import Learner, build_learner
from grmoe.train.step import InFlightStep, resolve, train_step

OFF, ELASTIC, FULL = "off", "elastic", "elastic, full budgets"
FACTS = {"tokens/s": ",.0f", "MFU %": ".1f", "experts": ".3f", "graphs": "g", "waits": "g"}
BATCHES = 4  # of random tokens, in turns
# (τ, share of the room that is the cap, α)
TURNS = ((1.0, 1.0, 1.0), (0.3, 1.0, 1.0), (0.6, 1.0, 1.0), (1.0, 0.5, 1.0), (1.0, 1.0, 3.0), (0.6, 1.0, 0.5))


@dataclass
class Training:
    """A learner, and the steps it has taken."""

    learner: Learner
    batches: list[Tensor]
    done: int = 0
    previous: InFlightStep | None = None

    def step(self, full_share: float) -> Tensor:
        """One step, and as in the trainer's loop the numbers of the one before. Returns the loss, on its way here."""
        config = self.learner.config
        if full_share != config.elastic.full_share:
            self.learner.config = replace(config, elastic=replace(config.elastic, full_share=full_share))
        now = train_step(self.learner, self.done, self.batches[self.done % len(self.batches)])
        if self.previous is not None:
            resolve(self.learner, self.previous, self.done)
        self.previous, self.done = now, self.done + 1
        return now.numbers_5[0]

    def experts(self, full_share: float) -> float:
        """Experts computed per token in a few more steps, the mean over layers."""
        self.learner.model.reset_routing_metrics()
        for _ in range(len(self.batches)):
            self.step(full_share)
        return fmean(router.counter.read().experts_per_token for router in routers(self.learner.model))


@dataclass
class Compilations:
    """What happened inside `counted`."""

    recompiles: int = 0
    """Functions that torch.compile traced."""
    captures: int = 0
    """CUDA graphs that were captured."""


@contextmanager
def counted() -> Iterator[Compilations]:
    """Count the compilations and captures that happen inside."""
    found, graph, before = Compilations(), torch.cuda.CUDAGraph, counters["frames"]["total"]
    begin = graph.capture_begin

    def capture_begin(*given: Any, **named: Any) -> None:
        found.captures += 1
        begin(*given, **named)

    graph.capture_begin = capture_begin  # type: ignore[method-assign]
    try:
        yield found
    finally:
        graph.capture_begin = begin  # type: ignore[method-assign]
        found.recompiles = counters["frames"]["total"] - before


def benchmark(elastic: ElasticConfig, compiled: bool, peak: float | None) -> Benchmark[ModelShape]:
    """`peak`: FLOP/s of the device, None for no MFU."""
    return Benchmark(
        name="elastic",
        contenders=lambda shape, device, dtype, _: contenders(shape, device, dtype, elastic, compiled)[0],
        compare=lambda shape, rows: compare(shape, rows, peak),
        facts=FACTS,
        lines=lines,
    )


def run(
    plan: Plan[ModelShape], progress: Progress = silent, *, steps: int, elastic: ElasticConfig, compiled: bool
) -> list[Result]:
    """Measure round by round, then turn the budget. results.json is written after each round."""
    (shape,) = plan.shapes
    listed, training = contenders(shape, plan.device, plan.dtype, elastic, compiled)
    plan.out.mkdir(parents=True, exist_ok=True)
    report = Steps(progress, plan.rounds * len(listed) + 2 * compiled)
    rounds = measure(listed, plan.device, plan.rounds, steps, False, report)
    rows = next(rounds)  # everything is built and compiled here
    result = plan.benchmark.compare(shape, rows)
    plan.write([result])
    with counted() as later:
        for rows in rounds:
            result = plan.benchmark.compare(shape, rows)
            plan.write([result])
    if compiled and all(row.failure is None for row in rows):
        turned = result.extra["turning"] = {"random budgets, later rounds": asdict(later)}
        for name, turn in (("training", turn_training), ("prefill", turn_prefill)):
            turned[name] = turn(training(True))
            plan.write([result])
            report(f"turning the budget in {name}")
    return [result]


# -- the steps -------------------------------------------------------------------------------------------------


def contenders(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, elastic: ElasticConfig, compiled: bool
) -> tuple[list[Contender], Callable[[bool], Training]]:
    """The contenders, and the training that they share: without random budgets, and with them."""

    @cache
    def training(draws: bool) -> Training:
        config = train_config(
            shape, dtype, elastic if draws else ElasticConfig(unit="off"), compiled
        ).resolved()
        model = preset(shape.preset)
        model_config = config.model_config(model.vocab_size, 0)
        world = World(0, 1, 0, device, None)
        learner = build_learner(config, world, model_config, shape.length)
        torch.manual_seed(SEED)
        size = (BATCHES, shape.batch, shape.length + 1)
        return Training(learner, list(torch.randint(model.vocab_size, size)))

    def build(draws: bool, full_share: float) -> Runs:
        built = training(draws)
        experts = built.experts(full_share)
        facts = {"experts": experts, "flops": built.learner.cost.train_flops_at(experts)}
        return Runs({STEP: lambda: built.step(full_share)}, facts=facts)

    graphs = compiled and device.type == "cuda"
    end = FORMS["graphs" if graphs else "compiled" if compiled else "eager"][0]
    listed = [
        Contender(OFF + end, lambda: build(False, 0.0)),
        Contender(ELASTIC + end, lambda: build(True, elastic.full_share)),
        Contender(FULL + end, lambda: build(True, 1.0)),
    ]
    return listed, training


def train_config(
    shape: ModelShape, dtype: torch.dtype, elastic: ElasticConfig, compiled: bool
) -> TrainConfig:
    """The trainer's own defaults for everything else."""
    return TrainConfig(
        precision="bf16" if dtype == torch.bfloat16 else "fp32",
        seed=SEED,
        compile=compiled,
        model={"preset": shape.preset, "hidden_act": shape.hidden_act},
        data=DataConfig(batch_size=shape.batch, sequence_length=shape.length),
        elastic=elastic,
    )


# -- turning the budget ----------------------------------------------------------------------------------------


def turn_training(training: Training) -> dict[str, Any]:
    """Training steps with the full budget at every one of TURNS."""
    return _turn(training, lambda: training.step(1.0))


def turn_prefill(training: Training) -> dict[str, Any]:
    """The logits of the last position of a batch, at every one of TURNS, from the model in eval mode."""
    learner = training.learner
    device = learner.world.device
    model = learner.model.eval()
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    forward = torch.compile(model, dynamic=False, mode=mode)
    ids_BS = training.batches[0][:, :-1].to(device)

    def prefill() -> object:
        with torch.no_grad(), learner.autocast():
            return forward(input_ids=ids_BS, use_cache=False, logits_to_keep=1).logits

    try:
        return _turn(training, prefill)
    finally:
        model.train()


def _turn(training: Training, call: Callable[[], object]) -> dict[str, Any]:
    """Call at every one of TURNS. Calls before that compile and capture, and are not counted."""
    model, settings = training.learner.model, []
    found = routers(model)
    room = found[0].budget.room
    for _ in range(1 + WARM_UPS):
        call()
    with counted() as compilations:
        for tau, share, alpha in TURNS:
            cap = max(1, round(share * room))
            for router in found:
                router.tau, router.cap, router.alpha = tau, cap, alpha
            model.reset_routing_metrics()
            call()
            experts = fmean(router.counter.read().experts_per_token for router in found)
            settings.append({"tau": tau, "cap": cap, "alpha": alpha, "experts_per_token": experts})
    for router in found:
        router.selection, router.alpha = router.selection, 1.0
    return asdict(compilations) | {"settings": settings}


# -- comparing -------------------------------------------------------------------------------------------------


def compare(shape: ModelShape, rows: list[Row], peak: float | None) -> Result:
    """Tokens/s of both kinds of elastic steps over those without; `peak`: FLOP/s of the device, None for no MFU."""
    result = Result(shape, rows, extra={"peak_flops": peak})
    timed = [row for row in rows if STEP in row.times]
    for row in timed:
        rate = row.facts["tokens/s"] = 1e3 * shape.batch * shape.length / row.times[STEP].median
        if peak is not None:
            row.facts["MFU %"] = 100 * rate * row.facts["flops"] / peak
    for row in timed[1:] if timed and timed[0] is rows[0] else ():
        text = f"tokens/s, {row.name} over {rows[0].name}"
        result.ratios.append(time_ratio(text, rows[0].times[STEP], row.times[STEP], "excess"))
    return result


def lines(result: Result) -> list[str]:
    """Compilations and captures, in words."""
    if "turning" not in result.extra:
        return ["Not compiled, or a contender failed: nothing was counted while the budget turned."]
    written = []
    for name, found in result.extra["turning"].items():
        experts = [each["experts_per_token"] for each in found.get("settings", [])]
        spread = ""
        if experts:
            spread = f", {len(experts)} budgets of {min(experts):.2f} to {max(experts):.2f} experts"
        counts = f"{found['recompiles']} recompiles, {found['captures']} graph captures"
        written.append(f"{name}{spread}: {counts}")
    return written
