"""Speed of whole models next to other libraries: `grmoe bench`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grmoe.cli.bench import Contenders, Dtype, Out, Rounds, finish
from grmoe.cli.options import Device
from grmoe.cli.shell import shell

if TYPE_CHECKING:  # it takes seconds to import
    import torch

Preset = Annotated[
    str | None, typer.Option(help="A preset of `grmoe info`.", show_default="350m on a GPU, tiny on a CPU")
]
Batch = Annotated[int | None, typer.Option(min=1, help="Sequences.", show_default="16 on a GPU, 2 on a CPU")]
Length = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens per sequence.",
        show_default="1024 on a GPU, 128 on a CPU, at most the preset's context",
    ),
]
Form = Annotated[
    str | None,
    typer.Option(
        help="eager, compiled or graphs (compiled into CUDA graphs).",
        show_default="graphs on a GPU, eager on a CPU",
    ),
]
StepsPerTurn = Annotated[int, typer.Option(min=1, help="Training steps per turn.")]
Turns = Annotated[int, typer.Option(min=1, help="Turns of each contender.")]


def machine(device: str, dtype: str | None) -> tuple[torch.device, torch.dtype, float | None]:
    """The device, its dtype, and the FLOP/s it can reach; None where MFU has no meaning."""
    import torch

    from grmoe.bench.run import find_dtype
    from grmoe.hardware import peak_flops, use_device

    where = use_device(device)
    precision = find_dtype(dtype, where)
    return where, precision, peak_flops(where) if precision == torch.bfloat16 else None


def usual_form(form: str | None, where: torch.device) -> str:
    return form or ("graphs" if where.type == "cuda" else "eager")


def train_model(
    preset: Preset = None,
    batch: Batch = None,
    length: Length = None,
    hidden_act: Annotated[
        str | None,
        typer.Option(help="Activation of all contenders: silu (gated) or gelu.", show_default="the preset's"),
    ] = None,
    form: Annotated[
        list[str] | None,
        typer.Option(
            help="eager, compiled or graphs (compiled into CUDA graphs). Repeatable.",
            show_default="all on a GPU, eager on a CPU",
        ),
    ] = None,
    apart: Annotated[
        bool | None,
        typer.Option(
            "--apart/--together",
            help="Build and free each contender in every round, or hold all in memory.",
            show_default="together if they fit",
        ),
    ] = None,
    steps: StepsPerTurn = 10,
    dtype: Dtype = None,
    device: Device = "auto",
    rounds: Turns = 5,
    contender: Contenders = None,
    out: Out = Path("runs/bench/train-model"),
) -> None:
    """Measure training of a whole model, tokens/s and MFU, next to an equal Hugging Face Olmoe and our softmax top-2.

    Example: [bold]grmoe bench train-model --preset 350m --batch 16 --length 1024[/]
    """
    with shell("lm", "studies"):
        from grmoe.bench import train_model as bench
        from grmoe.bench.models import FORMS, ModelShape
        from grmoe.bench.run import Plan

        where, precision, peak = machine(device, dtype)
        forms = tuple(form or (FORMS if where.type == "cuda" else ("eager",)))
        plan = Plan(
            benchmark=bench.benchmark(forms, peak),
            shapes=[ModelShape.on(where, preset, batch, length, hidden_act)],
            device=where,
            dtype=precision,
            rounds=rounds,
            out=out,
            wanted=contender or [],
        )
        finish(plan, partial(bench.run, steps=steps, apart=apart))


def elastic(
    preset: Preset = None,
    batch: Batch = None,
    length: Length = None,
    unit: Annotated[
        str, typer.Option(help="token, sequence, layer or step: what gets a budget of its own.")
    ] = "token",
    rule: Annotated[str, typer.Option(help="mass or count: what is random.")] = "mass",
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled/--eager", help="As the trainer does on a GPU (there with CUDA graphs), or not."
        ),
    ] = True,
    steps: StepsPerTurn = 10,
    dtype: Dtype = None,
    device: Device = "auto",
    rounds: Turns = 10,
    out: Out = Path("runs/bench/elastic"),
) -> None:
    """Measure what random budgets cost in training, and count what a turned budget compiles and captures.

    Example: [bold]grmoe bench elastic --preset 350m --batch 16 --length 1024[/]
    """
    with shell("lm", "studies"):
        from grmoe.bench import elastic as bench
        from grmoe.bench.models import ModelShape
        from grmoe.bench.run import Plan
        from grmoe.config import from_dict
        from grmoe.runs.config_groups import ElasticConfig

        where, precision, peak = machine(device, dtype)
        drawn = from_dict(ElasticConfig, {"unit": unit, "rule": rule})
        plan = Plan(
            benchmark=bench.benchmark(drawn, compiled, peak),
            shapes=[ModelShape.on(where, preset, batch, length)],
            device=where,
            dtype=precision,
            rounds=rounds,
            out=out,
        )
        finish(plan, partial(bench.run, steps=steps, elastic=drawn, compiled=compiled))


def prefill(
    preset: Preset = None,
    batch: Batch = None,
    length: Length = None,
    form: Form = None,
    dtype: Dtype = None,
    device: Device = "auto",
    rounds: Rounds = 10,
    out: Out = Path("runs/bench/prefill"),
) -> None:
    """Measure what the dial saves in a whole model: prefill at 2 to 1 experts per token, next to what FLOPs allow.

    Example: [bold]grmoe bench prefill --preset 350m --batch 16 --length 1024[/]
    """
    with shell("lm", "studies"):
        from grmoe.bench import prefill as bench
        from grmoe.bench.models import ModelShape
        from grmoe.bench.run import Plan

        where, precision, _ = machine(device, dtype)
        plan = Plan(
            benchmark=bench.benchmark(usual_form(form, where)),
            shapes=[ModelShape.on(where, preset, batch, length)],
            device=where,
            dtype=precision,
            rounds=rounds,
            out=out,
        )
        finish(plan)


def breakdown(
    preset: Preset = None,
    batch: Batch = None,
    length: Length = None,
    router: Annotated[
        list[str] | None,
        typer.Option(
            help="grassmann, softmax, amortized or matrix. Repeatable.", show_default="all but matrix"
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--pass", help="forward or step. Repeatable.", show_default="both"),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help="Of the whole model: eager, compiled or graphs. Unless eager, its parts are compiled one by one.",
            show_default="graphs on a GPU, eager on a CPU",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole/--parts-only", help="Time the whole model without ranges too.")
    ] = True,
    kernels: Annotated[
        int,
        typer.Option(min=0, help="List this many slowest kernels of the whole model, by PyTorch's profiler."),
    ] = 0,
    dtype: Dtype = None,
    device: Device = "auto",
    rounds: Rounds = 5,
    out: Out = Path("runs/bench/breakdown"),
) -> None:
    """Measure where the time goes: attention, routing, experts and the rest, beside the paper's shares.

    The parts are ranges around the model's modules, in the forward and in the backward, and add up to the pass. A
    compiled model has no such parts, so each part is compiled by itself. The whole model is timed beside them.

    Example: [bold]grmoe bench breakdown --preset 350m --batch 16 --length 1024[/]
    """
    with shell("lm", "studies"):
        from grmoe import checks
        from grmoe.bench import breakdown as bench
        from grmoe.bench.models import ModelShape
        from grmoe.bench.run import Plan

        where, precision, _ = machine(device, dtype)
        plan = Plan(
            benchmark=bench.benchmark(),
            shapes=[ModelShape.on(where, preset, batch, length)],
            device=where,
            dtype=precision,
            rounds=rounds,
            out=out,
        )
        measure = partial(
            bench.run,
            routers=tuple(
                checks.one_of("router", each, tuple(bench.NAMES)) for each in router or bench.ROUTERS
            ),
            passes=tuple(checks.one_of("pass", each, bench.PASSES) for each in only or bench.PASSES),
            form=usual_form(form, where),
            whole=whole,
            kernels=kernels,
        )
        finish(plan, measure)


def scale(
    preset: Annotated[
        list[str] | None,
        typer.Option(
            help="A preset of `grmoe info`. Repeatable.",
            show_default="350m, 1.3b and 2.7b on a GPU, tiny on a CPU",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step.", show_default="by size")
    ] = None,
    length: Length = None,
    steps: Annotated[
        int | None, typer.Option(min=4, help="Optimiser steps.", show_default="by size, 300 to 40")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder that `grmoe prepare` wrote.", show_default="random tokens, by Zipf's law"),
    ] = None,
    form: Form = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="Recompute activations in the backward.",
            show_default="if memory is short",
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = "auto",
    out: Out = Path("runs/bench/scale"),
) -> None:
    """Train large models for some steps on one GPU: tokens/s, MFU, memory, loss and load; prices the paper's training.

    Example: [bold]grmoe bench scale --preset 1.3b --batch 16 --steps 60[/]
    """
    with shell("lm", "studies"):
        from grmoe.bench import scale as bench
        from grmoe.bench.models import ModelShape
        from grmoe.bench.run import Plan

        where, precision, peak = machine(device, dtype)
        names = preset or (bench.DEFAULTS if where.type == "cuda" else ["tiny"])
        usual = {name: bench.DEFAULTS.get(name, bench.SMALL) for name in names}
        # All at first: a wrong name or length must not end the command after the first model.
        shapes = {name: ModelShape.on(where, name, batch or usual[name].batch, length) for name in usual}
        for name, shape in shapes.items():
            plan = Plan(
                benchmark=bench.benchmark(peak),
                shapes=[shape],
                device=where,
                dtype=precision,
                rounds=1,
                out=out / name,
            )
            measure = partial(
                bench.run,
                steps=steps or usual[name].steps,
                form=usual_form(form, where),
                data=data,
                checkpointing=checkpointing,
            )
            finish(plan, measure)
