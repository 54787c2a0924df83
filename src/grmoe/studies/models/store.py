"""What is kept of trained models: results/models/BASE/RECIPE.json, one entry per seed.

A file belongs to one set of settings. Models of other settings are not added to it, and numbers of another recipe are
never taken for this one's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grmoe.checks import require
from grmoe.files import alone_in, read_json, write_file
from grmoe.runs.results import plain
from grmoe.studies.models.recipes import Base, Recipe

FOLDER = "models"
TRAINING = "training"  # the text that a model was trained on
DIGITS = 6  # significant digits of a number that is kept


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model at one setting on one text. Means over MoE layers, unless it says otherwise."""

    text: str
    """"validation", "training", or the name of the file."""
    setting: str
    """"top-1", "top-2", "mass 0.5", …"""
    experts_per_token: float
    loss: float
    """Nats per token."""
    load_cv: float
    """Of the tokens an expert receives."""
    min_load: float
    """Smallest load over experts and layers, as a share of the fair load."""
    collapsed: bool
    """In some layer an expert receives less than a tenth of its fair load."""
    collapsed_paper: bool | None = None
    """In some layer an expert receives less than 1 % of the tokens."""
    entropy: float | None = None
    """Of the gate, nats."""
    effective_experts: float | None = None
    """1/Σg² per token, then the mean."""
    leading_cv: float | None = None
    """CV of the tokens that an expert leads."""
    starved: list[int] | None = None
    """Experts that receive less than a tenth of their fair load, by MoE layer. None: not counted, as in old results."""
    starved_paper: list[int] | None = None
    """Experts that receive less than 1 % of the tokens, by MoE layer. None: not counted."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A validation during training."""

    step: int
    loss: float
    entropy: float
    load_cv: float
    min_load: float
    """As a share of the tokens, the smallest over experts and layers."""
    train_loss: float | None = None
    """Mean of the training loss since the point before."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One trained and measured model."""

    seed: int
    tokens: int
    """Tokens trained on."""
    trained: str
    """The setting it was trained with, as rows name it."""
    revision: str
    machine: str
    """Device, version of torch, and how many models trained at the same time."""
    curve: list[Point]
    rows: list[Row]
    seconds: float | None = None
    """Time of the job, in company of the others. None if it was interrupted and continued."""
    max_overlap: float | None = None
    """Largest ‖UᵢᵀUⱼ‖²_F / k over pairs and layers, after training. None without frames."""
    kappa: list[list[float]] | None = None
    """Smallest and largest concentration of each MoE layer, after training."""
    measured: int | None = None
    """Tokens of each text that were asked for; None: the default."""
    training: list[Row] | None = None
    """Its rows on text that it was trained on. None: not measured."""
    source: str = ""
    """Where it was taken from, if no job of this store made it."""

    def row(self, text: str = "validation", setting: str | None = None) -> Row | None:
        """The row of a text at a setting; by default the setting it was trained with."""
        wanted = setting or self.trained
        rows = self.rows if text != TRAINING else self.training or ()
        return next((row for row in rows if (row.text, row.setting) == (text, wanted)), None)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """All models of a recipe."""

    recipe: str
    label: str
    settings: tuple[str, ...]
    """Of `grmoe train`, those of the base included."""
    config: dict[str, Any]
    """Every setting that changes what is trained, by dotted name."""
    data: dict[str, Any]
    """Of the prepared text: checksum, tokens, vocabulary, domains."""
    runs: list[Run] = field(default_factory=list)

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]


class Store:
    """The folder of results, read and written recipe by recipe."""

    def __init__(self, results: Path) -> None:
        self.folder = results / FOLDER

    def path(self, base: Base, recipe: Recipe | str) -> Path:
        return self.folder / base.name / f"{recipe if isinstance(recipe, str) else recipe.name}.json"

    def read(self, base: Base, recipe: Recipe | str) -> Trained | None:
        """What is kept of a recipe; None if nothing is."""
        path = self.path(base, recipe)
        if not path.is_file():
            return None
        try:
            return _trained(read_json(path))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: it is not a file of results ({error!r})") from error

    def runs(self, base: Base, recipe: Recipe | str) -> list[Run]:
        """Its models, by seed."""
        found = self.read(base, recipe)
        return [] if found is None else found.runs

    def add(self, base: Base, about: Trained) -> None:
        """Add models to a recipe's file, or replace those of the same seed. Raises if the file is of other settings."""
        path = self.path(base, about.recipe)
        with alone_in(path.parent):
            self._add(base, about, path)

    def _add(self, base: Base, about: Trained, path: Path) -> None:
        before = self.read(base, about.recipe)
        kept = {}
        if before is not None:
            self.check(base, about)
            kept = {run.seed: run for run in before.runs}
        kept |= {run.seed: run for run in about.runs}
        head = {name: value for name, value in asdict(about).items() if name != "runs"}
        lines = ",\n".join(json.dumps(_kept(asdict(kept[seed])), ensure_ascii=False) for seed in sorted(kept))
        text = "".join(
            f'"{name}": {json.dumps(value, ensure_ascii=False)},\n' for name, value in head.items()
        )
        write_file(path, f'{{{text}"runs": [\n{lines}\n]}}\n'.encode())

    def check(self, base: Base, wanted: Trained, defaults: Mapping[str, Any] | None = None) -> None:
        """Raise if the recipe's file holds models of other settings or data.

        defaults: of settings that did not exist when the file was written; they may be missing there.
        """
        before = self.read(base, wanted.recipe)
        if before is None:
            return
        changed = [
            f"{name}: {before.config.get(name)!r} → {value!r}"
            for name, value in wanted.config.items()
            if (name in before.config and before.config[name] != value)
            or (name not in before.config and defaults is not None and defaults.get(name) != value)
        ]
        if not _same_data(before.data, wanted.data):
            changed.append(f"the data: {describe_data(before.data)} → {describe_data(wanted.data)}")
        require(
            not changed,
            f"{self.path(base, wanted.recipe)} holds models of recipe {wanted.recipe!r} with other settings "
            f"({'; '.join(changed)}): give the recipe another name, or move the file away",
        )


def _same_data(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """By checksum; results without one, of an earlier version, by size and vocabulary."""
    if "checksum" in old and "checksum" in new:
        return bool(old["checksum"] == new["checksum"])
    same_size = f"{old['tokens']:.3g}" == f"{new['tokens']:.3g}"
    return same_size and bool(old["vocabulary"] == new["vocabulary"])


def describe_data(data: Mapping[str, Any]) -> str:
    """ "44.8 M tokens, vocabulary 8192, checksum 12ab34cd"."""
    checksum = f", checksum {data['checksum'][:8]}" if "checksum" in data else ""
    return f"{data['tokens'] / 1e6:.3g} M tokens, vocabulary {data['vocabulary']}{checksum}"


_LISTS = {"curve": Point, "rows": Row, "training": Row}


def _trained(tree: dict[str, Any]) -> Trained:
    runs = [
        Run(**run | {name: _each(kind, run[name]) for name, kind in _LISTS.items() if name in run})
        for run in tree["runs"]
    ]
    return Trained(**{**tree, "settings": tuple(tree["settings"]), "runs": runs})


def _each(kind: type[Any], trees: Sequence[dict[str, Any]]) -> list[Any]:
    return [kind(**tree) for tree in trees]


def _kept(value: Any) -> Any:
    """Numbers with a few digits, without fields that are empty."""
    if isinstance(value, dict):
        return {k: _kept(v) for k, v in value.items() if v is not None and v != ""}
    return [_kept(v) for v in value] if isinstance(value, list) else plain(value, DIGITS)
