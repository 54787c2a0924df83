"""Measurements on disk, so that an interrupted dial goes on where it stopped.

One file holds all of them. It is written again, atomically, after each measurement. `save` removes it at the end, when
results.json is there: the same command run again then measures again, and its results are never older than its run.
Speeds are not kept, because settings are timed in turns on one machine in one state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import grmoe
from grmoe.files import write_file
from grmoe.hardware import device_name
from grmoe.probe.losses import Measurement
from grmoe.probe.windows import Text
from grmoe.runs.open import LoadedModel

FILE = "measurements.json"
_WEIGHTS = (".safetensors", ".bin", ".distcp")  # of an exported model, and of a run's checkpoint
# What a setting or a budget says. It names a measurement, not the model.
_SETTING = ("alpha", "selection", "selection_tau", "num_experts_per_tok", "budget", "budget_curve")


class Saved:
    """All measurements of a dial. Without a folder they are in memory alone."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / FILE
        self.books: dict[str, dict[str, Any]] = {} if self.path is None else _read(self.path)
        self._found: dict[str, int] = {}  # measurements made before, by book

    def book(self, loaded: LoadedModel, text: Text) -> Book:
        """The measurements of one model on one text."""
        key = _fingerprint(loaded, text)
        entries = self.books.setdefault(key, {})
        self._found.setdefault(key, len(entries))
        return Book(entries, self._write)

    @property
    def found(self) -> int:
        """Measurements made before, in the books that were opened."""
        return sum(self._found.values())

    def _write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, json.dumps(self.books, separators=(",", ":")).encode())


class Book:
    """Measurements of one model on one text, by setting."""

    def __init__(
        self, entries: dict[str, Any] | None = None, write: Callable[[], None] = lambda: None
    ) -> None:
        self.entries = {} if entries is None else entries
        self.write = write

    def take(self, setting: object, measure: Callable[[], Measurement]) -> Measurement:
        """What was measured before at this setting, or what `measure` gives now. Equal settings have equal `repr`."""
        key = _hash(repr(setting))
        if key not in self.entries:
            measured = measure()
            self.entries[key] = asdict(measured) | {"losses_W": measured.losses_W.tolist()}
            self.write()
            return measured
        fields = dict(self.entries[key])
        losses_W = torch.tensor(fields.pop("losses_W"), dtype=torch.float64)
        tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return Measurement(**fields | tuples | {"losses_W": losses_W})


def _read(path: Path) -> dict[str, Any]:
    """A file that cannot be read holds nothing: everything is measured again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _fingerprint(loaded: LoadedModel, text: Text) -> str:
    """Of everything that a measurement depends on besides the setting."""
    model = loaded.model
    folder = loaded.path if loaded.checkpoint is None else loaded.checkpoint.path
    weights = sorted((f.name, f.stat()) for f in folder.iterdir() if f.suffix in _WEIGHTS)
    config = {k: v for k, v in model.config.to_dict().items() if k not in _SETTING}
    known = {
        "weights": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in weights],
        "step": loaded.step,
        "config": config,
        "text": [
            hashlib.sha256(text.rows_WS.numpy().tobytes()).hexdigest(),
            list(text.rows_WS.shape),
            text.domains_W,
        ],
        "dtype": str(model.dtype),
        "device": device_name(model.device),
        "versions": [grmoe.__version__, torch.__version__],
    }
    return _hash(json.dumps(known, sort_keys=True, default=str))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
