"""What `grmoe prune` leaves behind: results.json, the picture, and the pruned model."""

from __future__ import annotations

from pathlib import Path

from grmoe.prune.figure import FIGURE, draw
from grmoe.prune.results import Result
from grmoe.prune.tables import card_section
from grmoe.runs.card import card_name, model_card
from grmoe.runs.export import write_model
from grmoe.runs.results import save_results


def save(result: Result, out: Path, write: bool = False) -> dict[str, Path]:
    """Write results and picture to OUT; with `write` also the pruned model, to OUT/model. Returns the places.

    No model is written where nothing was chosen.
    """
    # The section describes the pruned model. It is not part of the results, because a card of the trained model
    # would show it too.
    numbers = save_results(result.loaded, "prune", result.body, out)
    places = {"Numbers": numbers, "Figure": draw(result, out / FIGURE)}
    if write and result.body.chosen is not None:
        folder, sections = out / "model", {"prune": card_section(result)}
        card = model_card(result.loaded, card_name(folder), measured=False, sections=sections)
        places["Model"] = write_model(result.loaded, folder, card)
    return places
