"""What all commands share on screen: tables on stdout, progress and errors on stderr."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

# Without a terminal rich assumes 80 columns; our tables are wider.
console = Console(width=None if sys.stdout.isatty() else 200)


class Progress(Protocol):
    """How long work reports where it is: the stage, and how much of the whole is done. Total 0: not known."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def silent(stage: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


@contextmanager
def show_progress() -> Iterator[Progress]:
    """A bar on a terminal. Elsewhere one line on stderr per stage."""
    stderr = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("opening", total=None)
        current = ""

        def report(stage: str, done: int, total: int) -> None:
            nonlocal current
            bar.update(task, description=escape(stage), completed=done, total=total or None)
            if stage != current and not stderr.is_terminal:
                share = f" ({done / total:.0%} done)" if total > 1 else ""  # one step is done or not
                print(f"{stage}{share}", file=sys.stderr, flush=True)
            current = stage

        yield report


class Steps:
    """Counts measurements of a known number and reports each to a `Progress`."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, stage: str, count: int = 1) -> None:
        self.done += count
        self.progress(stage, self.done, max(self.total, self.done))


def note(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print plain text to stdout. Brackets are not markup, long lines are not wrapped."""
    console.print(Text(text), soft_wrap=True)


def say_all(parts: Iterable[object]) -> None:
    """Print what a room's `show` yields: tables and lines. On a terminal, long lines break between words."""
    for part in parts:
        if isinstance(part, str):
            say(wrapped(part, console.width) if console.is_terminal else part)
        else:
            console.print(part)


def wrapped(line: str, width: int) -> str:
    """A line broken between words. What follows is indented as its text is: behind spaces, or behind "Name: "."""
    indent = re.match(r"(\w+:)? *", line)
    assert indent is not None
    return textwrap.fill(
        line, width, subsequent_indent=" " * indent.end(), break_long_words=False, break_on_hyphens=False
    )


def say_written(**places: Path) -> None:
    """List what was written, one line per file."""
    width = max(map(len, places), default=0) + 2
    for name, path in places.items():
        console.print(Text.assemble(f"{name + ':':<{width}}", (str(path), "bold")), soft_wrap=True)
