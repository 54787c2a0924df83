"""What `grmoe prune` leaves behind: results.json, the picture, and the pruned model.

A model of an earlier prune never stays beside results that differ from it: it moves to another folder.
"""

from __future__ import annotations

from pathlib import Path

from grmoe.prune.figure import FIGURE, draw
from grmoe.prune.results import Result
from grmoe.prune.tables import card_section
from grmoe.runs.card import card_name, model_card
from grmoe.runs.export import set_aside, write_model
from grmoe.runs.results import save_results

MODEL = "model"


def save(result: Result, out: Path, write: bool = False) -> dict[str, Path]:
    """Write results and picture to OUT; with `write` also the pruned model, to OUT/model. Returns the places.

    No model is written where nothing was chosen. Says which earlier model was moved.
    """
    folder, found = out / MODEL, result.body.chosen is not None
    if not (write and found):
        advice = "--write saves the model of this one" if found else "This one found none"
        set_aside(result.loaded, folder, "prune", advice)
    # The section describes the pruned model. It is not part of the results, because a card of the trained model
    # would show it too.
    numbers = save_results(result.loaded, "prune", result.body, out)
    places = {"Numbers": numbers, "Figure": draw(result, out / FIGURE)}
    if write and found:
        sections = {"prune": card_section(result)}
        card = model_card(result.loaded, card_name(folder), measured=False, sections=sections)
        places["Model"] = write_model(result.loaded, folder, card)
    return places
