"""Where the time of a model goes: attention, routing, experts and the rest, in a forward and in a training step.

Parts come from ranges (`grmoe.bench.ranges`). The whole model is timed as well, without ranges and in its fastest form,
because that is what a user runs. The two differ: parts are compiled one by one, and each range takes a little time.
Both are in the table, so that a reader sees how far the parts can be trusted.

forward   eval mode, weights in the benchmark's dtype, with the loss over all positions
step      as in `grmoe.bench.train_model`: autocast, clipping, both optimisers, overlap penalty, priors

The routers take turns. `amortized` is the Grassmann gate with our network on the energies; the paper's reads the token.
`matrix` has a network on the token that mixes the energies by an N × N matrix, which the paper tried and rejected.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.bench.measure import SEED, WARM_UPS, Result, Row
from grmoe.bench.models import FORMS, ModelShape, ours
from grmoe.bench.ranges import PARTS, UPDATE, Marks, ranges
from grmoe.bench.run import Benchmark, Plan
from grmoe.bench.slowest import Kernel, slowest
from grmoe.bench.slowest import table as kernel_table
from grmoe.bench.train_model import CLIP, OVERLAP_RHO, OVERLAP_WEIGHT
from grmoe.bench.train_step import RATE, optimizers
from grmoe.model import GrmoeConfig, GrmoeForCausalLM, count
from grmoe.optim import step_together
from grmoe.probe.timing import Ratio, Timer, Times, quantile
from grmoe.tables import Table
from grmoe.terminal import Progress, Steps, silent

FORWARD, STEP = "forward", "step"
PASSES = (FORWARD, STEP)
GRASSMANN, SOFTMAX, AMORTIZED, MATRIX = "grassmann", "softmax", "amortized", "matrix"
NAMES = {
    GRASSMANN: "Grassmann gate",
    SOFTMAX: "softmax gate",
    AMORTIZED: "amortised gate",
    MATRIX: "matrix gate",
}
ROUTERS = (GRASSMANN, SOFTMAX, AMORTIZED)  # unless others are named
_NETWORKS = {AMORTIZED: "affinity", MATRIX: "matrix"}
CALLS = {"cpu": 1, "cuda": 10}  # passes with ranges in a turn
_STATE_BYTES = 16  # a parameter, its gradient and two moments, fp32
_HELD_SHARE = 0.4  # of the device, for what all models hold

# The paper's table, `350m`, 16 × 1024 tokens, forward, ms: softmax top-2, and GrMoE with its amortiser.
PAPER: dict[str, dict[str, float]] = {
    SOFTMAX: {"attention": 4.2, "routing": 0.3, "experts": 7.1, "rest": 0.8},
    AMORTIZED: {"attention": 4.2, "routing": 0.4, "experts": 7.1, "rest": 0.8},
}


def benchmark() -> Benchmark[ModelShape]:
    return Benchmark(
        name="breakdown",
        contenders=lambda shape, device, dtype, _: [],
        compare=Result,
        facts={"M parameters": ".1f"},
        tables=tables,
    )


def router_config(shape: ModelShape, router: str) -> GrmoeConfig:
    checks.one_of("router", router, tuple(NAMES))
    config = shape.config("softmax" if router == SOFTMAX else "grassmann")
    if router in _NETWORKS:
        config.router_options = {**(config.router_options or {}), "amortizer": _NETWORKS[router]}
    return config


# -- models that are measured ----------------------------------------------------------------------------------


@dataclass
class Subject:
    """One model in one of two forms: whole and fast, or with ranges. Both forms of a router share their row."""

    router: str
    kind: str
    """"forward" or "step"."""
    ranged: bool
    row: Row
    parts: list[dict[str, float]]
    """ms by part, pass by pass."""
    run: Callable[[], object] | None = None
    """None before it is built and after it is freed."""
    held: ExitStack = field(default_factory=ExitStack)

    @property
    def name(self) -> str:
        return f"{self.row.name}, {self.kind}, {'parts' if self.ranged else 'whole'}"

    def build(
        self, shape: ModelShape, device: torch.device, dtype: torch.dtype, form: str, marks: Marks
    ) -> None:
        config = router_config(shape, self.router)
        mode = FORMS[form][1]
        torch.manual_seed(SEED)
        ids_BS = torch.randint(config.vocab_size, (shape.batch, shape.length)).to(device)
        with torch.device(device):
            model = ours(config)
        forward: Callable[..., Any] = model
        if self.ranged:
            self.held.enter_context(ranges(model, marks, compiled=mode is not None))
        elif mode is not None:
            forward = torch.compile(model, dynamic=False, mode=mode)
        if self.kind == FORWARD:
            nn.Module.to(model.eval(), dtype)  # routers stay in fp32
            self.run = partial(_forward, forward, ids_BS)
        else:
            self.run = _step(model.train(), forward, ids_BS, dtype, marks if self.ranged else None)
        self.row.facts["M parameters"] = sum(p.numel() for p in model.parameters()) / 1e6
        for _ in range(WARM_UPS[device.type]):
            self.run()

    def measure(self, device: torch.device, marks: Marks, timer: Timer) -> None:
        """One more turn."""
        assert self.run is not None
        if self.ranged:
            self.parts += [marks.times(self.run) for _ in range(CALLS[device.type])]
        else:
            self.row.times.setdefault(self.kind, Times()).add(timer, self.run)

    def free(self) -> None:
        self.run = None
        self.held.close()
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


@torch.no_grad()
def _forward(forward: Callable[..., Any], ids_BS: Tensor) -> Tensor:
    loss: Tensor = forward(input_ids=ids_BS, labels=ids_BS, use_cache=False, skip_logits=True).loss
    return loss


def _step(
    model: GrmoeForCausalLM,
    forward: Callable[..., Any],
    ids_BS: Tensor,
    dtype: torch.dtype,
    marks: Marks | None,
) -> Callable[[], Tensor]:
    """The step of `train_model`. With marks, what follows the backward is a part."""
    kind, steppers, parameters = ids_BS.device.type, optimizers(model), list(model.parameters())

    def step() -> Tensor:
        with torch.autocast(kind, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss: Tensor = forward(input_ids=ids_BS, labels=ids_BS, use_cache=False, skip_logits=True).loss
        penalty = model.overlap_penalty(OVERLAP_RHO, num_pairs="auto")
        (loss + OVERLAP_WEIGHT * penalty).backward()
        if marks is not None:
            marks.begin(UPDATE)
        nn.utils.clip_grad_norm_(parameters, CLIP)
        step_together(steppers)
        for optimizer in steppers:
            optimizer.zero_grad(set_to_none=True)
        model.update_priors(RATE)
        return loss.detach()

    return step


# -- measuring -------------------------------------------------------------------------------------------------


def run(
    plan: Plan[ModelShape],
    progress: Progress = silent,
    *,
    routers: tuple[str, ...],
    passes: tuple[str, ...],
    form: str,
    whole: bool = True,
    kernels: int = 0,
) -> list[Result]:
    """Measure all models in turns, or one after the other if they do not fit in memory together.

    form: of the whole model. In "compiled" and "graphs" the parts are compiled one by one.
    whole: measure the whole model too.
    kernels: how many of the whole model's slowest kernels are listed.
    """
    (shape,) = plan.shapes
    checks.one_of("form", form, tuple(FORMS))
    rows = {router: Row(NAMES[router], "ours", "grmoe") for router in routers}
    parts: dict[tuple[str, str], list[dict[str, float]]] = {(r, k): [] for r in routers for k in passes}
    listed: dict[str, list[Kernel]] = {}
    subjects = [
        Subject(router, kind, ranged, rows[router], parts[router, kind])
        for kind in passes
        for router in routers
        for ranged in ((True, False) if whole else (True,))
    ]
    plan.out.mkdir(parents=True, exist_ok=True)
    steps = Steps(progress, len(subjects) * (1 + plan.rounds))
    marks, timer = Marks(plan.device), Timer(plan.device)
    empty = marks.empty_ms()

    def build(subject: Subject) -> None:
        if subject.row.failure is None:
            with subject.row.catching():
                subject.build(shape, plan.device, plan.dtype, form, marks)
        steps(f"building {subject.name}")

    def turn(subject: Subject) -> None:
        if subject.row.failure is None:
            with subject.row.catching():
                subject.measure(plan.device, marks, timer)
        steps(f"timing {subject.name}")

    def result() -> Result:
        found = Result(shape, list(rows.values()))
        found.extra = {"form": form, "empty_range_ms": empty, "parts": _summary(parts), "kernels": listed}
        return found

    torch.compiler.reset()
    for group in _groups(subjects, shape, plan.device):
        for subject in group:
            build(subject)
        for _ in range(plan.rounds):
            for subject in group:
                turn(subject)
        for subject in group:
            if kernels and subject.run is not None and not subject.ranged:
                listed[f"{subject.row.name}, {subject.kind}"] = slowest(subject.run, plan.device, kernels)
        for subject in reversed(group):  # the last one's settings of the compiler end first
            subject.free()
        plan.write([compare(result())])
    return [compare(result())]


def _groups(subjects: list[Subject], shape: ModelShape, device: torch.device) -> list[list[Subject]]:
    """Models that are in memory at the same time: all of one kind, or one."""
    if device.type != "cuda":
        return [subjects]
    total, memory = count(shape.config()).total, torch.cuda.get_device_properties(device).total_memory
    groups = []
    for kind in dict.fromkeys(subject.kind for subject in subjects):
        same = [subject for subject in subjects if subject.kind == kind]
        held = (_STATE_BYTES if kind == STEP else 2) * total * len(same)
        groups += [same] if held < _HELD_SHARE * memory else [[subject] for subject in same]
    return groups


def _summary(parts: dict[tuple[str, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Medians and the middle 80 % by router, kind and part."""
    found = []
    for (router, kind), passes in parts.items():
        if not passes:
            continue
        totals = [sum(each.values()) for each in passes]
        entry: dict[str, Any] = {"router": router, "pass": kind, "passes": len(passes)}
        entry["total_ms"] = statistics.median(totals)
        entry["parts"] = {
            part: {
                "median_ms": statistics.median(times),
                "p10_ms": quantile(times, 0.1),
                "p90_ms": quantile(times, 0.9),
                "share": statistics.median(times) / entry["total_ms"],
            }
            for part in PARTS
            if any(times := [each[part] for each in passes])
        }
        found.append(entry)
    return found


