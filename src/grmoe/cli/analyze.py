"""What each expert does: `grmoe analyze`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli.options import Checkpoint, RoutedText
from grmoe.cli.shell import shell
from grmoe.terminal import console, say, say_written, show_progress


def analyze(
    model: Annotated[Path, typer.Argument(help="Folder of `grmoe train` or `grmoe export`.")],
    text: RoutedText = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to route, rounded up to whole windows.")
    ] = 50_000,
    alpha: Annotated[
        float | None, typer.Option(help="Setting of the dial.", show_default="as saved with the model")
    ] = None,
    checkpoint: Checkpoint = "best",
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder for results.json, analysis.md and the figures.",
            show_default="MODEL/analysis of a run, MODEL-analysis",
        ),
    ] = None,
) -> None:
    """Show what each expert does: token types, domains, entropy, concentration, overlap, load over training.

    Works for every router. Specialisation is shown beside what chance and a hash of the tokens would give.

    Example: [bold]grmoe analyze runs/first --tokens 50000[/]
    """
    with shell("lm", "studies"):
        from grmoe.analyze import Plan, run, save, show
        from grmoe.runs.results import results_folder

        plan = Plan(model=model, texts=text or [], tokens=tokens, alpha=alpha, checkpoint=checkpoint)
        with show_progress() as progress:
            result = run(plan, progress)
            progress("drawing", 0, 1)
            written = save(result, out or results_folder(model, "analysis"))
        for part in show(result):
            say(part) if isinstance(part, str) else console.print(part)
        say_written(**written)
