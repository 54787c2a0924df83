"""What the synthetic study measures, and how it is kept: one JSON file per method, DIR/METHOD.json.

A file holds the method's scores on every setting that was run, one list per figure with a value per seed.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from grmoe.files import write_file
from grmoe.runs.results import plain
from grmoe.studies.synthetic.evaluation import DialSweep, SeedScore
from grmoe.studies.synthetic.methods import METHODS, Method
from grmoe.studies.synthetic.task import Setting
from grmoe.studies.synthetic.training import Training

_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole study. Results of another configuration are not reused; the device does not count."""

    seeds: int = 50
    """Independent tasks and trainings per method, computed as one batch."""
    num_experts: int = 8
    """N, experts and classes."""
    dim: int = 128
    """d, width of a token."""
    rank: int = 16
    """k, rank of a class's subspace and of a Grassmann router's frames."""
    out_dim: int = 16
    """Width of the targets."""
    eval_tokens: int = 4096
    """Fresh tokens per seed that methods are scored on."""
    dial_tokens: int = 1024
    """Tokens per seed of the dial's curves."""
    task_seed: int = 0
    """Seed of tasks, trainings and tokens."""
    training: Training = field(default_factory=Training)
    """How every method is trained."""
    rates: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0)
    """Factors on the learning rates. Every method uses the best one, by setting. A single one needs no choice."""
    screening_seeds: int = 8
    """Tasks per setting on which the factor is chosen."""
    screening_seed: int = 1000
    """Seed of those tasks. They are none of those that are scored."""
    device: str = "cpu"
    """Kind of device that draws tokens and trains, "cpu" or "cuda". Another one draws other tokens."""

    @classmethod
    def quick(cls) -> Config:
        """Small enough for a demo: under a minute on two cores for `QUICK_METHODS`. One learning rate."""
        return cls(seeds=6, eval_tokens=2048, training=Training(steps=600), rates=(1.0,))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What results depend on, as it reads back from JSON."""
        content: dict[str, Any] = plain(asdict(self))
        return {name: value for name, value in content.items() if name != "device"}


@dataclass(frozen=True, kw_only=True)
class Screening:
    """Every factor on the learning rates, tried on other tasks."""

    rates: list[float]
    loss: list[list[float]]
    """Held-out loss by factor and seed. NaN: diverged."""
    accuracy: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """One method on one setting."""

    method: str
    title: str
    setting: Setting
    num_experts: int
    scores: list[SeedScore]
    oracle_accuracy: float
    overlap: tuple[float, float, float]
    """Mean, least and largest overlap that was achieved, over pairs of classes and seeds."""
    rate: float = 1.0
    """Factor on the learning rates."""
    screening: Screening | None = None
    """How the factor was chosen. None: it was given."""
    dial: DialSweep | None = None
    """For methods in `DIALED`."""
    recovery: list[list[float]] | None = None
    """`frame_recovery` of the first seed, for routers with frames."""
    seconds: float = 0.0
    """Training and scoring, for all settings that ran together."""


@dataclass(frozen=True, kw_only=True)
class SettingResult:
    """All methods on one setting, in table order."""

    setting: Setting
    methods: list[MethodResult]

    @property
    def num_experts(self) -> int:
        return self.methods[0].num_experts

    def find(self, key: str) -> MethodResult | None:
        return next((m for m in self.methods if m.method == key), None)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One file: a method on the settings that were run."""

    method: str
    fingerprint: dict[str, Any]
    """Of the study's configuration."""
    spec: dict[str, Any]
    """The method itself. Results of another definition are not reused."""
    machine: str
    results: dict[str, MethodResult]
    """By name of the setting."""
    revision: str = ""
    """Of the code; empty in files of before."""


def spec_of(method: Method) -> dict[str, Any]:
    """What a method's results depend on."""
    found: dict[str, Any] = plain(asdict(method))
    return {name: value for name, value in found.items() if name not in ("title", "paper")}


def path_of(folder: Path, method: str) -> Path:
    return folder / f"{method}.json"


def write(saved: Saved, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "what": f"Synthetic study: {next(iter(saved.results.values())).title}",
        "method": saved.method,
        "config": saved.fingerprint,
        "spec": saved.spec,
        "machine": saved.machine,
        "revision": saved.revision,
        "settings": {name: plain(_columns(result), _DIGITS) for name, result in saved.results.items()},
    }
    path = path_of(folder, saved.method)
    write_file(path, f"{json.dumps(content, ensure_ascii=False)}\n".encode())
    return path


def read(folder: Path, method: str) -> Saved | None:
    """None if there is no file."""
    path = path_of(folder, method)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it to run that method again") from error
    return Saved(
        method=found["method"],
        fingerprint=found["config"],
        spec=found["spec"],
        machine=found["machine"],
        revision=found.get("revision", ""),
        results={name: _result(entry) for name, entry in found["settings"].items()},
    )


def read_all(folder: Path) -> dict[str, SettingResult]:
    """All results of a folder by setting; methods in table order. Whatever is there, however it was configured."""
    settings: dict[str, list[MethodResult]] = {}
    for method in METHODS:
        saved = read(folder, method.key)
        for name, result in (saved.results if saved else {}).items():
            settings.setdefault(name, []).append(result)
    return {name: SettingResult(setting=found[0].setting, methods=found) for name, found in settings.items()}


def _columns(result: MethodResult) -> dict[str, Any]:
    scores = {f.name: [getattr(score, f.name) for score in result.scores] for f in fields(SeedScore)}
    return {**asdict(result), "scores": scores}


def _result(entry: dict[str, Any]) -> MethodResult:
    columns = entry["scores"]
    rows = zip(*columns.values(), strict=True)
    entry = {
        **entry,
        "setting": Setting(**entry["setting"]),
        "scores": [SeedScore(**dict(zip(columns, map(_number, row), strict=True))) for row in rows],
        "overlap": tuple(entry["overlap"]),
        "dial": None if entry["dial"] is None else DialSweep(**entry["dial"]),
        "screening": None if entry["screening"] is None else _screening(entry["screening"]),
    }
    return MethodResult(**entry)


def _screening(entry: dict[str, Any]) -> Screening:
    loss, accuracy = ([[_number(v) for v in row] for row in entry[name]] for name in ("loss", "accuracy"))
    return Screening(rates=entry["rates"], loss=loss, accuracy=accuracy)


def _number(value: Any) -> Any:
    """JSON has no NaN: it was written as null."""
    return math.nan if value is None else value
