"""The command line: parses options, calls a room, prints what it shows. One module per group of commands.

`grmoe --help` imports these modules and nothing heavy: each command imports torch and its room when it runs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Annotated

import typer

from grmoe import __version__
from grmoe.cli import (
    analyze,
    bench,
    bench_generation,
    bench_models,
    data,
    dial,
    evaluate,
    model,
    prune,
    report,
    reproduce,
    serve,
    studies,
    training,
)
from grmoe.terminal import say


def _group(text: str) -> typer.Typer:
    return typer.Typer(help=text, no_args_is_help=True, add_completion=False, rich_markup_mode="rich")


app = _group(
    "Grassmannian Mixture-of-Experts: experts own subspaces, one dial sets the sparsity after training.\n\n"
    "Example, from a text file to a dialled model: [bold]grmoe prepare input.txt && "
    "grmoe train data.path=runs/data out=runs/first && grmoe dial runs/first --write[/]\n\n"
    "[bold]grmoe info FOLDER[/] says what a folder is and what to do next."
)
_bench = _group(
    "Measure speed, memory and errors next to other libraries. All contenders take turns in one run.\n\n"
    "Example: [bold]grmoe bench layer --shape 2048,256,64,256,2[/]"
)


def _version(show: bool) -> None:
    if show:
        say(f"grmoe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def _add(
    command: Callable[..., None], name: str | None = None, group: typer.Typer = app, settings: bool = False
) -> None:
    """Register a command. The lines of each help paragraph are joined, so they fill any terminal width.

    settings: it takes key=value, and says itself what is wrong with an unknown option.
    """
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")
    group.command(name, help=text, context_settings={"ignore_unknown_options": settings})(command)


# In the order of `grmoe --help`: from text to a model in use, then what measures it, then the studies.
_add(data.prepare)
_add(training.train, settings=True)
_add(training.curves)
_add(model.export)
_add(model.generate)
_add(serve.serve)
_add(dial.dial)
_add(prune.prune)
_add(evaluate.evaluate, "eval")
_add(analyze.analyze)
_add(report.report)
_add(model.info)
_add(training.compare, settings=True)
_add(reproduce.reproduce)
_add(studies.synthetic)
_add(studies.normalizer)
_add(bench.gate, "gate", _bench)
_add(bench.layer, "layer", _bench)
_add(bench.dial, "dial", _bench)
_add(bench.train_step, "train-step", _bench)
_add(bench_models.train_model, "train-model", _bench)
_add(bench_models.elastic, "elastic", _bench)
_add(bench_models.prefill, "prefill", _bench)
_add(bench_models.breakdown, "breakdown", _bench)
_add(bench_models.scale, "scale", _bench)
_add(bench_generation.decode, "decode", _bench)
_add(bench_generation.serve, "serve", _bench)
app.add_typer(_bench, name="bench")


def main() -> None:
    """Entry point."""
    app()
