"""Training a whole model: tokens/s, MFU and memory. Ours next to an equal Hugging Face Olmoe and our softmax twin.

A step is that of a plain loop: forward and backward under bf16 autocast with fp32 weights, gradient clipping, fused
AdamW. Ours adds the overlap penalty, `GrassmannAdam` and the balanced prior. The loop does not read the loss.
Each model runs eager, compiled, and compiled into CUDA graphs; the best form counts. `grmoe.bench.models` says how
the models are made equal.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from grmoe import attention, checks
from grmoe.bench.measure import SEED, WARM_UPS, Choice, Contender, Report, Result, Row, Runs
from grmoe.bench.models import FORMS, ModelShape, olmoe, ours
from grmoe.bench.run import Benchmark, Plan
from grmoe.bench.train_step import RATE, STEP, optimizers
from grmoe.kernels import runtime
from grmoe.model import GrmoeConfig, GrmoeForCausalLM, count
from grmoe.optim import step_together
from grmoe.probe.timing import Times, time_ratio
from grmoe.terminal import Progress, Steps, silent

OURS, SOFTMAX = "ours", "ours, softmax top-2"
CUDNN = "ours, cuDNN attention"  # a form of ours that is not measured yet
HUGGING_FACE, NO_MASK = "Hugging Face Olmoe", "Hugging Face Olmoe, no mask"
FACTS = {
    "M parameters": ".1f", "tokens/s": ",.0f", "MFU %": ".1f", "first loss": ".3f", "last loss": ".3f",
    "graphs": "g", "waits": "g",
}  # fmt: skip
CLIP = 1.0
OVERLAP_WEIGHT, OVERLAP_RHO = 0.01, 0.5
_SETTLING = 2  # steps of a turn before its clock starts: memory is allocated, the queue is full
_STATE_BYTES = 16  # a parameter, its gradient and two moments, fp32
_HELD_SHARE = 0.4  # of the device, for what all contenders hold; the rest is for one contender's activations


def benchmark(forms: tuple[str, ...], peak: float | None) -> Benchmark[ModelShape]:
    """`peak`: FLOP/s of the device, None for no MFU."""
    return Benchmark(
        name="train-model",
        contenders=lambda shape, device, dtype, _: contenders(shape, device, dtype, forms),
        compare=lambda shape, rows: compare(shape, rows, peak),
        facts=FACTS,
        lines=lines,
    )


def run(
    plan: Plan[ModelShape], progress: Progress = silent, *, steps: int, apart: bool | None
) -> list[Result]:
    """Measure round by round; results.json is written after each. `apart`: see `measure`. None: what fits."""
    (shape,) = plan.shapes
    listed = plan.contenders(shape)
    plan.out.mkdir(parents=True, exist_ok=True)
    apart = _too_large(shape, len(listed), plan.device) if apart is None else apart
    report = Steps(progress, plan.rounds * len(listed))
    results: list[Result] = []
    for rows in measure(listed, plan.device, plan.rounds, steps, apart, report):
        results = [plan.benchmark.compare(shape, rows)]
        plan.write(results)
    return results


# -- the loop --------------------------------------------------------------------------------------------------


def contenders(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, forms: tuple[str, ...]
) -> list[Contender]:
    """Every model in each of the `forms`, names of FORMS."""
    listed = []
    for form in forms:
        end, mode = FORMS[checks.one_of("form", form, tuple(FORMS))]
        train = partial(_train_runs, shape, device, dtype, mode)
        for name, kernel in ((HUGGING_FACE, "sdpa"), (NO_MASK, "sdpa_no_mask")):
            build = partial(train, "softmax", partial(olmoe, attention=kernel))
            listed.append(Contender(name + end, build, "peer", "transformers"))
        for name, router in ((OURS, "grassmann"), (SOFTMAX, "softmax")):
            listed.append(Contender(name + end, partial(train, router, ours)))
        if device.type == "cuda" and runtime.is_hopper(device):  # elsewhere nothing would differ
            build = partial(_chosen_runs, partial(train, "grassmann", ours), (attention, "CUDNN", True))
            listed.append(Contender(CUDNN + end, build))
    return listed


def _chosen_runs(build: Callable[[], Runs], *choices: Choice) -> Runs:
    return build().with_choice(*choices)


def _train_runs(
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    mode: str | None,
    router: str,
    build: Callable[[GrmoeConfig], nn.Module],
) -> Runs:
    """A model that trains on one batch. A step returns its loss, still on the device."""
    config = shape.config(router)
    torch.manual_seed(SEED)
    ids_BS = torch.randint(config.vocab_size, (shape.batch, shape.length)).to(device)
    with torch.device(device):
        model = build(config).train()
    # Only one shape is timed: a graph for all shapes would be slower.
    forward = model if mode is None else torch.compile(model, dynamic=False, mode=mode)
    steppers = optimizers(model)
    parameters = list(model.parameters())
    options = {"skip_logits": True} if isinstance(model, GrmoeForCausalLM) else {}  # as our trainer calls it

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss: Tensor = forward(input_ids=ids_BS, labels=ids_BS, use_cache=False, **options).loss
        if isinstance(model, GrmoeForCausalLM):
            penalty = model.overlap_penalty(OVERLAP_RHO, num_pairs="auto")
            (loss + OVERLAP_WEIGHT * penalty).backward()
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        step_together(steppers)
        for optimizer in steppers:
            optimizer.zero_grad(set_to_none=True)
        if isinstance(model, GrmoeForCausalLM):
            model.update_priors(RATE)
        return loss.detach()

    total = sum(p.numel() for p in parameters)
    return Runs(
        {STEP: step}, facts={"M parameters": total / 1e6, "flops": count(config, shape.length).train_flops}
    )


# -- measuring -------------------------------------------------------------------------------------------------


def measure(
    contenders: list[Contender], device: torch.device, rounds: int, steps: int, apart: bool, report: Report
) -> Iterator[list[Row]]:
    """Yield the rows after each round. In a round each contender takes `steps` steps.

    apart: build a contender for its turn and free it afterwards, for models that do not fit in memory together.
    """
    rows = [Row(c.name, c.kind, c.library) for c in contenders]
    held: dict[str, Runs] = {}
    torch.compiler.reset()
    for i in range(rounds):
        for row, contender in zip(rows, contenders, strict=True):
            if row.failure is None:
                with row.catching():
                    if row.name not in held:
                        held[row.name] = start(row, contender, device)
                    times, loss = _step_times(held[row.name].timed[STEP], steps, device)
                    checks.require(math.isfinite(loss), f"loss must be finite, got {loss}")
                    row.facts["last loss"] = loss
                    row.times.setdefault(STEP, Times()).rounds.append(times)
            if row.failure is not None:
                row.times.clear()  # an incomplete measurement does not count
            if apart:
                torch.compiler.reset()  # otherwise each new model adds its graphs, up to Dynamo's limit
            if apart or row.failure is not None:
                held.pop(row.name, None)
                gc.collect()
                torch.cuda.empty_cache()
            report(f"round {i + 1}, {row.name}")
        yield rows


def start(row: Row, contender: Contender, device: torch.device) -> Runs:
    """Build and warm up a contender. The row receives its first loss, graphs, waits and memory."""
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    counters.clear()
    runs = contender.build()
    step = runs.timed[STEP]
    row.facts |= runs.facts | {"first loss": _value(step())}
    for _ in range(WARM_UPS[device.type]):
        step()
    if row.name.endswith(tuple(end for end, mode in FORMS.values() if mode)):
        row.facts["graphs"] = counters["stats"]["unique_graphs"]
    if cuda:
        row.facts["waits"] = _count_waits(step)
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        row.peak = torch.cuda.max_memory_allocated() - before
    return runs


def _step_times(step: Callable[[], object], steps: int, device: torch.device) -> tuple[list[float], float]:
    """Milliseconds of each step of a loop, and the last loss.

    On a GPU the times are between events after each step, so idle time counts if the host is too slow.
    """
    if device.type != "cuda":
        marks = [perf_counter()]
        for _ in range(steps):
            loss = step()
            marks.append(perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(marks)], _value(loss)
    for _ in range(_SETTLING):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)], _value(loss)


def _count_waits(step: Callable[[], object]) -> int:
    """How often the host waits for the device during a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(w.message) for w in caught)


