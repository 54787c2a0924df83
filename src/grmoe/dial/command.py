"""What `grmoe dial` prints and leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.markup import escape

from grmoe.dial.figure import FIGURE, draw
from grmoe.dial.report import alpha_table, certificate_table, frontier_table, summary, write_results
from grmoe.dial.run import Plan, Result, run_dial
from grmoe.dial.write import check_place, write_model
from grmoe.terminal import console, progress
from grmoe.train.record import results_folder


def command(model: Path, plan: Plan, out: Path | None, write: bool) -> Result:
    """Search with progress, print, draw, and write what is asked for."""
    out = out or results_folder(model, "dial")
    if write:
        check_place(model, out / "model")
    with progress() as bar:
        task = bar.add_task("opening", total=None)
        stage = ""

        def tick(label: str, total: int) -> None:
            nonlocal stage
            bar.update(task, description=label, total=total, advance=1)
            if label != stage and not bar.console.is_terminal:
                print(f"measuring: {label}", file=sys.stderr, flush=True)
            stage = label

        result = run_dial(model, plan, tick)
    for table in (frontier_table(result), alpha_table(result), certificate_table(result)):
        console.print(table)
    for line in summary(result):
        console.print(escape(line), highlight=False, soft_wrap=True)
    said = {"Numbers": write_results(result, out), "Figure": draw(result, out / FIGURE)}
    if write:
        said["Model"] = write_model(result, out / "model")
    for name, path in said.items():
        console.print(f"{name + ':':<9}[bold]{escape(str(path))}[/]", highlight=False, soft_wrap=True)
    return result
