"""What `grmoe dial` leaves behind: results.json, the picture, and the model with its new setting."""

from __future__ import annotations

from pathlib import Path

from grmoe.dial.figure import FIGURE, draw
from grmoe.dial.results import Result
from grmoe.dial.saved import FILE
from grmoe.dial.tables import card_section
from grmoe.runs.card import card_name, model_card
from grmoe.runs.export import write_model
from grmoe.runs.results import save_results


def save(result: Result, out: Path, write: bool = False) -> dict[str, Path]:
    """Write results and picture to OUT; with `write` also the model in memory, to OUT/model. Returns the places.

    The folder, loaded again, has the measured perplexity: weights and dtype are those that were measured.
    """
    loaded, section = result.loaded, card_section(result)
    numbers = save_results(loaded, "dial", result.body, out, section)
    places = {"Numbers": numbers, "Figure": draw(result, out / FIGURE)}
    if write:
        folder = out / "model"
        card = model_card(loaded, card_name(folder), sections={"dial": section})
        places["Model"] = write_model(loaded, folder, card)
    (out / FILE).unlink(missing_ok=True)  # all of it is in the results
    return places
