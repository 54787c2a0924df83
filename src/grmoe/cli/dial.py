"""Sparsity chosen after training: `grmoe dial`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from grmoe.cli.options import CalibrationText, Checkpoint, TextTokens, Window
from grmoe.terminal import fail, need


def dial(
    model: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of `grmoe train`, or an exported model.")
    ],
    target_experts: Annotated[
        float | None, typer.Option(help="Lowest perplexity with at most so many experts a token.")
    ] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(
            help="Fewest experts with a perplexity increase of at most this, e.g. 1%.", show_default="1%"
        ),
    ] = None,
    throughput: Annotated[
        str | None, typer.Option(help="Lowest perplexity at this measured speed-up or more, e.g. 1.3x.")
    ] = None,
    text: CalibrationText = None,
    check: Annotated[
        list[str] | None, typer.Option(help="Other text to hold the promise against; repeatable.")
    ] = None,
    tokens: TextTokens = None,
    length: Window = None,
    cap: Annotated[
        int | None, typer.Option(min=1, help="Most experts of a token.", show_default="as trained")
    ] = None,
    checkpoint: Checkpoint = "best",
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder for results.json and pareto.png.",
            show_default="RUN/dial, MODEL-dial",
        ),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Save the model with the chosen setting to OUT/model.")
    ] = False,
) -> None:
    """Choose how sparse a trained model is: the cheapest setting that meets a target, with certificates.

    Experts per token are chosen by mass: the fewest that reach probability τ, at most as many as in training. Measured
    on the same text: one α for all layers, one α per layer (by what each layer's experts are worth), plain top-k.
    Nothing is retrained.

    Example: [bold]grmoe dial runs/first --max-ppl-increase 1% --check wikitext.txt --write[/]
    """
    need("transformers", "yaml", extra="lm")
    need("matplotlib")
    from transformers.utils import logging

    from grmoe.dial.command import command
    from grmoe.dial.run import Plan
    from grmoe.dial.target import parse_target
    from grmoe.runs.checkpoint import CheckpointError

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        target = parse_target(target_experts, max_ppl_increase, throughput)
        plan = Plan(target, text, check or [], tokens, length, cap, checkpoint)
        command(model, plan, out, write)
    except (ValueError, CheckpointError, ModuleNotFoundError) as error:
        fail(escape(str(error)))
