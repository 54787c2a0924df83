"""Speed of generation and serving next to other libraries: `grmoe bench`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli.bench import Contenders, Dtype, Out, Rounds, finish
from grmoe.cli.bench_models import Form, Preset, machine, usual_form
from grmoe.cli.options import Device
from grmoe.cli.shell import shell


def decode(
    preset: Preset = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Sequences at once. Repeatable.", show_default="1, 8, 32 on a GPU, 1 and 2 on a CPU"
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of context per sequence.", show_default="512 on a GPU, 32 on a CPU"),
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(help="Experts per token of ours. Repeatable.", show_default="K, 3/4 K and K/2"),
    ] = None,
    form: Form = None,
    dtype: Dtype = None,
    device: Device = "auto",
    rounds: Rounds = 10,
    contender: Contenders = None,
    out: Out = Path("runs/bench/decode"),
) -> None:
    """Measure generation, one token per sequence and step, by batch and budget, beside an equal Hugging Face Olmoe.

    The floor is the time to read the weights that a step touches, and its keys and values, once.

    Example: [bold]grmoe bench decode --preset 1.3b --batch 1 --batch 32[/]
    """
    with shell("lm", "studies"):
        from grmoe.bench import decode as bench
        from grmoe.bench.models import ModelShape
        from grmoe.bench.run import Plan

        where, precision, _ = machine(device, dtype)
        cuda = where.type == "cuda"
        plan = Plan(
            benchmark=bench.benchmark(usual_form(form, where), tuple(budget or ())),
            shapes=[
                ModelShape.on(where, preset, each, length, usual_length=512 if cuda else 32)
                for each in batch or (bench.BATCHES if cuda else (1, 2))
            ],
            device=where,
            dtype=precision,
            rounds=rounds,
            out=out,
            wanted=contender or [],
        )
        finish(plan)


def serve(
    preset: Preset = None,
    clients: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Clients at once. Repeatable.", show_default="1, 8, 32 on a GPU, 1 and 2 on a CPU"
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens per prompt.", show_default="128 on a GPU, 16 on a CPU"),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens per answer.", show_default="128 on a GPU, 16 on a CPU")
    ] = None,
    answers: Annotated[int, typer.Option(min=1, help="Answers per client.")] = 4,
    dtype: Dtype = None,
    device: Device = "auto",
    contender: Contenders = None,
    out: Out = Path("runs/bench/serve"),
) -> None:
    """Measure the engine of `grmoe serve` under load: tokens/s and latency by number of clients, with CUDA graphs and
    without, beside transformers' continuous batching of an equal Olmoe. Random weights, no HTTP.

    Example: [bold]grmoe bench serve --preset 350m --clients 1 --clients 32[/]
    """
    with shell("lm", "studies"):
        from grmoe.bench import serve as bench
        from grmoe.bench.models import ModelShape
        from grmoe.bench.run import Plan

        where, precision, _ = machine(device, dtype)
        cuda = where.type == "cuda"
        usual = 128 if cuda else 16
        plan = Plan(
            benchmark=bench.benchmark(),
            shapes=[
                ModelShape.on(where, preset, each, length, usual_length=usual)
                for each in clients or (bench.CLIENTS if cuda else (1, 2))
            ],
            device=where,
            dtype=precision,
            rounds=1,
            out=out,
            wanted=contender or [],
        )
        finish(plan, partial(bench.run, tokens=tokens or usual, answers=answers))
