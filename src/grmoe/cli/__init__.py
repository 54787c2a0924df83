"""The command line: parses, calls, prints. One module a group of commands; here they become one program."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from grmoe import __version__
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


class _Bench(TyperGroup):
    """`grmoe bench`: its modules need torch and are imported when one of its commands is looked for."""

    def _loaded(self) -> Any:
        from grmoe.bench.cli import app as bench

        return typer.main.get_command(bench)

    def list_commands(self, ctx: Any) -> list[str]:
        names: list[str] = self._loaded().list_commands(ctx)
        return names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._loaded().get_command(ctx, cmd_name)


def _add(command: Callable[..., None], name: str | None = None) -> None:
    """Register it; the lines of a paragraph of its help flow, whatever the width of the terminal."""
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")
    app.command(name, help=text)(command)


# In the order of `grmoe --help`: from text to a model in use, then what looks at it, then the studies.
_add(data.prepare)
_add(training.train)
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
_add(training.quality)
_add(studies.synthetic)
_add(studies.normalizer)
app.add_typer(
    typer.Typer(
        help="Speed, memory and errors beside other libraries: all contenders take turns within one run.",
        cls=_Bench,
        no_args_is_help=True,
        rich_markup_mode="rich",
    ),
    name="bench",
)


def main() -> None:
    """Entry point. A full disk or a folder that cannot be written is the machine's trouble, not a traceback's."""
    try:
        app()
    except OSError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)
