"""A study: one table or figure of the paper. It runs in small jobs, keeps results as JSON, and makes a page of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grmoe.studies.page import Page
from grmoe.terminal import Progress


@dataclass(frozen=True)
class State:
    """How much of a study has results."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a study works, and for how long."""

    results: Path
    """Folder of results that are kept: small JSON files."""
    work: Path
    """Folder for models in training and other large files."""
    data: Path | None = None
    """Prepared data, for studies that train language models."""
    texts: tuple[Path, ...] = ()
    """Other held-out texts."""
    device: str = "auto"
    at_once: int = 1
    """Jobs that run at the same time."""
    until: float | None = None
    """When the time is up (`time.monotonic`). No job starts that would not finish by then."""
    only: tuple[str, ...] = ()
    """Recipes, methods or other parts of a study to do. Empty: all of them."""
    seeds: int | None = None
    """Seeds per recipe. Default: the study's own number."""
    steps: int | None = None
    """Training steps of models. Default: the study's own. Results of other steps are kept apart from those of pages."""
    settings: tuple[str, ...] = ()
    """More settings of `grmoe train` for every model, such as compile=false."""
    tokens: int | None = None
    """Tokens to measure of each text. Default: 8192, on a GPU 131072."""
    tasks: Path | None = None
    """Folder of TASK_SPLIT.jsonl, for downstream tasks."""
    keep: tuple[str, ...] | None = None
    """Recipes with models that stay in `work` once measured. None: all of them."""
    revision: str = ""
    """Revision to note with results where git is not there to ask."""

    @property
    def time_left(self) -> float:
        """Seconds until the time is up; infinite without a limit."""
        return math.inf if self.until is None else self.until - time.monotonic()

    def wants(self, part: str) -> bool:
        """Whether a part of a study was asked for."""
        return not self.only or part in self.only


class Study(Protocol):
    name: str
    """As in `grmoe reproduce NAME`."""
    title: str
    where: str
    """Section, table or figure of the paper."""

    @property
    def parts(self) -> Sequence[str]:
        """What `Place.only` may name."""

    def state(self, results: Path) -> State:
        """How many jobs have results."""

    def run(self, place: Place, progress: Progress) -> None:
        """Do the jobs that have no results yet, until all are done or the time is up."""

    def page(self, results: Path) -> Page:
        """The page, from results alone. Works with partial results and with none."""


def provenance(place: Place) -> dict[str, str]:
    """What results say of where they come from: device, version of torch, revision of the code."""
    import torch

    from grmoe.hardware import device_name, find_device
    from grmoe.runs.folder import environment

    return {
        "machine": f"{device_name(find_device(place.device))}, torch {torch.__version__}",
        "revision": short_revision(environment(), place.revision),
    }


def short_revision(environment: Mapping[str, Any], given: str) -> str:
    """Of the code, as git or the user names it; else the version. "+": with changes that were not committed."""
    found = environment.get("revision") or given
    if not found:
        return f"grmoe {environment.get('grmoe')}"
    return found.removesuffix("+")[:10] + ("+" if found.endswith("+") else "")