# -- comparing -------------------------------------------------------------------------------------------------


def compare(result: Result) -> Result:
    """Times of the routers over those of the softmax gate: of the whole, and of the part that routes.

    The part of the matrix gate is compared with that of the amortised gate as well.
    """
    softmax = NAMES[SOFTMAX]
    for row in result.rows:
        for kind in PASSES:
            if row.name != softmax:
                result.add_ratio(f"{row.name} over {softmax}, {kind}", row.name, softmax, kind, "excess")
    for kind in PASSES:
        result.add_ratio(
            f"{NAMES[AMORTIZED]} over {NAMES[GRASSMANN]}, {kind}",
            NAMES[AMORTIZED],
            NAMES[GRASSMANN],
            kind,
            "excess",
        )
    found = {(e["router"], e["pass"]): e["parts"] for e in result.extra["parts"]}
    pairs = [(router, SOFTMAX) for router in NAMES if router != SOFTMAX] + [(MATRIX, AMORTIZED)]
    for kind in PASSES:
        for router, other in pairs:
            if (router, kind) in found and (other, kind) in found:
                mine, theirs = (found[each, kind]["routing"]["median_ms"] for each in (router, other))
                result.ratios.append(Ratio(routing_name(router, other, kind), mine / theirs))
    return result


def routing_name(router: str, other: str, kind: str) -> str:
    """Name of the ratio of two routing parts."""
    return f"routing, {NAMES[router]} / {NAMES[other]}, {kind}"


