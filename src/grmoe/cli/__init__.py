"""The command line: parses, calls, prints. One module a group of commands; here they become one program."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from grmoe import __version__
from grmoe.bench.cli import app as bench
from grmoe.cli import analyze, data, dial, evaluate, model, prune, report, serve, studies, training
from grmoe.terminal import console

app = typer.Typer(
    help="Grassmannian Mixture-of-Experts: experts own subspaces, one dial sets the sparsity after training.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


def _version(show: bool) -> None:
    if show:
        console.print(f"grmoe {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


# In the order of `grmoe --help`: from text to a model in use, then what looks at it, then the studies.
app.command()(data.prepare)
app.command()(training.train)
app.command()(training.curves)
app.command()(model.export)
app.command()(model.generate)
app.command()(serve.serve)
app.command()(dial.dial)
app.command()(prune.prune)
app.command("eval")(evaluate.evaluate)
app.command()(analyze.analyze)
app.command()(report.report)
app.command()(model.info)
app.command()(training.quality)
app.command()(studies.synthetic)
app.command()(studies.normalizer)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point. A full disk or a folder that cannot be written is the machine's trouble, not a traceback's."""
    try:
        app()
    except OSError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)
