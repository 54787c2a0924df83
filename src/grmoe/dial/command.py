"""What `grmoe dial` prints and leaves behind."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from grmoe.dial.figure import FIGURE, draw
from grmoe.dial.report import alpha_table, certificate_table, frontier_table, summary, write_results
from grmoe.dial.run import Plan, Result, run_dial
from grmoe.dial.write import check_place, write_model
from grmoe.runs.folder import results_folder
from grmoe.terminal import console, measuring, say_where


def command(model: Path, plan: Plan, out: Path | None, write: bool) -> Result:
    """Search with progress, print, draw, and write what is asked for."""
    out = out or results_folder(model, "dial")
    if write:
        check_place(model, out / "model")
    with measuring() as tick:
        result = run_dial(model, plan, tick)
    for table in (frontier_table(result), alpha_table(result), certificate_table(result)):
        console.print(table)
    for line in summary(result):
        console.print(escape(line), highlight=False, soft_wrap=True)
    said = {"Numbers": write_results(result, out), "Figure": draw(result, out / FIGURE)}
    if write:
        said["Model"] = write_model(result, out / "model")
    say_where(**said)
    return result
