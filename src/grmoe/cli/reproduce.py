"""Repeat the paper's tables and figures: `grmoe reproduce`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli import options
from grmoe.cli.shell import list_and_exit, shell
from grmoe.terminal import console, say_written, show_progress

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]... [key=value]...",
        help="Studies to run, or `all`; then settings of `grmoe train` that do not change what is trained.",
    ),
]


def reproduce(
    names: Names = None,
    status: Annotated[
        bool,
        typer.Option("--status", help="Print how much of each study is done and what it says; run nothing."),
    ] = False,
    pages: Annotated[
        bool, typer.Option("--pages", help="Write the pages of all studies from their results; run nothing.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder of `grmoe prepare`, for studies that train language models.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Another text to measure models on, beside held-out text. Repeatable."),
    ] = None,
    tokens: options.TextTokens = None,
    tasks_from: Annotated[
        Path | None,
        typer.Option(help="Folder of TASK_SPLIT.jsonl, such as hellaswag_val.jsonl, for downstream tasks."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="A recipe, method or benchmark of a study to run; `?` lists them. Repeatable.",
            show_default="all parts",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds per recipe.", show_default="the study's own")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Training steps. Results of other steps are kept apart and are not in the pages.",
            show_default="the study's own",
        ),
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Models to train at the same time.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Stop after this time. Running models save, and the next call continues them. No model starts that "
            "would not finish.",
            show_default="no limit",
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Keep the models of this recipe once they are measured; `none` keeps none, `?` lists recipes. "
            "Repeatable.",
            show_default="all models",
        ),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the results that are kept.")] = Path("results"),
    work: Annotated[Path, typer.Option(help="Folder for models and other large files.")] = Path(
        "runs/reproduce"
    ),
    docs: Annotated[Path, typer.Option(help="Folder of the documentation, for --pages.")] = Path("docs"),
    device: options.Device = "auto",
    revision: Annotated[
        str, typer.Option(help="Revision to note with results where git cannot be asked.")
    ] = "",
) -> None:
    """Repeat the paper's tables and figures, and say which of its claims hold.

    A study is a list of small jobs. Jobs with results are skipped, interrupted ones continue, and a model that several
    studies need is trained once. Studies come in the order in which you name them. [bold]grmoe reproduce all
    --status[/] lists the studies.

    Example: [bold]grmoe reproduce language-model --data runs/data --at-once 9 --minutes 9[/]

    Example: [bold]grmoe reproduce --pages[/]
    """
    given = names or []
    settings = tuple(word for word in given if "=" in word)
    chosen = [word for word in given if "=" not in word]
    with shell("lm", "studies", continues=True):
        from grmoe.studies.pages import status_table, write_pages
        from grmoe.studies.queue import run_studies
        from grmoe.studies.registry import check_keep, check_only, find_studies, list_kept, list_parts
        from grmoe.studies.study import Place

        if not (chosen or status or pages):
            raise ValueError("name a study, or all; --status lists them")
        studies = find_studies(chosen)
        list_and_exit(only, list_parts(studies))
        list_and_exit(keep, list_kept(studies))
        check_only(only or (), studies)
        check_keep(keep or (), studies)
        if not status and not pages:
            place = Place(
                results=results, work=work, data=data, texts=tuple(text or ()), device=device, at_once=at_once,
                until=None if minutes is None else time.monotonic() + 60 * minutes, only=tuple(only or ()), seeds=seeds,
                steps=steps, settings=settings, tokens=tokens, revision=revision, tasks=tasks_from,
                keep=None if keep is None else tuple(name for name in keep if name != "none"),
            )  # fmt: skip
            with show_progress() as progress:
                run_studies(studies, place, progress)
        if pages:
            say_written(**write_pages(find_studies([]), results, docs))
        else:
            console.print(status_table(studies, results))
