"""What each expert does: `grmoe analyze`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli.options import Alpha, Checkpoint, ModelFolder, RoutedText, beside_model
from grmoe.cli.shell import run_plan, shell


def analyze(
    model: ModelFolder,
    text: RoutedText = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to route, rounded up to whole windows.")
    ] = 50_000,
    alpha: Alpha = None,
    checkpoint: Checkpoint = "best",
    out: Annotated[Path | None, beside_model("results.json, analysis.md and the figures", "analysis")] = None,
) -> None:
    """Show what each expert does: token types, domains, entropy, concentration, overlap, load over training.

    Works for every router. Specialisation is shown beside what chance and a hash of the tokens would give.

    Example: [bold]grmoe analyze runs/first --tokens 50000[/]
    """
    with shell("lm", "studies"):
        from grmoe.analyze import Plan, run, save, show
        from grmoe.runs.results import results_folder

        plan = Plan(model=model, texts=text or [], tokens=tokens, alpha=alpha, checkpoint=checkpoint)
        run_plan(plan, run, show, partial(save, out=out or results_folder(model, "analysis")))
