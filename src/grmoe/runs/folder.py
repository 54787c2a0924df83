"""A run's folder: its configuration, its environment, its log and its checkpoints.

config.yaml        the resolved configuration       environment.json   revision, versions, device, command
log.jsonl          one line per logged step         checkpoints/       see `grmoe.runs.checkpoint`
tokenizer/         a copy, so that a run works without its data
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

import grmoe
from grmoe.config import differences, load, to_dict, to_yaml
from grmoe.data import TokenDataset
from grmoe.data.shards import INDEX
from grmoe.data.tokenizer import load as load_tokenizer
from grmoe.files import read_json, reading, replace_folder, write_file
from grmoe.hardware import device_name, find_device
from grmoe.runs.checkpoint import Checkpoint, Checkpoints
from grmoe.runs.config import TrainConfig, may_change_on_resume
from grmoe.runs.earlier import as_old_run
from grmoe.terminal import note

CONFIG, ENVIRONMENT, LOG, CHECKPOINTS = "config.yaml", "environment.json", "log.jsonl", "checkpoints"
TOKENIZER = "tokenizer"
# Numbers that readers of the log use. A line of an older version may lack some.
_LINE_NUMBERS = (
    "perplexity", "entropy", "load_cv", "min_load", "leading_cv", "experts_per_token", "tokens", "tokens_per_second",
)  # fmt: skip
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "triton", "numpy")


def checkpoints_of(folder: Path, config: TrainConfig) -> Checkpoints:
    kept = config.checkpoint
    return Checkpoints(folder / CHECKPOINTS, kept.keep_last, kept.keep_best)


def saved_config(folder: Path) -> TrainConfig:
    """The configuration a run was started with."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no run: {path} is missing")
    with reading(path):
        # A run saves all its choices. Those that are missing are of a version that had no such choice.
        return as_old_run(load(TrainConfig, path))


def find_checkpoint(folder: Path, which: str = "best") -> tuple[TrainConfig, Checkpoint]:
    """A run's configuration and one of its checkpoints: "best", "last" or a step."""
    config = saved_config(folder)
    checkpoints = checkpoints_of(folder, config)
    found = checkpoints.all()
    if which not in {str(checkpoint.step) for checkpoint in found}:
        checkpoints.require_readable()
    if not found:
        raise ValueError(f"{folder} has no checkpoint yet")
    if which == "best":
        return config, checkpoints.best() or found[-1]
    if which == "last":
        return config, found[-1]
    for checkpoint in found:
        if str(checkpoint.step) == which:
            return config, checkpoint
    kept = ", ".join(str(c.step) for c in found)
    raise ValueError(f"checkpoint must be best, last or one of the steps {kept}, got {which!r}")


class Start(NamedTuple):
    """Where a training begins."""

    config: TrainConfig
    """The resolved configuration."""
    checkpoint: Checkpoint | None
    """What to continue from; None for a new run."""
    saved: TrainConfig | None = None
    """The configuration of the run to continue, which may have fewer steps."""


def find_start(config: TrainConfig, resume: bool) -> Start:
    """The configuration and the checkpoint to begin with.

    What the configuration leaves open is as the run has it. Refuses to mix two runs in one folder.
    """
    folder = Path(config.out)
    latest = checkpoints_of(folder, config).require_readable().latest()
    if latest is None:
        return Start(config.resolved(), None)
    if not resume:
        raise ValueError(
            f"{folder} holds a run at step {latest.step}: continue it with --resume, or choose another folder (out=…)"
        )
    saved = saved_config(folder)
    config = config.filled_from(saved)
    found = differences(to_dict(saved), to_dict(config))
    changed = [difference for difference in found if not may_change_on_resume(difference)]
    if changed:
        raise ValueError(
            f"{folder} was trained with other settings, and these cannot change on resume: {'; '.join(changed)}"
        )
    if config.steps < saved.steps:
        raise ValueError(
            f"steps can be raised on resume, not lowered: {folder} has {saved.steps}, got {config.steps}"
        )
    return Start(config.continuing(saved) if config.steps > saved.steps else config, latest, saved)


def open_folder(config: TrainConfig, start: Checkpoint | None, data: TokenDataset) -> None:
    """Write configuration, environment and tokenizer. Drop log lines that are newer than the checkpoint."""
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    if start is None or not (folder / TOKENIZER).is_dir():
        _copy_tokenizer(data.tokenizer_folder, folder)
    write_file(folder / CONFIG, to_yaml(config).encode())
    described = environment()
    if start is not None:
        described["resumed_from"] = _earlier_starts(folder)
    write_file(folder / ENVIRONMENT, json.dumps(described, indent=1).encode() + b"\n")
    kept, damaged = ([], 0) if start is None else _read_log(folder)
    if damaged:
        note(f"{folder / LOG}: {damaged} damaged lines are left out")
    text = "".join(
        json.dumps(line) + "\n" for line in kept if start is not None and line["step"] <= start.step
    )
    write_file(folder / LOG, text.encode())


