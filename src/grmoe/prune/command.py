"""What `grmoe prune` prints and leaves behind."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from grmoe.dial.write import check_place
from grmoe.prune.figure import FIGURE, draw
from grmoe.prune.report import card_section, methods_table, summary, write_results
from grmoe.prune.run import Plan, Result, run_prune
from grmoe.prune.write import write_model
from grmoe.runs.folder import results_folder
from grmoe.terminal import console, measuring, say_where


def command(model: Path, plan: Plan, out: Path | None, write: bool) -> Result:
    """Search with progress, print, draw, and write what is asked for."""
    out = out or results_folder(model, "prune")
    if write:
        check_place(model, out / "model")
    with measuring() as tick:
        result = run_prune(model, plan, tick)
    console.print(methods_table(result))
    for line in summary(result):
        console.print(escape(line), highlight=False, soft_wrap=True)
    said = {"Numbers": write_results(result, out), "Figure": draw(result, out / FIGURE)}
    if write and result.chosen is not None:
        said["Model"] = write_model(result.opened, result.experts, out / "model", card_section(result))
    say_where(**said)
    if write and result.chosen is None:
        raise ValueError(
            f"no model written: with one expert less no method stays within {100 * plan.increase:g} % of perplexity"
        )
    return result
