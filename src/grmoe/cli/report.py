"""Runs as one page to look at: `grmoe report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli.options import Checkpoint, RoutedText
from grmoe.terminal import console, need, progress


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `grmoe train` or of `grmoe export`.")],
    out: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="The page.",
            show_default="RUN/report.html; MODEL-report.html of an exported one; report.html of several",
        ),
    ] = None,
    text: RoutedText = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of the analysis, where a run has none yet.")] = 50_000,
    checkpoint: Checkpoint = "best",
) -> None:
    """Write runs as one HTML page: curves, frontiers, experts and text, under a dial that moves.

    The page needs no network and no other file. It takes what `grmoe dial` and `grmoe analyze` left in a run's folder;
    a missing analysis is made, a missing frontier (minutes) is named with the command that makes it.

    Example: [bold]grmoe report runs/first runs/second --out report.html[/]
    """
    need("transformers", "yaml", extra="lm")
    need("scipy")
    from grmoe.report.command import run

    with progress() as bar:
        said = run(runs, out, text or [], tokens, checkpoint, bar)
    for line in said:
        console.print(line, highlight=False, soft_wrap=True)