def _too_large(shape: ModelShape, contenders: int, device: torch.device) -> bool:
    """Whether this many models and their optimisers leave too little memory for a step."""
    if device.type != "cuda":
        return False
    held = _STATE_BYTES * count(shape.config()).total * contenders  # frames are a small part
    return held > _HELD_SHARE * torch.cuda.get_device_properties(device).total_memory


def _value(loss: object) -> float:
    assert isinstance(loss, Tensor)
    if torch.cuda.is_available():  # a copy to the host may be under way
        torch.cuda.synchronize()
    return float(loss)


# -- comparing -------------------------------------------------------------------------------------------------


def compare(shape: ModelShape, rows: list[Row], peak: float | None) -> Result:
    """`peak`: FLOP/s of the device, None for no MFU."""
    result = Result(shape, rows, extra={"peak_flops": peak})
    for row in rows:
        if STEP in row.times:
            rate = row.facts["tokens/s"] = 1e3 * shape.batch * shape.length / row.times[STEP].median
            if peak is not None:
                row.facts["MFU %"] = 100 * rate * row.facts["flops"] / peak
    ours_row, softmax_row = best(result, OURS), best(result, SOFTMAX)
    for name in (HUGGING_FACE, NO_MASK):
        if ours_row and (peer := best(result, name)):
            text = f"tokens/s, {ours_row.name} over {peer.name}"
            result.ratios.append(time_ratio(text, peer.times[STEP], ours_row.times[STEP]))
    if ours_row and (form := best(result, CUDNN)):
        text = f"tokens/s, {form.name} over {ours_row.name}"
        result.ratios.append(time_ratio(text, ours_row.times[STEP], form.times[STEP]))
    if ours_row and softmax_row:
        text = f"tokens/s, {ours_row.name} over {softmax_row.name}"
        result.ratios.append(time_ratio(text, softmax_row.times[STEP], ours_row.times[STEP], "excess"))
    return result


def best(result: Result, name: str) -> Row | None:
    """The fastest form of a model."""
    names = [name + end for end, _ in FORMS.values()]
    forms = [row for row in result.rows if row.name in names and STEP in row.times]
    return min(forms, key=lambda row: row.times[STEP].median, default=None)


def lines(result: Result) -> list[str]:
    """The best form of each model, in tokens/s with its spread."""
    written = []
    for row in [best(result, name) for name in (HUGGING_FACE, NO_MASK, OURS, CUDNN, SOFTMAX)]:
        if row is None:
            continue
        rate, (low, high) = row.facts["tokens/s"], row.times[STEP].interval
        scale = rate * row.times[STEP].median
        mfu = f", MFU {row.facts['MFU %']:.1f} %" if "MFU %" in row.facts else ""
        written.append(f"{row.name}: {rate:,.0f} tokens/s ({scale / high:,.0f}–{scale / low:,.0f}){mfu}")
    for row in result.rows:
        if row.times and row.facts["last loss"] > row.facts["first loss"]:
            written.append(f"{row.name}: its loss rose, so it does not train")
    if result.extra["peak_flops"] is None:
        written.append("No MFU: it needs bf16 and a device with a known peak.")
    return written
