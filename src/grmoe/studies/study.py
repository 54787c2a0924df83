"""A study: one table or figure of the paper. It runs in small jobs, keeps results as JSON, and makes a page of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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
    """No job starts after this time (`time.monotonic`)."""


class Study(Protocol):
    name: str
    """As in `grmoe reproduce NAME`."""
    title: str
    where: str
    """Section, table or figure of the paper."""

    def state(self, results: Path) -> State:
        """How many jobs have results."""

    def run(self, place: Place, progress: Progress) -> None:
        """Do the jobs that have no results yet, until all are done or the time is up."""

    def page(self, results: Path) -> Page:
        """The page, from results alone. Works with partial results and with none."""
