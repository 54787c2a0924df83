"""What all commands say and how: tables on stdout, progress and mistakes on stderr."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Tables are wider than the 80 columns rich assumes where there is no terminal.
console = Console(width=None if sys.stdout.isatty() else 200)


def fail(message: str) -> NoReturn:
    """A mistake of the caller: one line on stderr, exit status 2."""
    Console(stderr=True).print(f"[bold red]error:[/] {message}", highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def need(*modules: str, extra: str = "studies") -> None:
    """Stop with the install line when an optional dependency is missing."""
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        fail(f"this command needs {' and '.join(missing)}; install with: pip install 'grmoe\\[{extra}]'")


class Watch:
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


@contextmanager
def measuring() -> Iterator[Callable[[str, int], None]]:
    """Called after each measurement with what was measured and how many there are about to be.

    A bar on a terminal, a line for each new stage elsewhere.
    """
    with progress() as bar:
        task = bar.add_task("opening", total=None)
        stage = ""

        def tick(label: str, total: int) -> None:
            nonlocal stage
            bar.update(task, description=label, total=total, advance=1)
            if label != stage and not bar.console.is_terminal:
                print(f"measuring: {label}", file=sys.stderr, flush=True)
            stage = label

        yield tick


def say_where(**places: Path) -> None:
    """What was written, a line each."""
    for name, path in places.items():
        console.print(f"{name + ':':<9}[bold]{escape(str(path))}[/]", highlight=False, soft_wrap=True)


def progress() -> Progress:
    """A bar on a terminal; elsewhere it stays silent."""
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    stderr = Console(stderr=True)
    return Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
