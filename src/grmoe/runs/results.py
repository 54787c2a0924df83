"""One envelope for the results.json of every command: what was measured, on which model, on which machine.

`grmoe dial`, `eval`, `analyze` and `prune` write it beside the model they measured. `grmoe report` and the model card
read it. Each command owns the `body` and, in `card`, its Markdown section of the model card, so no command
reads the body of another.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import grmoe
from grmoe.files import beside, read_json, reason, write_file
from grmoe.hardware import device_name
from grmoe.runs.folder import CONFIG
from grmoe.runs.weights import fingerprint
from grmoe.terminal import note

if TYPE_CHECKING:  # opening a run reads its results
    from grmoe.runs.open import LoadedModel

FORMAT = 2  # increased when the meaning of a body changes; older files are refused
RESULTS = "results.json"
# Types of the fields that are no text.
_TYPES: dict[str, Any] = {"step": int | None, "threads": int, "command": list, "body": dict, "format": int}
# The command that makes each kind of results, and the folder they go to.
COMMANDS = {"dial": "dial", "eval": "eval", "analysis": "analyze", "prune": "prune"}


class ResultsError(ValueError):
    """A results.json that is damaged or of another version; the message names the command that makes a new one."""

    def __init__(self, problem: str, command: str) -> None:
        super().__init__(f"{problem}; make it again with: {command}")
        self.problem = problem


@dataclass(frozen=True, kw_only=True)
class Results:
    kind: str
    """"dial", "eval", "analysis" or "prune"."""
    model: str
    """Folder of the run or of the exported model."""
    step: int | None
    """Checkpoint of the run; None for an exported model."""
    device: str
    """Name of the GPU, or "CPU"."""
    dtype: str
    threads: int
    grmoe: str
    """Version that wrote the file."""
    created: str
    command: list[str]
    body: dict[str, Any]
    card: str = ""
    """Section of the model card, Markdown; empty for none."""
    weights: str = ""
    """Of which weights (`grmoe.runs.weights`). Empty: of an earlier version, or they could not be read."""
    format: int = FORMAT


def results_folder(model: Path, kind: str) -> Path:
    """Inside a run's folder, but next to an exported model, because an exported folder must not change."""
    return model / kind if (model / CONFIG).is_file() else beside(model, f"-{kind}")


def save_results(
    loaded: LoadedModel, kind: str, body: Any, out: Path, card: str = "", tells: bool = True
) -> Path:
    """Write OUT/results.json atomically. body: a dataclass, or plain data.

    tells: it says on stderr which results of another call it replaced.
    """
    model, earlier = loaded.model, _other_call(out, kind) if tells else None
    place = loaded.path if loaded.checkpoint is None else loaded.checkpoint.path
    results = Results(
        kind=kind,
        model=str(loaded.path),
        step=loaded.step,
        device=device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        grmoe=grmoe.__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
        body=plain(body),
        card=card,
        weights=fingerprint(place),
    )
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(results), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_file(out / RESULTS, f"{text}\n".encode())
    if earlier is not None:
        made = f"{earlier.created}, made by: {shlex.join(earlier.command)}"
        note(f"Replaced the results of {made}. --out OTHER keeps both")
    return out / RESULTS


def _other_call(out: Path, kind: str) -> Results | None:
    """Results in OUT that another call left. None for those of the same call, and where nothing can be read."""
    try:
        earlier = load_results(out / RESULTS, kind)
    except (OSError, ResultsError):
        return None
    return earlier if earlier.command[1:] != sys.argv[1:] else None


def load_results(path: Path, kind: str) -> Results:
    """Read a results.json of this version, or raise `ResultsError` with the command that makes a new one."""
    try:
        found = read_json(path)
    except ValueError as error:
        why = reason(error.__cause__ or error)
        raise ResultsError(f"{path} is damaged ({why})", _command_of(path, kind)) from error
    if found.get("format") != FORMAT or found.get("kind") != kind:
        raise ResultsError(f"{path} was written by another version of grmoe", _command_of(path, kind))
    found.setdefault("weights", "")
    missing = [f.name for f in fields(Results) if f.name not in found]
    if missing:
        raise ResultsError(f"{path} is damaged (without {', '.join(missing)})", _command_of(path, kind))
    wrong = [f.name for f in fields(Results) if not isinstance(found[f.name], _TYPES.get(f.name, str))]
    if wrong:
        got = f"{wrong[0]} is {found[wrong[0]]!r:.40}"
        raise ResultsError(f"{path} is damaged ({got})", _command_of(path, kind))
    return Results(**{f.name: found[f.name] for f in fields(Results)})


def find_results(model: Path, kind: str) -> Results | None:
    """The results of a command for a model; None if it was never run."""
    path = results_folder(model, kind) / RESULTS
    return load_results(path, kind) if path.is_file() else None


def belong(results: Results, step: int | None, place: Path) -> bool:
    """Whether results are of these weights.

    step, place: of the checkpoint; None and the folder for an exported model. Runs that are started again, and models
    that are exported again, may have the same step.
    """
    return results.step == step and (not results.weights or results.weights == fingerprint(place))


def check_results(model: Path, measured: str) -> None:
    """Raise before long work if old results of another kind cannot be shown in a model card.

    measured: the kind that will be measured. Its old results do not matter.
    """
    for kind in COMMANDS:
        if kind != measured:
            find_results(model, kind)


def remake(model: Path | str, kind: str) -> str:
    """The command that makes these results."""
    return f"grmoe {COMMANDS[kind]} {shlex.quote(str(model))}"


def _command_of(path: Path, kind: str) -> str:
    model = path.parent.parent
    if not (model / CONFIG).is_file():
        model = path.parent.with_name(path.parent.name.removesuffix(f"-{kind}"))
    return remake(model, kind)


def plain(value: Any, digits: int | None = None) -> Any:
    """Data for JSON: dataclasses become dicts, arrays lists, NaN and Inf null.

    digits: significant digits of every float; None keeps all of them.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), digits) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(v, digits) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, digits) for v in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else float(f"{value:.{digits}g}")
    if hasattr(value, "tolist"):  # tensors, NumPy arrays and scalars
        return plain(value.tolist(), digits)
    return value
