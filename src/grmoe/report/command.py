"""`grmoe report`: collects run by run, writes the page, and says what is missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.progress import Progress
from transformers.utils import logging

from grmoe.report.collect import Content, collect
from grmoe.report.page import render
from grmoe.runs.checkpoint import CheckpointError
from grmoe.runs.folder import results_folder
from grmoe.terminal import fail


def run(
    runs: Sequence[Path], out: Path | None, texts: Sequence[str], tokens: int, checkpoint: str, bar: Progress
) -> list[str]:
    """Writes the page; returns what to print."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    task = bar.add_task("opening", total=None)
    contents: list[Content] = []
    stage = ""
    for folder, name in zip(runs, names_of(runs), strict=True):

        def watch(label: str, step: int, steps: int, name: str = name) -> None:
            nonlocal stage
            before, stage = stage, f"{name}: {label}"
            bar.update(task, description=stage, completed=step, total=steps)
            if stage != before and not bar.console.is_terminal:
                print(stage, file=sys.stderr, flush=True)

        try:
            contents.append(collect(folder, name, texts, tokens, checkpoint, len(runs), watch))
        except (ValueError, CheckpointError) as error:
            fail(escape(str(error)))
    bar.update(task, description="writing", total=None)
    path = out or default_path(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    page = render(contents)
    path.write_text(page, encoding="utf-8")
    said = [f"Page: [bold]{escape(str(path))}[/] ({len(page.encode()) / 1e6:.1f} MB, opens in any browser)"]
    for content in contents:
        for note in content.notes:
            more = f" Get it with: [bold]{escape(note.command)}[/]" if note.command else ""
            said.append(f"  {escape(content.name)}, {note.section}: {escape(note.text)}{more}")
    return said


def names_of(runs: Sequence[Path]) -> list[str]:
    """A name of its own for each: the folder's, or the path of those that share it."""
    names = [run.resolve().name for run in runs]
    return [str(run) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]


def default_path(runs: Sequence[Path]) -> Path:
    """In the folder of a run, beside an exported one; of several runs where the command stands."""
    if len(runs) > 1:
        return Path("report.html")
    return results_folder(runs[0], "report.html")