def discard_start(config: TrainConfig) -> None:
    """Remove what `open_folder` wrote if the run ended before its first checkpoint and its first line of the log."""
    folder = Path(config.out)
    if (folder / CHECKPOINTS).exists() or read_log(folder):
        return
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    for name in (ENVIRONMENT, LOG, CONFIG):  # the settings last: a signal may end this halfway
        (folder / name).unlink(missing_ok=True)


def _earlier_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run before this one, the first one first. Empty if the file is missing or damaged."""
    try:
        last = json.loads((folder / ENVIRONMENT).read_text())
        starts = [*last.pop("resumed_from", []), last]
        return starts if all(isinstance(start["started"], str) for start in starts) else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _copy_tokenizer(source: Path, folder: Path) -> None:
    with replace_folder(folder / TOKENIZER) as writing:
        for file in sorted(source.iterdir()):
            write_file(writing / file.name, file.read_bytes())


def tokenizer_of(folder: Path, config: TrainConfig) -> Path:
    """The folder of a run's tokenizer: its own copy, or the one of the data for an older run without a copy."""
    copy = folder / TOKENIZER
    return copy if copy.is_dir() else TokenDataset(config.data.path).tokenizer_folder


def vocabulary(tokenizer: Path) -> tuple[int, int]:
    """(size, end-of-text token) of a tokenizer's folder, as `grmoe prepare` counts them."""
    named = load_tokenizer(str(tokenizer))
    size = max(named.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    end = named.tokenizer.token_to_id(named.special["eos_token"])
    assert end is not None  # `load_tokenizer` raises if there is none
    return size, end


def data_checksum(folder: Path) -> str:
    """Identifies prepared data, independent of its path."""
    return hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()


def first_start(folder: Path) -> str:
    """When the run began, before it was resumed."""
    described = read_json(folder / ENVIRONMENT)
    with reading(folder / ENVIRONMENT):
        return str([*described.get("resumed_from", []), described][0]["started"])


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log. Lines that are cut off or damaged are left out."""
    return _read_log(folder)[0]


def _read_log(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """(the lines of a run's log, the number of damaged ones before the last, which a crash may cut off)."""
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], 0
    lines = [_parse_line(line) for line in text.splitlines()]
    return [line for line in lines if line is not None], sum(line is None for line in lines[:-1])


def _parse_line(text: str) -> dict[str, Any] | None:
    """A line of the log; None if it is damaged."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if _is_whole(line) else None


def _is_whole(line: Any) -> bool:
    """Whether a line has what its readers need, in the types that they need."""
    if not isinstance(line, dict) or line.get("kind") not in ("train", "validation"):
        return False
    step, layers, domains = line.get("step"), line.get("layers"), line.get("domains", {})
    if line["kind"] == "validation":
        layers = layers or [{"load": [0.0]}]  # readers use those of training
    if type(step) is not int or not isinstance(layers, list) or not layers or not isinstance(domains, dict):
        return False
    numbers = [line.get(name, 0) for name in _LINE_NUMBERS] + [line.get("loss"), *domains.values()]
    for layer in layers:
        if not isinstance(layer, dict) or not isinstance(layer.get("load"), list) or not layer["load"]:
            return False
        numbers += [*layer["load"], layer.get("entropy", 0), layer.get("load_cv", 0)]
    return all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)


def load_keys(line: dict[str, Any]) -> tuple[str, str]:
    """Keys of the load and its CV in a line of the log.

    Load is the share of tokens an expert receives. Without selection every expert receives every token. The keys then
    name the share of tokens that an expert leads.
    """
    layer = line["layers"][0]
    dense = line["experts_per_token"] == len(layer["load"]) and "leading_load" in layer
    return ("leading_load", "leading_cv") if dense else ("load", "load_cv")


def environment() -> dict[str, Any]:
    """What is needed to reproduce the numbers: command, versions, device."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "grmoe": grmoe.__version__,
        "revision": _revision(),
        "python": platform.python_version(),
        "packages": versions(_PACKAGES),
        "device": device_name(find_device()),
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "threads": torch.get_num_threads(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _revision() -> str | None:
    """The commit of grmoe's source, with "+" if files were changed. None for an installed package."""
    here = Path(grmoe.__file__).parent
    if not (here.parent.parent / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(here), *what], capture_output=True, text=True, check=True).stdout
            for what in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+" if changes.strip() else "")


def dialled_model(run: Path) -> Path | None:
    """The model that `grmoe dial --write` saved in a run's folder; None if there is none."""
    place = run / "dial" / "model"
    return place if (place / "config.json").is_file() else None
