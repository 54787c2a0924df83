"""Models as one page to look at: `grmoe report`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli.options import Checkpoint, RoutedText
from grmoe.cli.shell import run_plan, shell


def report(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL", help="Folders of `grmoe train` or `grmoe export`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="The page to write.",
            show_default="RUN/report.html, or MODEL-report.html; report.html for several models",
        ),
    ] = None,
    text: RoutedText = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to route for a model that has no analysis yet.")
    ] = 50_000,
    checkpoint: Checkpoint = "best",
) -> None:
    """Write one HTML page about one or several models. Its first screen says what the model is and what to do next.

    The page has a dial with the perplexity and speed that `grmoe dial` measured, texts written at three budgets,
    curves, experts and tokens. It needs no network and no other file. A missing analysis is made here. A missing dial
    takes minutes: the page names the command that measures it.

    Example: [bold]grmoe report runs/first runs/second --out report.html[/]
    """
    with shell("lm", "studies"):
        from grmoe.analyze import analyze
        from grmoe.report import Plan, default_path, run, save, show

        plan = Plan(models=models, analyse=analyze, texts=text or [], tokens=tokens, checkpoint=checkpoint)
        run_plan(plan, run, show, partial(save, out=out or default_path(models)))
