"""What each expert does: `grmoe analyze`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli.options import Checkpoint, RoutedText
from grmoe.terminal import console, need, progress


def analyze(
    model: Annotated[Path, typer.Argument(help="Folder of `grmoe train` or of `grmoe export`.")],
    text: RoutedText = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many, rounded up to whole windows.")] = 50_000,
    alpha: Annotated[
        float | None, typer.Option(min=0, help="The dial.", show_default="as saved with the model")
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
    """Look at what each expert does: token types, domains, entropy, concentration, overlap, load over training.

    Works for every router. Specialisation is shown beside what chance and a hash of the tokens would give.

    Example: [bold]grmoe analyze runs/first --tokens 50000[/]
    """
    need("transformers", "yaml", extra="lm")
    need("scipy", "matplotlib")
    from grmoe.analyze.command import run
    from grmoe.runs.folder import results_folder

    place = out or results_folder(model, "analysis")
    with progress() as bar:
        written = run(model, text or [], tokens, alpha, checkpoint, place, bar)
    for part in written:
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))
