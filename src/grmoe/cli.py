"""The command line: parses, calls, prints."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from grmoe import __version__

app = typer.Typer(
    help="Grassmannian Mixture-of-Experts: experts own subspaces, one dial sets the sparsity after training.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
# Tables are wider than the 80 columns rich assumes where there is no terminal.
console = Console(width=None if sys.stdout.isatty() else 160)


def _fail(message: str) -> NoReturn:
    """A mistake of the caller: one line on stderr, exit status 2."""
    Console(stderr=True).print(f"[bold red]error:[/] {message}", highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def _need(*modules: str) -> None:
    """Stop with the install line when an optional dependency is missing."""
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        _fail(f"this command needs {' and '.join(missing)}; install with: pip install 'grmoe\\[studies]'")


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


@app.command()
def synthetic(
    out: Annotated[Path, typer.Option(help="Folder for results.json, table.md and the figures.")] = Path(
        "runs/synthetic"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Easy setting, seven methods, six seeds: under a minute.")
    ] = False,
    setting: Annotated[
        list[str] | None, typer.Option(help="easy or hard; repeatable. Default: both.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; `--method ?` lists them. Default: all.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds a method, trained as one batch.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
) -> None:
    """Run the paper's synthetic routing study: nine methods, the Bayes oracle, the dial.

    Tokens of 8 classes live near 8 subspaces of R^128; each class has its own linear map as target. Routers
    and experts are trained end to end on the regression loss; nobody sees a label, except the row that says so.
    A run that is interrupted goes on where it stopped when started again with the same options.

    Example: [bold]grmoe synthetic --setting easy --method grmoe --method softmax_top1 --seeds 10[/]
    """
    _need("scipy", "matplotlib")
    from grmoe.studies.synthetic.figure import draw
    from grmoe.studies.synthetic.methods import find_methods
    from grmoe.studies.synthetic.report import rich_table, write_results
    from grmoe.studies.synthetic.study import QUICK_METHODS, SETTINGS, Config, run_setting

    config = Config.quick() if quick else Config()
    if seeds is not None:
        config = replace(config, seeds=seeds)
    if steps is not None:
        config = replace(config, training=replace(config.training, steps=steps))
    names = setting or (["easy"] if quick else list(SETTINGS))
    if unknown := [n for n in names if n not in SETTINGS]:
        _fail(f"setting must be one of {', '.join(SETTINGS)}, got {', '.join(unknown)}")
    try:
        methods = find_methods(method or (QUICK_METHODS if quick else None))
    except ValueError as error:
        _fail(str(error))
    total = len(names) * len(methods) * config.training.steps
    results = []
    with _progress() as bar:
        watch = _Watch(bar, total)
        for name in names:
            results.append(run_setting(SETTINGS[name], methods, config, out, watch))
    figures = [draw(result, out / f"synthetic-{result.setting.name}.png") for result in results]
    for result in results:
        console.print(rich_table(result))
    numbers = write_results(results, config, out)
    console.print(f"Numbers: {numbers}", highlight=False, soft_wrap=True)
    for figure in figures:
        console.print(f"Figure:  [bold]{figure}[/]", highlight=False, soft_wrap=True)


@app.command()
def normalizer(
    kappa: Annotated[list[float] | None, typer.Option(help="Concentration; repeatable.")] = None,
    dim: Annotated[
        list[int] | None, typer.Option(help="Dimension d; repeatable, one for each --rank.")
    ] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Subspace rank k.")] = None,
    samples: Annotated[int, typer.Option(min=2, help="Monte Carlo samples.")] = 1_000_000,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the rows here.")] = None,
) -> None:
    """Validate the Bingham normaliser: contour integral, Kume-Wood and Monte Carlo side by side.

    Example: [bold]grmoe normalizer --dim 768 --rank 48 --kappa 0.4 --kappa 4.2[/]
    """
    from grmoe.studies import normalizer as study

    if len(dim or []) != len(rank or []):
        _fail(f"give one --rank for each --dim, got {len(dim or [])} and {len(rank or [])}")
    shapes = list(zip(dim, rank, strict=True)) if dim and rank else list(study.SHAPES)
    cases = [(d, k, value) for d, k in shapes for value in kappa or study.KAPPAS]
    rows = []
    with _progress() as bar:
        task = bar.add_task("normaliser", total=len(cases))
        for d, k, value in cases:
            try:
                rows.append(study.validate(d, k, value, samples))
            except ValueError as error:
                _fail(str(error))
            bar.advance(task)
    console.print(study.rich_table(rows, samples))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps([asdict(r) for r in rows], indent=1))


class _Watch:
    """Shows a study's progress: a bar on a terminal, a line for each finished part elsewhere."""

    def __init__(self, bar: Progress, total: int) -> None:
        self.bar, self.total, self.done = bar, total, 0
        self.task = bar.add_task("starting", total=total)

    def __call__(self, label: str, step: int, steps: int) -> None:
        self.bar.update(self.task, description=label, completed=self.done + step)
        if step < steps:
            return
        self.done += steps
        if not self.bar.console.is_terminal:
            elapsed = self.bar.tasks[0].elapsed or 0
            print(
                f"{label} done, {self.done / self.total:.0%} after {elapsed:.0f} s",
                file=sys.stderr,
                flush=True,
            )


def _progress() -> Progress:
    """A bar on a terminal; elsewhere it stays silent."""
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def main() -> None:
    """Entry point. A full disk or a folder that cannot be written is the machine's trouble, not a traceback's."""
    try:
        app()
    except OSError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)
