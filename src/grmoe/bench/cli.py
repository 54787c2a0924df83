"""The command group `grmoe bench`: parses, calls, prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import torch
import typer

from grmoe import checks
from grmoe.bench.measure import Contender, Result, Row, measure, parts, pick
from grmoe.bench.report import device_name, failures, ratio_table, rich_table, write_json
from grmoe.bench.shapes import Shape, parse_shape
from grmoe.terminal import Watch, console, fail, need, progress

if TYPE_CHECKING:  # it needs transformers
    from grmoe.bench.train_model import ModelShape

app = typer.Typer(
    help="Speed, memory and errors beside other libraries: all contenders take turns within one run.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
S = TypeVar("S", bound=Shape)

Shapes = Annotated[list[str] | None, typer.Option("--shape", help="Sizes, as in the example; repeatable.")]
Dtype = Annotated[str | None, typer.Option(help="bf16 or fp32. Default: bf16 on a GPU, fp32 on a CPU.")]
Device = Annotated[str | None, typer.Option(help="Default: the GPU, where there is one.")]
Rounds = Annotated[
    int, typer.Option(min=1, help="Turns of each contender: ten calls on a GPU, one on a CPU.")
]
Wanted = Annotated[
    list[str] | None, typer.Option("--contender", help="Only those with this in their name; repeatable.")
]
Rank = Annotated[int | None, typer.Option(min=1, help="Subspace rank of the Grassmann gate.")]
Out = Annotated[Path, typer.Option(help="Folder for results.json and the figure.")]
Preset = Annotated[str | None, typer.Option(help="Of `grmoe info`. Default: 350m on a GPU, tiny on a CPU.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Sequences. Default: 16 on a GPU, 2 on a CPU.")]
Length = Annotated[
    int | None, typer.Option(min=2, help="Tokens of a sequence. Default: 1024 on a GPU, 128 on a CPU.")
]


@app.command()
def gate(
    shape: Shapes = None,
    dtype: Dtype = None,
    device: Device = None,
    rounds: Rounds = 10,
    contender: Wanted = None,
    out: Out = Path("runs/bench/gate"),
) -> None:
    """The gate alone, beside the softmax gate and the bare GEMM inside it.

    Example, tokens,dim,experts,rank: [bold]grmoe bench gate --shape 4096,768,8,48[/]
    """
    from grmoe.bench import gate as bench

    run = _Run("gate", device, dtype, rounds, out)
    shapes = run.shapes(shape, bench.CUDA_SHAPES, bench.CPU_SHAPES)
    results = run.measure(
        shapes, lambda s: pick(bench.contenders(s, run.device, run.dtype), contender), bench.compare
    )
    run.show(results)


@app.command()
def layer(
    shape: Shapes = None,
    dtype: Dtype = None,
    device: Device = None,
    rounds: Rounds = 10,
    rank: Rank = None,
    contender: Wanted = None,
    out: Out = Path("runs/bench/layer"),
) -> None:
    """The whole MoE layer, every backend, beside Hugging Face, Liger, ScatterMoE and dense GEMMs.

    Example, tokens,dim,experts,width,top_k: [bold]grmoe bench layer --shape 2048,256,64,256,2[/]
    """
    from grmoe.bench import layer as bench

    run = _Run("layer", device, dtype, rounds, out)
    shapes = run.shapes(shape, bench.CUDA_SHAPES, bench.CPU_SHAPES)
    results = run.measure(
        shapes, lambda s: pick(bench.contenders(s, run.device, run.dtype, rank), contender), bench.compare
    )
    run.show(results)


@app.command()
def dial(
    shape: Shapes = None,
    dtype: Dtype = None,
    device: Device = None,
    rounds: Rounds = 10,
    rank: Rank = None,
    out: Out = Path("runs/bench/dial"),
) -> None:
    """The layer's time against experts a token, and what α does to both.

    Example, tokens,dim,experts,width: [bold]grmoe bench dial --shape 2048,256,8,256[/]
    """
    from grmoe.bench import dial as bench

    run = _Run("dial", device, dtype, rounds, out)
    shapes = run.shapes(shape, bench.CUDA_SHAPES, bench.CPU_SHAPES)
    results = run.measure(shapes, lambda s: bench.contenders(s, run.device, run.dtype, rank), bench.compare)
    run.show(results, bench.FACTS, bench.fit_lines, bench.draw)


@app.command("train-step")
def train_step(
    shape: Shapes = None,
    dtype: Dtype = None,
    device: Device = None,
    rounds: Rounds = 10,
    rank: Rank = None,
    out: Out = Path("runs/bench/train-step"),
) -> None:
    """A training step of the layer alone, optimisers included, beside Hugging Face's block.

    Example, tokens,dim,experts,width,top_k: [bold]grmoe bench train-step --shape 2048,256,8,256,2[/]
    """
    from grmoe.bench import train_step as bench

    run = _Run("train-step", device, dtype, rounds, out)
    shapes = run.shapes(shape, bench.CUDA_SHAPES, bench.CPU_SHAPES)
    results = run.measure(shapes, lambda s: bench.contenders(s, run.device, run.dtype, rank), bench.compare)
    run.show(results, bench.FACTS)


@app.command("train-model")
def train_model(
    preset: Preset = None,
    batch: Batch = None,
    length: Length = None,
    hidden_act: Annotated[
        str | None, typer.Option(help="silu (gated) or gelu, for everybody. Default: the preset's.")
    ] = None,
    form: Annotated[
        list[str] | None,
        typer.Option(
            help="eager, compiled or graphs (compiled into CUDA graphs); repeatable. Default: all on a GPU, eager on a "
            "CPU."
        ),
    ] = None,
    apart: Annotated[
        bool | None,
        typer.Option(
            "--apart/--together",
            help="Build and free each contender in every round, or hold all. Default: what fits.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 10,
    dtype: Dtype = None,
    device: Device = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 5,
    contender: Wanted = None,
    out: Out = Path("runs/bench/train-model"),
) -> None:
    """Training a whole model, tokens/s and MFU: beside an equal Hugging Face Olmoe and our own softmax top-2.

    Example: [bold]grmoe bench train-model --preset 350m --batch 16 --length 1024[/]
    """
    need("transformers", extra="lm")
    from grmoe.bench import train_model as bench
    from grmoe.hardware import peak_flops

    run = _Run("train-model", device, dtype, rounds, out)
    cuda = run.device.type == "cuda"
    try:
        shape = run.model_shape(preset, batch, length, hidden_act)
        forms = tuple(form or (bench.FORMS if cuda else ("eager",)))
        plan = pick(bench.contenders(shape, run.device, run.dtype, forms), contender)
    except ValueError as error:
        fail(str(error))
    apart = bench.too_large(shape, len(plan), run.device) if apart is None else apart
    peak = peak_flops(run.device) if run.dtype == torch.bfloat16 else None
    results: list[Result] = []
    with progress() as bar:
        watch = Watch(bar, rounds * len(plan))
        for rows in bench.measure(plan, run.device, rounds, steps, apart, watch):
            results = [bench.compare(shape, rows, peak)]
            write_json(run.command, results, run.device, run.dtype, rounds, run.numbers)
    run.show(results, bench.FACTS, bench.lines)


@app.command()
def prefill(
    preset: Preset = None,
    batch: Batch = None,
    length: Length = None,
    form: Annotated[
        str | None,
        typer.Option(
            help="eager, compiled or graphs (compiled into CUDA graphs). Default: graphs on a GPU, eager on a CPU."
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    rounds: Rounds = 10,
    out: Out = Path("runs/bench/prefill"),
) -> None:
    """What the dial saves in a whole model: prefill at 2 to 1 experts a token, beside what FLOPs allow.

    Example: [bold]grmoe bench prefill --preset 350m --batch 16 --length 1024[/]
    """
    need("transformers", extra="lm")
    from grmoe.bench import prefill as bench

    run = _Run("prefill", device, dtype, rounds, out)
    cuda = run.device.type == "cuda"
    try:
        shape = run.model_shape(preset, batch, length)
        plan = bench.contenders(shape, run.device, run.dtype, form or ("graphs" if cuda else "eager"))
    except ValueError as error:
        fail(str(error))
    run.show(run.measure([shape], lambda _: plan, bench.compare), bench.FACTS)


class _Run:
    """One command's run: where, at which precision, and what becomes of the results."""

    def __init__(self, command: str, device: str | None, dtype: str | None, rounds: int, out: Path) -> None:
        need("matplotlib")
        self.command, self.rounds, self.out = command, rounds, out
        name = device or ("cuda" if torch.cuda.is_available() else "cpu")
        kind, _, index = name.partition(":")
        if kind not in ("cpu", "cuda") or not (index or "0").isdigit():
            fail(f"device must be cpu, cuda or cuda:0 and so on, got {name!r}")
        if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
            fail(f"device must be one of this machine's {torch.cuda.device_count()} GPUs, got {name!r}")
        self.device = torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        short = dtype or ("bf16" if self.device.type == "cuda" else "fp32")
        try:
            self.dtype = DTYPES[checks.one_of("dtype", short, tuple(DTYPES))]
        except ValueError as error:
            fail(str(error))
        out.mkdir(parents=True, exist_ok=True)  # better to fail now than after the measuring

    @property
    def title(self) -> str:
        return f"{self.command}, {str(self.dtype).removeprefix('torch.')}, {device_name(self.device)}"

    def model_shape(
        self, name: str | None, batch: int | None, length: int | None, hidden_act: str | None = None
    ) -> ModelShape:
        from grmoe.bench.train_model import ModelShape
        from grmoe.model import preset

        cuda = self.device.type == "cuda"
        name = name or ("350m" if cuda else "tiny")
        act = hidden_act or preset(name).hidden_act
        return ModelShape(name, batch or (16 if cuda else 2), length or (1024 if cuda else 128), act)

    def shapes(self, texts: list[str] | None, cuda: tuple[S, ...], cpu: tuple[S, ...]) -> list[S]:
        try:
            given = [parse_shape(type(cuda[0]), text) for text in texts or []]
        except ValueError as error:
            fail(str(error))
        return given or list(cuda if self.device.type == "cuda" else cpu)

    def measure(
        self,
        shapes: list[S],
        contenders: Callable[[S], list[Contender]],
        compare: Callable[[S, list[Row]], Result],
    ) -> list[Result]:
        """Shape by shape; results.json is written after each, so that a run cut short leaves what it has."""
        try:
            plans = [contenders(shape) for shape in shapes]
        except ValueError as error:
            fail(str(error))
        results: list[Result] = []
        with progress() as bar:
            watch = Watch(bar, sum(parts(plan, self.rounds) for plan in plans))
            for shape in shapes:
                torch.compiler.reset()  # each shape compiles anew; together they would hit Dynamo's limit
                # The plan holds the shape's tensors: it must not outlive it.
                rows = measure(plans.pop(0), self.device, self.rounds, watch, shape.text)
                results.append(compare(shape, rows))
                write_json(self.command, results, self.device, self.dtype, self.rounds, self.numbers)
        return results

    @property
    def numbers(self) -> Path:
        return self.out / "results.json"

    def show(
        self,
        results: list[Result],
        facts: dict[str, str] | None = None,
        lines: Callable[[Result], list[str]] | None = None,
        draw: Callable[[list[Result], Path, str], Path] | None = None,
    ) -> None:
        from grmoe.bench.plot import bars

        for result in results:
            console.print(rich_table(result, self.title, facts))
            for line in [*failures(result), *(lines(result) if lines else [])]:
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            if result.ratios:
                console.print(ratio_table(result))
        figure = (draw or bars)(results, self.out / f"{self.command}.png", self.title)
        console.print(f"Numbers: {self.numbers}", highlight=False, soft_wrap=True)
        console.print(f"Figure:  [bold]{figure}[/]", highlight=False, soft_wrap=True)
