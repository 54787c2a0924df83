"""What a page says about one model: its log, the results of other commands, its gates on real text."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grmoe.model.choices_grmoe import OWN_CHOICE
from grmoe.probe.text import Stream, open_stream
from grmoe.report.dialled import dial_facts, slider_stops
from grmoe.report.facts import curves, model_facts, training_facts
from grmoe.report.sample import sample_gates
from grmoe.report.story import NextStep, next_steps, what_it_is, what_the_dial_found
from grmoe.report.writing import prompt_ids, three_budgets, write_samples
from grmoe.routing.curve import check_curve
from grmoe.runs.checkpoint import CheckpointError
from grmoe.runs.folder import CONFIG, dialled_model
from grmoe.runs.open import LoadedModel, open_model
from grmoe.runs.results import (
    RESULTS,
    Results,
    ResultsError,
    belong,
    find_results,
    plain,
    remake,
    results_folder,
    save_results,
)
from grmoe.terminal import Progress, silent

DIGITS = 6  # significant digits of numbers in the page
_PERCENT_DIGITS = 4
# Keys of an analysis that the page uses.
_ANALYSIS = ("text", "tokens", "types", "type_tokens", "domains", "domain_tokens")
_LAYER = ("layer", "alpha", "counts", "domain_of_expert", "entropy", "kappa", "information")

Analyse = Callable[[LoadedModel, Sequence[str], int, Progress], Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to show."""

    models: Sequence[Path]
    """Folders of runs or exported models."""
    analyse: Analyse
    """Makes a missing analysis: (model, texts, tokens, progress) → body of its results. `grmoe.analyze.analyze`."""
    texts: Sequence[str] = ()
    """Text to route. Empty: the text a run was validated on."""
    tokens: int = 50_000
    """Of an analysis that has to be made."""
    checkpoint: str = "best"
    new_tokens: int = 60
    """Length of the texts the model writes."""


@dataclass(frozen=True)
class Note:
    """What a section lacks."""

    section: str
    """"model", "curves", "frontier", "writing" or "experts"."""
    text: str
    command: str | None = None
    """Makes what is missing."""


@dataclass(kw_only=True)
class Content:
    """One model of a page, as plain data. None where there is nothing to show."""

    name: str
    path: str
    exported: bool
    story: list[str] = field(default_factory=list)
    """What the model is and how it was trained, one sentence each."""
    found: list[str] = field(default_factory=list)
    """What the dial found, one sentence each. Empty if it was not measured."""
    next: list[NextStep] = field(default_factory=list)
    model: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    curves: dict[str, Any] | None = None
    dial: dict[str, Any] | None = None
    slider: dict[str, Any] | None = None
    writing: dict[str, Any] | None = None
    analysis: dict[str, Any] | None = None
    sample: dict[str, Any] | None = None
    notes: list[Note] = field(default_factory=list)

    def as_json(self) -> Any:
        # The sample keeps all digits, because the page computes with them. An analysis is shown in percent.
        few = {"sample": plain(self.sample), "analysis": plain(self.analysis, _PERCENT_DIGITS)}
        return plain(vars(self) | {"sample": None}, DIGITS) | few


def collect(folder: Path, name: str, plan: Plan, progress: Progress = silent) -> Content:
    """Everything about one model. If its checkpoint or text cannot be read, the log is shown and a note says why."""
    content = Content(name=name, path=str(folder), exported=not (folder / CONFIG).is_file())
    loaded: LoadedModel | None = None
    progress("opening", 0, 1)
    try:
        loaded = open_model(folder, plan.checkpoint)
        content.model = model_facts(loaded)
    except (ValueError, CheckpointError) as error:
        if content.exported or curves(folder) is None:
            raise
        content.notes.append(Note("model", f"The model cannot be opened: {error}."))
    if not content.exported:
        content.training = training_facts(folder, loaded)
        content.curves = curves(folder)
        if content.curves is None:
            content.notes.append(Note("curves", "The log is still empty."))
    body = _add_frontier(content, folder, loaded)
    calibrated = True  # whether commands take a budget for this folder
    if content.model is not None:
        if body is not None and body.get("curve") not in (None, [], content.model["curve"]):
            # A dial leaves an exported folder as it was: its curve is in the results alone.
            content.model["curve"], calibrated = body["curve"], False
        content.slider = slider_stops(body, content.model["curve"], content.model["budget"])
    if loaded is not None:
        stream = _add_experts(content, loaded, plan, progress)
        _add_writing(content, loaded, stream, plan, progress)
    content.story = list(what_it_is(content.model, content.training))
    content.found = list(what_the_dial_found(content.dial, content.slider))
    prompt = None if content.writing is None else content.writing["prompt"]
    place = results_folder(folder, "dial") / "model"
    written = place if content.dial is not None and (place / "config.json").is_file() else None
    content.next = next_steps(
        content.path, content.exported, content.model, content.slider, prompt, written, calibrated
    )
    return content


def _find(content: Content, kind: str) -> tuple[Results | None, str | None]:
    """(results of another command, why they cannot be read)."""
    try:
        return find_results(Path(content.path), kind), None
    except ResultsError as error:
        return None, f"{error.problem}."


def _dialled_run(folder: Path) -> Path | None:
    """The run whose dial saved this folder as its `dial/model`; None for any other folder."""
    run = folder.parent.parent
    return run if dialled_model(run) == folder and (folder.parent / RESULTS).is_file() else None


