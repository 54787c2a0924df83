"""Fewer experts after training: `grmoe prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from grmoe.cli.options import CalibrationText, Checkpoint, TextTokens, Window
from grmoe.terminal import fail, need


def prune(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder of `grmoe train`, or an exported model.")
    ],
    experts: Annotated[int | None, typer.Option(help="So many experts in every layer.")] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(
            help="As few experts as keep the perplexity increase within this, e.g. 1%.", show_default="1%"
        ),
    ] = None,
    text: CalibrationText = None,
    check: Annotated[
        list[str] | None, typer.Option(help="Text not used for choosing, to measure on; repeatable.")
    ] = None,
    tokens: TextTokens = None,
    length: Window = None,
    checkpoint: Checkpoint = "best",
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder for results.json and prune.png.",
            show_default="RUN/prune, MODEL-prune",
        ),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Save the pruned model to OUT/model.")] = False,
) -> None:
    """Take experts away: merge or drop those a trained model can do without, in every layer the same number.

    Chosen by the overlap of experts' subspaces, by their outputs, and by how far each candidate moves the
    model's predictions, beside random and load-based pruning to the same number of experts. Nothing is retrained.

    Example: [bold]grmoe prune runs/first --experts 6 --check wikitext.txt --write[/]
    """
    need("transformers", "yaml", extra="lm")
    need("matplotlib", "scipy")
    from transformers.utils import logging

    from grmoe.dial.target import parse_target
    from grmoe.prune.command import command
    from grmoe.prune.run import Plan
    from grmoe.runs.checkpoint import CheckpointError

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        if experts is not None and max_ppl_increase is not None:
            raise ValueError("give one of --experts and --max-ppl-increase, not both")
        bound = parse_target(None, max_ppl_increase, None).value
        command(model, Plan(experts, bound, text, check or [], tokens, length, checkpoint), out, write)
    except (ValueError, CheckpointError, ModuleNotFoundError) as error:
        fail(escape(str(error)))
