"""Studies that look at trained models: each model is measured once, and several studies may read what was found.

A kind of measurement has a folder: results/KIND/BASE/RECIPE-SEED.json. Models come from the store of trained models.
One that was not kept in the folder for work cannot be measured; a note says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grmoe.files import read_json, write_file
from grmoe.runs.folder import CONFIG
from grmoe.runs.results import plain
from grmoe.studies.model_study import Group, list_jobs
from grmoe.studies.models.recipes import Base, Recipe
from grmoe.studies.models.runner import Job, has_results, run_folder, run_jobs
from grmoe.studies.models.store import Store
from grmoe.studies.page import Page
from grmoe.studies.study import Place, State, provenance
from grmoe.terminal import Progress, note

DIGITS = 5  # significant, of every number that is kept


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was found of one trained model."""

    recipe: str
    seed: int
    revision: str
    machine: str
    body: dict[str, Any]


Models = Mapping[str, Sequence[Measured]]
"""By the name of their recipe, seeds in order."""


@dataclass(frozen=True)
class Kind:
    """One way to measure a run."""

    name: str
    """Folder of its results."""
    measure: Callable[[Path, Place, Progress], Mapping[str, Any]]
    """(a run's folder, the place, progress) → what is kept."""
    lacks: Callable[[Place], str] = lambda place: ""
    """What a place lacks for it, as a message; empty if nothing."""

    def path(self, results: Path, base: Base, recipe: Recipe, seed: int) -> Path:
        return results / self.name / base.name / f"{recipe.name}-{seed}.json"

    def read(self, results: Path, group: Group) -> Models:
        """What there is of a group's models."""
        found: dict[str, list[Measured]] = {}
        for recipe in group.recipes:
            paths = (self.path(results, group.base, recipe, seed) for seed in range(group.seeds))
            found[recipe.name] = [Measured(**read_json(path)) for path in paths if path.is_file()]
        return found


@dataclass(frozen=True, kw_only=True)
class MeasuredStudy:
    """A `Study` of measurements of trained models."""

    name: str
    title: str
    where: str
    kind: Kind
    group: Group
    write: Callable[[Models], Page]
    """The page, from the measurements alone."""

    @property
    def parts(self) -> list[str]:
        return [recipe.name for recipe in self.group.recipes]

    def _path(self, results: Path, job: Job) -> Path:
        return self.kind.path(results, job.base, job.recipe, job.seed)

    def state(self, results: Path) -> State:
        jobs = list_jobs((self.group,))
        return State(sum(self._path(results, job).is_file() for job in jobs), len(jobs))

    def run(self, place: Place, progress: Progress) -> None:
        """Train what was never trained, then measure the models that are there."""
        todo = [
            job for job in list_jobs((self.group,), place) if not self._path(place.results, job).is_file()
        ]
        lacking = self.kind.lacks(place)
        if todo and lacking:
            raise ValueError(f"{self.name}: {lacking}")
        store = Store(place.results)
        untrained = [job for job in todo if not has_results(store, job)]
        if untrained:
            run_jobs(untrained, place, progress)
        gone = []
        for number, job in enumerate(todo):
            folder = run_folder(place.work, job)
            if not has_results(store, job):  # the time was up
                continue
            if not (folder / CONFIG).is_file():
                gone.append(job.name)
            elif place.time_left > 0:
                progress(f"{self.kind.name} of {job.name}", number, len(todo))
                self._keep(job, self.kind.measure(folder, place, progress), place)
        if gone:
            note(f"{self.name}: the models {', '.join(gone)} are not in {place.work} (see --keep)")

    def _keep(self, job: Job, body: Mapping[str, Any], place: Place) -> None:
        about = {
            "recipe": job.recipe.name,
            "seed": job.seed,
            **provenance(place),
            "body": plain(body, DIGITS),
        }
        path = self._path(place.results, job)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, (json.dumps(about, ensure_ascii=False) + "\n").encode())

    def page(self, results: Path) -> Page:
        return self.write(self.kind.read(results, self.group))


def labels(group: Group) -> dict[str, str]:
    return {recipe.name: recipe.label for recipe in group.recipes}
