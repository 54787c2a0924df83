"""How good a model is: `grmoe eval`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli.options import Checkpoint, ModelFolder, beside_model, parse_numbers
from grmoe.cli.shell import run_plan, shell


def evaluate(
    model: ModelFolder,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to measure: a file or folder as `grmoe prepare` reads it, prepared tokens, or `validation`, "
            "the split a run was validated on. Repeatable.",
            show_default="validation, unless there are tasks",
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="Task of lm-evaluation-harness: a name, or a YAML file in its format. Repeatable."),
    ] = None,
    tasks_from: Annotated[
        Path | None,
        typer.Option(
            help="Folder of TASK_SPLIT.jsonl (also .gz, .xz, .zst), such as hellaswag_val.jsonl. Tasks come from here "
            "instead of the hub; without --task, all of them."
        ),
    ] = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(help="Setting of the dial. Repeatable.", show_default="as saved with the model"),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NUMBER[,NUMBER...]",
            help="Experts per token, within the range that `grmoe dial` calibrated. Several with commas. Repeatable.",
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Examples per prompt of a task.",
            show_default="the task's own, or 0",
        ),
    ] = None,
    scorer: Annotated[
        str,
        typer.Option(
            help="What scores tasks: `harness` (lm_eval), `grmoe` (files of --tasks-from, same numbers), or `auto`: "
            "lm_eval where it is installed."
        ),
    ] = "auto",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most rows of each task.", show_default="all")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of each domain of a text.", show_default="all")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per window.", show_default="as trained, or the model's longest"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens from window to window. Less than the length overlaps.",
            show_default="the length: no overlap",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Windows, or sequences of a task, per forward pass.")] = 8,
    checkpoint: Checkpoint = "best",
    out: Annotated[Path | None, beside_model("results.json and the task files made", "eval")] = None,
) -> None:
    """Measure perplexity on texts and lm-evaluation-harness tasks, at one or several budgets or settings of the dial.

    The table has one column per α and per budget, with the experts per token above the numbers. Local files need no
    network. Tasks that are not local files need lm_eval: pip install "grmoe\\[eval]".

    Example: [bold]grmoe eval my-model --text heldout/ --tasks-from evals/ --alpha 0.5 --alpha 1 --alpha 2[/]

    Example: [bold]grmoe eval runs/first/dial/model --text heldout/ --budget 1,1.5,2[/]
    """
    needs_harness = bool(task or tasks_from) and (scorer == "harness" or tasks_from is None)
    with shell("lm", *(["eval"] if needs_harness else [])):
        from grmoe.evaluate import Plan, run, save, show
        from grmoe.runs.results import results_folder

        plan = Plan(
            model=model, texts=text or [], tasks=task or [], tasks_from=tasks_from, alphas=alpha or [],
            budgets=parse_numbers("budget", budget), shots=shots, limit=limit, tokens=tokens, length=length,
            stride=stride, batch=batch, scorer=scorer, checkpoint=checkpoint, out=out or results_folder(model, "eval"),
        )  # fmt: skip
        run_plan(plan, run, show, partial(save, out=plan.out))
