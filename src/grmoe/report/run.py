"""From a plan to a page: collect model by model, write one file, list what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grmoe.files import write_file
from grmoe.report.content import Content, Plan, collect
from grmoe.report.page import render
from grmoe.runs.results import results_folder
from grmoe.terminal import Progress, silent


@dataclass(frozen=True)
class Report:
    contents: list[Content]
    """One for each model of the plan."""


def run(plan: Plan, progress: Progress = silent) -> Report:
    """Collect what the page shows. Makes an analysis where a model has none."""
    contents = []
    for folder, name in zip(plan.models, _unique_names(plan.models), strict=True):

        def named(stage: str, done: int, total: int, name: str = name) -> None:
            progress(f"{name}: {stage}", done, total)

        contents.append(collect(folder, name, plan, named))
    return Report(contents)


def show(report: Report) -> Iterator[str]:
    """What the page lacks, one line each, with the command that makes it."""
    for content in report.contents:
        for note in content.notes:
            more = f" Get it with: {note.command}" if note.command else ""
            yield f"{content.name}, {note.section}: {note.text}{more}"


def save(report: Report, out: Path) -> dict[str, Path]:
    """Write the page."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, render(report.contents).encode())
    return {"Page": out}


def _unique_names(models: Sequence[Path]) -> list[str]:
    """The name of each folder; its whole path where two folders have the same name."""
    names = [model.resolve().name for model in models]
    return [str(model) if names.count(name) > 1 else name for model, name in zip(models, names, strict=True)]


def default_path(models: Sequence[Path]) -> Path:
    """In the folder of a run, beside an exported model; for several models in the current folder."""
    return Path("report.html") if len(models) > 1 else results_folder(models[0], "report.html")
