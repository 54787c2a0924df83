"""How good a model is: `grmoe eval`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from grmoe.cli.options import Checkpoint
from grmoe.terminal import console, fail, need, progress


def evaluate(
    folder: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder of `grmoe train` or `grmoe export`.")
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="A file or folder of .txt, .jsonl (both also .gz, .xz, .zst) or .parquet; `validation` is the split "
            "a run was validated on. Repeatable.",
            show_default="validation, unless there are tasks",
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="A task of lm-evaluation-harness, by name or as a YAML file of it. Repeatable."),
    ] = None,
    tasks_from: Annotated[
        Path | None,
        typer.Option(
            help="Folder of TASK_SPLIT.jsonl (also .gz, .xz, .zst), such as hellaswag_val.jsonl: tasks come from here "
            "and not from the hub; without --task, all of them."
        ),
    ] = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(min=0, help="The dial; repeatable.", show_default="as saved with the model"),
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Examples in a task's prompt.", show_default="the task's own; 0")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each task.", show_default="all")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of each domain of a text.", show_default="all")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens a window.", show_default="as trained, or the model's longest"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens from window to window; less overlaps.", show_default="the length: no overlap"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Windows, or a task's sequences, at once.")] = 8,
    checkpoint: Checkpoint = "best",
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder for results.json and the tasks made.",
            show_default="MODEL/eval of a run, MODEL-eval",
        ),
    ] = None,
) -> None:
    """Measure a model: perplexity of texts, lm-evaluation-harness tasks, at one or several settings of the dial.

    A table has a column for each α, with the experts a token above the numbers. Local files need no network. Tasks need
    lm_eval: pip install 'grmoe\\[eval]'.

    Example: [bold]grmoe eval my-model --text heldout/ --tasks-from evals/ --alpha 0.5 --alpha 1 --alpha 2[/]
    """
    need("transformers", "yaml", extra="lm")
    tasks = task or []
    if tasks or tasks_from:
        need("lm_eval", "accelerate", extra="eval")
    from transformers.utils import logging

    from grmoe.evaluate.command import Settings, run
    from grmoe.evaluate.report import domains, summary
    from grmoe.runs.checkpoint import CheckpointError
    from grmoe.runs.folder import results_folder

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    settings = Settings(
        model=folder, texts=text or [], tasks=tasks, tasks_from=tasks_from, alphas=alpha or [], shots=shots,
        limit=limit, tokens=tokens, length=length, stride=stride, batch=batch, checkpoint=checkpoint,
        out=out or results_folder(folder, "eval"),
    )  # fmt: skip
    try:
        result = run(settings, progress, lambda text: print(text, file=sys.stderr, flush=True))
    except (ValueError, CheckpointError, ModuleNotFoundError) as error:
        fail(escape(str(error)))
    if result.points[0].texts:
        console.print(domains(result.points, result.length, result.stride))
    console.print(summary(result.points))
    console.print(f"Numbers: {escape(str(result.numbers))}", highlight=False, soft_wrap=True)
