"""`grmoe prune`: fewer experts in a trained model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli import options
from grmoe.cli.shell import run_plan, shell
from grmoe.terminal import say


def prune(
    model: options.ModelFolder,
    experts: Annotated[int | None, typer.Option(help="Number of experts in every layer.")] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(
            help="As few experts as keep the perplexity increase within this: 1% or 0.01.", show_default="1%"
        ),
    ] = None,
    text: options.CalibrationText = None,
    check: options.CheckedTexts = None,
    tokens: options.TextTokens = None,
    length: options.Window = None,
    checkpoint: options.Checkpoint = "best",
    out: Annotated[Path | None, options.beside_model("results.json and prune.png", "prune")] = None,
    write: Annotated[bool, typer.Option("--write", help="Save the pruned model to OUT/model.")] = False,
) -> None:
    """Remove experts from a trained model: merge or drop them, the same number in every layer.

    The command compares methods with random pruning as the baseline. They look at the overlap of subspaces, at outputs,
    at predictions, at load, at a certified bound on the change of a layer's output, or at Fisher information. The
    command chooses the one that changes the predictions least. Nothing is retrained.

    A second prune replaces results.json. Without --write it moves a model that an earlier prune saved to OUT/model-old,
    if that is another model than this one found.

    Example: [bold]grmoe prune runs/first --experts 6 --check wikitext.txt --write[/]
    """
    with shell("lm", "studies"):
        from grmoe.prune import Plan, run, save, show
        from grmoe.runs.about import about
        from grmoe.runs.export import check_place
        from grmoe.runs.results import results_folder

        if experts is not None and max_ppl_increase is not None:
            raise ValueError("give one of --experts and --max-ppl-increase, not both")
        limit = options.parse_percent("max-ppl-increase", max_ppl_increase)
        plan = Plan(
            model=model, experts=experts, max_increase=limit, text=text, checks=check or [], tokens=tokens,
            length=length, checkpoint=checkpoint,
        )  # fmt: skip
        out = out or results_folder(model, "prune")
        if write:
            check_place(model, out / "model")
        result = run_plan(plan, run, show, partial(save, out=out, write=write))
        if write and result.body.chosen is None:
            raise ValueError(
                f"no model written: with one expert fewer, no method keeps perplexity within "
                f"{100 * limit:g} %"
            )
        if write:
            say(f"Next: {about(str(out / 'model'))[2]}")
