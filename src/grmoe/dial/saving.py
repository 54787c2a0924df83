"""What `grmoe dial` leaves behind: results.json, the picture, and the model with its new setting.

A model of an earlier dial never stays beside results that differ from it: it moves to another folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grmoe.dial.figure import FIGURE, draw
from grmoe.dial.results import Result
from grmoe.dial.saved import FILE
from grmoe.dial.tables import card_section
from grmoe.runs.card import card_name, model_card
from grmoe.runs.export import set_aside, write_model
from grmoe.runs.results import Results, ResultsError, load_results, plain, save_results
from grmoe.terminal import note

MODEL = "model"


def save(result: Result, out: Path, write: bool = False) -> dict[str, Path]:
    """Write results and picture to OUT; with `write` also the model in memory, to OUT/model. Returns the places.

    The folder, loaded again, has the measured perplexity: weights and dtype are those that were measured.
    Says which earlier results and which earlier model were replaced.
    """
    loaded, section, folder = result.loaded, card_section(result), out / MODEL
    earlier = _earlier(out)
    if not write:
        set_aside(loaded, folder, "dial", "--write saves the model of this one")
    numbers = save_results(loaded, "dial", result.body, out, section, tells=False)
    if earlier is not None and _asked(earlier.body) != _asked(plain(result.body)):
        note(f"Replaced the results of {earlier.created}: {earlier.body['asked']}; {_chosen(earlier.body)}")
    places = {"Numbers": numbers, "Figure": draw(result, out / FIGURE)}
    if write:
        card = model_card(loaded, card_name(folder), sections={"dial": section})
        places["Model"] = write_model(loaded, folder, card)
    (out / FILE).unlink(missing_ok=True)  # all of it is in the results
    return places


def _earlier(out: Path) -> Results | None:
    """What an earlier dial left; None where there is nothing that can be read."""
    try:
        return load_results(out / "results.json", "dial")
    except (OSError, ResultsError):
        return None


def _asked(body: dict[str, Any]) -> tuple[Any, ...]:
    """What two dials must share to be the same question with the same answer."""
    timed = body["chosen"]["speed"] is not None
    return body["asked"], body["calibration"], body["chosen"]["name"], body["budget"], timed


def _chosen(body: dict[str, Any]) -> str:
    chosen = body["chosen"]
    speed = "" if chosen["speed"] is None else f", {chosen['speed']['relative']:.2f} times the trained speed"
    return f"chosen were {chosen['experts_per_token']:.3f} experts per token{speed}"
