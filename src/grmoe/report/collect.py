"""All a page says about one run: what lies in its folder, and what can be computed for it in a minute."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grmoe.analyze import analyze
from grmoe.analyze.results import plain
from grmoe.analyze.source import Prepared, Texts
from grmoe.model.configuration_grmoe import OWN_CHOICE
from grmoe.report.facts import curves, model_facts, training_facts
from grmoe.report.sample import take
from grmoe.runs.checkpoint import CheckpointError
from grmoe.runs.folder import CONFIG, results_folder
from grmoe.runs.open import LoadedModel, open_model

RESULTS = "results.json"

OF_LAYER = (
    "layer", "alpha", "counts", "of_expert", "of_type", "domain_of_expert", "entropy", "kappa", "information",
)  # fmt: skip
OF_ANALYSIS = ("text", "tokens", "types", "type_tokens", "domains", "domain_tokens")

Watch = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Note:
    """What a section lacks and the command that makes it."""

    section: str  # "model", "curves", "frontier" or "experts"
    text: str
    command: str | None = None


@dataclass
class Content:
    """One run of a page; everything plain, None where there is nothing to show."""

    name: str
    path: str
    exported: bool
    model: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    curves: dict[str, Any] | None = None
    dial: dict[str, Any] | None = None
    analysis: dict[str, Any] | None = None
    sample: dict[str, Any] | None = None
    notes: list[Note] = field(default_factory=list)

    def as_json(self) -> Any:
        return plain(asdict(self) | {"sample": None}) | {
            "sample": self.sample
        }  # scores' steps keep their digits


def collect(
    folder: Path,
    name: str,
    texts: Sequence[str] = (),
    tokens: int = 50_000,
    checkpoint: str = "best",
    share: int = 1,
    watch: Watch = lambda _label, _step, _steps: None,
) -> Content:
    """texts: in place of the held-out text of a run. share: of how many runs in the page this is one.

    A run whose checkpoint or text cannot be read any more is shown as far as its log goes.
    """
    content = Content(name, str(folder), exported=not (folder / CONFIG).is_file())
    opened: LoadedModel | None = None
    watch("opening", 0, 1)
    try:
        opened = open_model(folder, checkpoint)
        content.model = model_facts(opened)
    except (ValueError, CheckpointError) as error:
        content.curves = None if content.exported else curves(folder)
        if content.curves is None:
            raise
        content.notes.append(Note("model", f"The model cannot be opened: {error}."))
    if not content.exported:
        content.training = training_facts(folder, opened)
        content.curves = curves(folder)
        if content.curves is None:
            content.notes.append(Note("curves", "No line in its log yet."))
    _frontier(content, folder, opened)
    if opened is not None:
        _experts(content, folder, opened, texts, tokens, share, watch)
    return content


def _frontier(content: Content, folder: Path, opened: LoadedModel | None) -> None:
    found = _read(results_folder(folder, "dial") / RESULTS)
    if found is not None and (opened is None or found.get("step") == opened.step):
        content.dial = {key: value for key, value in found.items() if key != "sensitivities"}
        return
    router = opened.model.config.router if opened is not None else None
    if router in OWN_CHOICE:
        note = Note("frontier", f"Router {router!r} chooses its experts by itself: it has no dial to set.")
    else:
        more = " --text FILE" if content.exported else ""
        said = "Not measured yet."
        if found is not None and opened is not None:
            said = f"Measured at step {found.get('step')}, not at this one, {opened.step}."
            more = f" --checkpoint {opened.step}"
        note = Note("frontier", said, f"grmoe dial {shlex.quote(str(folder))}{more}")
    content.notes.append(note)


def _experts(
    content: Content,
    folder: Path,
    opened: LoadedModel,
    texts: Sequence[str],
    tokens: int,
    share: int,
    watch: Watch,
) -> None:
    """The analysis, made if it is missing or of another step, text or setting of the dial; and the sample of gates."""
    path = results_folder(folder, "analysis") / RESULTS
    found = _read(path)
    known = [] if found is None or not content.exported else found["text"].split(", ")
    asked, texts = texts, texts or [name for name in known if Path(name).exists()]
    if opened.data is None and not texts:
        command = f"grmoe report {shlex.quote(str(folder))} --text FILE"
        content.notes.append(Note("experts", f"There is no text to route: {opened.missing}.", command))
        return
    try:
        other = found is not None and asked and found["text"] != ", ".join(asked)
        if found is None or other or not _of_this_model(found, opened):
            made = analyze(opened, texts, tokens, watch)
            if found is None:  # one of something else was asked for by somebody and stays
                made.save(path)
            found = asdict(made)
        content.analysis = {key: found[key] for key in OF_ANALYSIS} | {
            "layers": [{key: layer[key] for key in OF_LAYER} for layer in found["layers"]]
        }
        stream = (
            Texts(texts, opened.tokenizer, tokens) if texts or opened.data is None else Prepared(opened.data)
        )
        watch("sampling gates", 0, 1)
        content.sample = take(opened, stream, share).as_json()
        watch("sampling gates", 1, 1)
    except ValueError as error:  # text that is gone, a model whose gates are NaN
        if asked:
            raise
        content.notes.append(Note("experts", f"No text could be routed: {error}."))


def _of_this_model(found: dict[str, Any], opened: LoadedModel) -> bool:
    """Whether an analysis is of this checkpoint with its experts, at the α saved with it."""
    config = opened.model.config
    if (found.get("step"), found.get("experts")) != (opened.step, config.num_experts):
        return False
    then = [layer["alpha"] for layer in found["layers"]]
    # routers keep theirs in fp32
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(then, config.alphas, strict=True))


def _read(path: Path) -> dict[str, Any] | None:
    """Results of another command; a damaged file is as good as none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found
