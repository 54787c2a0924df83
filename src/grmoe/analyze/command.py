"""`grmoe analyze`: opens, analyses, writes, and says what is to be printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from transformers.utils import logging

from grmoe.analyze.figures import draw
from grmoe.analyze.report import correlation_lines, rich_tables, write_markdown
from grmoe.analyze.study import analyze
from grmoe.runs.checkpoint import CheckpointError
from grmoe.runs.open import open_model
from grmoe.terminal import fail


def run(
    model: Path,
    texts: Sequence[str],
    tokens: int,
    alpha: float | None,
    checkpoint: str,
    out: Path,
    bar: Progress,
) -> list[str | Table]:
    """Writes results.json, analysis.md and figures into `out`; returns what to print, in order."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    task = bar.add_task("opening", total=None)

    def watch(label: str, step: int, steps: int) -> None:
        bar.update(task, description=label, completed=step, total=steps)

    try:
        found = analyze(open_model(model, checkpoint, alpha), texts, tokens, watch)
    except (ValueError, CheckpointError) as error:
        fail(escape(str(error)))
    bar.update(task, description="drawing", total=None)
    found.save(out / "results.json")
    figures = draw(found, out)
    write_markdown(found, figures, out / "analysis.md")
    return [
        *rich_tables(found),
        *map(escape, correlation_lines(found)),
        f"Numbers: {escape(str(out / 'results.json'))}",
        f"Report:  [bold]{escape(str(out / 'analysis.md'))}[/] with {len(figures)} figures",
    ]