def tables(result: Result) -> list[Table]:
    """ms and shares by part, and beside the forward the paper's shares. Then the slowest kernels, if asked for."""
    kinds = [kind for kind in PASSES if any(e["pass"] == kind for e in result.extra["parts"])]
    listed = result.extra.get("kernels", {})
    return [
        *(_table(result, kind) for kind in kinds),
        *(kernel_table(f"{name}: slowest kernels", kernels) for name, kernels in listed.items()),
    ]


def _table(result: Result, kind: str) -> Table:
    entries = [e for e in result.extra["parts"] if e["pass"] == kind]
    paper = [r for r in (SOFTMAX, AMORTIZED) if kind == FORWARD]
    headings = ["part", *(f"{NAMES[e['router']]} ms" for e in entries)]
    headings += [f"paper's share, {NAMES[r]}" for r in paper]
    table = Table(f"{kind}, parts one by one ({result.extra['form']})", headings)
    for part in PARTS:
        if any(part in e["parts"] for e in entries):
            cells = [_cell(e["parts"].get(part)) for e in entries]
            table.add(part, *cells, *(_paper_share(r, part) for r in paper))
    table.end_section()
    table.add("sum", *(f"{e['total_ms']:.2f}" for e in entries), *("100 %" for _ in paper))
    rows = {row.name: row for row in result.rows}
    wholes = [rows[NAMES[e["router"]]].times.get(kind) for e in entries]
    if any(wholes):
        cells = ["–" if times is None else f"{times.median:.2f}" for times in wholes]
        table.add("the whole model, no ranges", *cells, *("" for _ in paper))
    empty = f"{1e3 * result.extra['empty_range_ms']:.1f} µs"
    table.add("an empty range takes", *(empty for _ in entries), *("" for _ in paper))
    return table


def _cell(part: dict[str, float] | None) -> str:
    return "–" if part is None else f"{part['median_ms']:.3f} ({100 * part['share']:.1f} %)"


def _paper_share(router: str, part: str) -> str:
    times = PAPER[router]
    return f"{100 * times[part] / sum(times.values()):.1f} %" if part in times else "–"
