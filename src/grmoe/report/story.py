"""What a page says first: what the model is, what the dial found, and what to do next. All of it from the results."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grmoe.model.count import short
from grmoe.tables import percent

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class NextStep:
    """A command to copy."""

    text: str
    """What it does."""
    command: str


def what_it_is(model: Facts | None, training: Facts | None) -> Iterator[str]:
    """model, training: of `grmoe.report.facts`. None where there is nothing to say."""
    if model is not None:
        yield _kind(model)
    if training is not None:
        yield from _trained(training, model)


def what_the_dial_found(dial: Facts | None, slider: Facts | None) -> Iterator[str]:
    """dial, slider: of `grmoe.report.dialled`. None where nothing was measured."""
    if dial is not None:
        yield from _found(dial)
    elif slider is not None:
        low, high = (slider["stops"][i]["experts_per_token"] for i in (0, -1))
        yield f"Its dial was measured: any budget from {low:.2f} to {high:.2f} experts per token."


def _kind(model: Facts) -> str:
    name = "GrMoE language model" if model["router"] == "grassmann" else "Mixture-of-Experts language model"
    router = "" if model["router"] == "grassmann" else f" and router “{model['router']}”"
    layers, blocks = len(model["moe_layers"]), model["blocks"]
    where = f"each of its {blocks} blocks" if layers == blocks else f"{layers} of its {blocks} blocks"
    return (
        f"{name} with {model['experts']} experts in {where}{router}: {_short(model['total'])} parameters, "
        f"{_short(model['active'])} of them active per token."
    )


def _trained(training: Facts, model: Facts | None) -> Iterator[str]:
    reached = training["logged"] if model is None else model["step"]
    if training["tokens"] is not None:
        yield f"Trained on {_short(training['tokens'])} tokens of {training['text']} ({reached:,} steps)."
    held_out = training["validation"]
    if held_out is not None and _finite(held_out["perplexity"]):
        unigram = training["unigram"]
        beside = "" if unigram is None else f" (a unigram model: {unigram:.0f})"
        yield f"Perplexity on held-out text: {held_out['perplexity']:.2f}{beside}."


def _found(dial: Facts) -> Iterator[str]:
    chosen, trained = dial["chosen"], dial["trained"]
    less, more = (f"{p['experts_per_token']:.2f}" for p in (chosen, trained))
    if chosen["experts_per_token"] >= trained["experts_per_token"]:
        yield f"The dial found nothing cheaper within its target ({dial['asked']})."
        yield f"It stays at {more} experts per token."
        return
    grown = percent(chosen["increase"]["value"])
    yield (
        f"The dial found: {less} experts per token instead of {more} for {grown} perplexity "
        f"({chosen['perplexity']:.2f} instead of {trained['perplexity']:.2f} on its calibration text)."
    )
    if chosen["speed"] is not None:
        yield _speed(chosen["speed"])


def _speed(speed: Facts) -> str:
    """A speed that timing cannot tell from the trained one is not called a gain."""
    low, high = speed["relative_interval"]
    if low <= 1 <= high:
        return f"Speed: no change beyond timing noise ({low:.2f} to {high:.2f} times as trained)."
    return f"It runs at {speed['relative']:.2f} times the trained speed."


def _short(value: float) -> str:
    return short(float(f"{value:.3g}"))


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def next_steps(
    path: str,
    exported: bool,
    model: Facts | None,
    dialled: Facts | None,
    prompt: str | None,
    written: Path | None = None,
    calibrated: bool = True,
) -> list[NextStep]:
    """The commands that follow from what is there, the most useful first. They work as they are, unless they name FILE.

    dialled: `slider_stops`. prompt: a text of the kind the model knows. Its first words go into the command. written:
    the folder of the model that `grmoe dial --write` saved; it has the chosen budget. calibrated: whether the folder
    itself takes a budget. An exported one that was dialled afterwards does not.
    """
    if model is None:
        return []
    words = shlex.quote(" ".join(re.findall(r"[^\W\d_]+", prompt or "")[:3]) or "The")
    folder = shlex.quote(path)
    steps, budget, named = [], "", ""
    if not calibrated and written is None:
        steps.append(NextStep("Save it at the chosen budget", f"grmoe dial {folder} --text FILE --write"))
    elif not calibrated:
        folder, named = shlex.quote(str(written)), " at the chosen budget"
    elif dialled is not None and dialled["exact"] and dialled["chosen"]:
        budget = f" --budget {_within(dialled['chosen']['experts_per_token'], dialled['stops'])}"
        named = " at the chosen budget"
    elif dialled is None and model["dial"]:
        dial = f"grmoe dial {folder}" + (" --text FILE" if exported else "")
        steps.append(NextStep("Find out how few experts it needs (some minutes)", dial))
    steps.append(NextStep(f"Let it write{named}", f"grmoe generate {folder} --prompt {words}{budget}"))
    if written is not None:
        steps.append(NextStep(f"Serve it{named}", f"grmoe serve {shlex.quote(str(written))}"))
    elif exported:
        steps.append(NextStep(f"Serve it{named}", f"grmoe serve {folder}{budget}"))
    else:
        out = shlex.quote(f"{path.rstrip('/')}/model")
        both = f"grmoe export {folder} --out {out} && grmoe serve {out}{budget}"
        steps.append(NextStep(f"Save and serve it{named}", both))
    steps.append(NextStep("Measure it on your own text", f"grmoe eval {folder} --text FILE{budget}"))
    return steps


def _within(experts: float, stops: list[Facts]) -> str:
    """A budget as an argument, inside the calibrated range."""
    low, high = stops[0]["experts_per_token"], stops[-1]["experts_per_token"]
    return f"{min(max(round(experts, 4), low), high):g}"
