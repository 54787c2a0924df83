"""Speed of gates and layers next to other libraries: `grmoe bench`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grmoe.cli.options import Device
from grmoe.cli.shell import run_plan, shell

if TYPE_CHECKING:  # they need torch
    from grmoe.bench.measure import Result
    from grmoe.bench.run import Plan
    from grmoe.terminal import Progress

Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        help="Sizes, in the order of the example. Repeatable.",
        show_default="several, larger on a GPU",
    ),
]
NamedShapes = Annotated[
    str | None,
    typer.Option(help="A named list of shapes: hopper (five large ones) or decode (1 to 128 tokens)."),
]
Rank = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Subspace rank of the Grassmann gate.",
        show_default="the shape's, or half of dim / experts",
    ),
]
Dtype = Annotated[str | None, typer.Option(help="bf16 or fp32.", show_default="bf16 on a GPU, fp32 on a CPU")]
Rounds = Annotated[
    int, typer.Option(min=1, help="Turns of each contender: ten calls on a GPU, one on a CPU.")
]
Contenders = Annotated[
    list[str] | None,
    typer.Option(
        "--contender", help="Run only contenders with this in their name. Repeatable.", show_default="all"
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for results.json and the figure.")]


def _layer_command(name: str, text: str, lists: bool = False) -> Callable[..., None]:
    """A command that measures a gate or a layer at some shapes: the benchmark of `grmoe.bench.<name>`.

    lists: whether it has named lists of shapes.
    """

    def command(
        shape: Shapes = None,
        shapes: NamedShapes = None,
        rank: Rank = None,
        dtype: Dtype = None,
        device: Device = "auto",
        rounds: Rounds = 10,
        contender: Contenders = None,
        out: Out = Path("runs/bench") / name,
    ) -> None:
        with shell("studies"):
            from importlib import import_module

            from grmoe import checks
            from grmoe.bench.run import Benchmark, Plan, find_dtype
            from grmoe.bench.shapes import parse_shape
            from grmoe.hardware import use_device

            benchmark: Benchmark[Any] = import_module(f"grmoe.bench.{name.replace('-', '_')}").BENCHMARK
            where = use_device(device)
            defaults = benchmark.cuda_shapes if where.type == "cuda" else benchmark.cpu_shapes
            if shapes is not None:
                known = tuple(benchmark.named_shapes)
                defaults = benchmark.named_shapes[checks.one_of("--shapes", shapes, known)]
            given = [parse_shape(type(defaults[0]), text) for text in shape or []]
            wanted = [*(defaults if shapes else []), *given] or list(defaults)
            plan = Plan(
                benchmark=benchmark,
                shapes=wanted if rank is None else [each.at_rank(rank) for each in wanted],
                device=where,
                dtype=find_dtype(dtype, where),
                rounds=rounds,
                out=out,
                rank=rank,
                wanted=contender or [],
            )
            finish(plan)

    command.__doc__ = text
    if not lists:
        whole = signature(command, eval_str=True)
        kept = [parameter for parameter in whole.parameters.values() if parameter.name != "shapes"]
        command.__signature__ = whole.replace(parameters=kept)  # type: ignore[attr-defined]
    return command


def finish(plan: Plan[Any], run: Callable[[Plan[Any], Progress], list[Result]] | None = None) -> None:
    """Measure, print, draw. `run`: in place of the usual one."""
    from grmoe.bench import run as room

    run_plan(plan, run or room.run, partial(room.show, plan), partial(room.save, plan))


gate = _layer_command(
    "gate",
    """Measure the gate alone, next to the softmax gate and the bare GEMM inside it.

    Example, with tokens,dim,experts,rank: [bold]grmoe bench gate --shape 4096,768,8,48[/]
    """,
)
layer = _layer_command(
    "layer",
    """Measure the whole MoE layer, every backend, next to Hugging Face, Liger, ScatterMoE, SonicMoE, triton_kernels
    and dense GEMMs. A library that is not installed is listed as such.

    Example, with tokens,dim,experts,width,top_k: [bold]grmoe bench layer --shape 2048,256,64,256,2[/]

    Up to 128 tokens, the floor is the time to read the touched experts' weights and the frames once.
    """,
    lists=True,
)
dial = _layer_command(
    "dial",
    """Measure the layer's time over experts per token, and the effect of α on both.

    Example, with tokens,dim,experts,width: [bold]grmoe bench dial --shape 2048,256,8,256[/]
    """,
)
train_step = _layer_command(
    "train-step",
    """Measure a training step of the layer alone, optimisers included, next to Hugging Face's block.

    Example, with tokens,dim,experts,width,top_k: [bold]grmoe bench train-step --shape 2048,256,8,256,2[/]
    """,
)