def _add_frontier(content: Content, folder: Path, loaded: LoadedModel | None) -> dict[str, Any] | None:
    """What the dial measured. Returns the body of its results, if they are of this checkpoint."""
    router = None if loaded is None else loaded.model.config.router
    if router in OWN_CHOICE:
        text = f"Router {router!r} selects experts by its own rule: it has no dial to set."
        content.notes.append(Note("frontier", text))
        return None
    command = remake(folder, "dial") + (" --text FILE" if content.exported else "")
    found, problem = _find(content, "dial")
    if found is None:
        curve = loaded is not None and loaded.model.config.budget_curve
        missing = (
            "The results of its dial are not here, only its curve of budgets."
            if curve
            else "Not measured yet."
        )
        run = _dialled_run(folder) if curve else None
        if run is not None:  # measured already, for the page of the run
            missing, command = (
                f"The results of its dial are in {run}.",
                f"grmoe report {shlex.quote(str(run))}",
            )
        content.notes.append(Note("frontier", problem or missing, command))
        return None
    if loaded is not None and found.step != loaded.step:
        text = f"Measured at step {found.step}. This page shows step {loaded.step}."
        content.notes.append(Note("frontier", text, f"{command} --checkpoint {loaded.step}"))
        return None
    if loaded is not None and not _of_its_weights(found, loaded):
        content.notes.append(Note("frontier", "Measured with another model of this name.", command))
        return None
    content.dial = dial_facts(found.body) | {"device": found.device, "dtype": found.dtype}
    return found.body


def _add_writing(
    content: Content, loaded: LoadedModel, stream: Stream | None, plan: Plan, progress: Progress
) -> None:
    """Texts at three budgets, or the reason why there are none."""
    ids = prompt_ids(loaded, stream)
    if not ids:
        content.notes.append(Note("writing", "The tokenizer has no token for a prompt: nothing was written."))
        return
    progress("writing", 0, 1)
    curve = None if content.model is None else content.model["curve"]
    content.writing = write_samples(loaded, ids, three_budgets(content.slider), plan.new_tokens, curve)
    progress("writing", 1, 1)


def _add_experts(content: Content, loaded: LoadedModel, plan: Plan, progress: Progress) -> Stream | None:
    """The analysis and the sample of gates. An analysis that does not fit this model and text is made again.

    Returns the text that was routed.
    """
    found, problem = _find(content, "analysis")
    if problem is not None:
        content.notes.append(Note("experts", problem, remake(loaded.path, "analysis")))
    body = None if found is None else found.body
    # An exported model has no text of its own: take the files of its last analysis.
    known = body["text"].split(", ") if body is not None and content.exported else []
    texts = plan.texts or [name for name in known if Path(name).exists()]
    if loaded.data is None and not texts:
        command = f"grmoe report {shlex.quote(content.path)} --text FILE"
        content.notes.append(Note("experts", f"There is no text to route: {loaded.no_data}.", command))
        return None
    try:
        if found is None or body is None or not _fits(found, loaded, plan.texts):
            body = plain(plan.analyse(loaded, texts, plan.tokens, progress), DIGITS)
            if found is None and problem is None:  # a file that is there already stays
                _keep_analysis(content, loaded, body)
        progress("sampling gates", 0, 1)
        stream = open_stream(texts, loaded, plan.tokens)
        content.sample = sample_gates(loaded, stream, len(plan.models)).as_json()
        layers = [{key: layer[key] for key in _LAYER} for layer in body["layers"]]
        content.analysis = {key: body[key] for key in _ANALYSIS} | {"layers": layers}
        progress("sampling gates", 1, 1)
    except ValueError as error:  # the text is gone, or the model's gates are NaN
        if plan.texts:
            raise
        content.notes.append(Note("experts", f"No text could be routed: {error}."))
        return None
    return stream


def _keep_analysis(content: Content, loaded: LoadedModel, body: dict[str, Any]) -> None:
    """For the next page. A folder that may only be read is no reason to show nothing."""
    try:
        save_results(loaded, "analysis", body, results_folder(loaded.path, "analysis"), tells=False)
    except OSError as error:
        content.notes.append(Note("experts", f"Its analysis could not be saved: {error}."))


def _of_its_weights(found: Results, loaded: LoadedModel) -> bool:
    """Whether results are of this model. Those of an earlier version do not name their weights."""
    place = loaded.path if loaded.checkpoint is None else loaded.checkpoint.path
    if not belong(found, loaded.step, place):
        return False
    config = loaded.model.config
    try:
        if found.body.get("curve"):
            check_curve(found.body["curve"], len(config.moe_layers), config.gate_experts)
    except ValueError:
        return False
    return True


def _fits(found: Results, loaded: LoadedModel, texts: Sequence[str]) -> bool:
    """Whether an analysis is of this checkpoint, its layers and its experts, at the saved α, on the text asked for."""
    config, body = loaded.model.config, found.body
    if texts and body["text"] != ", ".join(texts):
        return False
    blocks = [layer["layer"] for layer in body["layers"]]
    if (body["experts"], blocks) != (config.gate_experts, config.moe_layers):
        return False
    if not _of_its_weights(found, loaded):
        return False
    # Routers keep α in fp32.
    alphas = [numbers.alpha for numbers in config.numbers]
    pairs = zip([layer["alpha"] for layer in body["layers"]], alphas, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in pairs)
