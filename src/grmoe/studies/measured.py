"""Studies that look at trained models. Models that are missing are trained, those that are gone again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grmoe.files import read_json
from grmoe.studies.measuring import Kind, Measured, Measurement
from grmoe.studies.model_study import Group, list_jobs
from grmoe.studies.page import Page
from grmoe.studies.queue import Needs, QueueStudy
from grmoe.studies.study import Place, State

Models = Mapping[str, Sequence[Measured]]
"""By the name of their recipe, seeds in order."""


def read_measured(results: Path, kind: Kind, group: Group) -> Models:
    """What there is of a group's models."""
    found: dict[str, list[Measured]] = {recipe.name: [] for recipe in group.recipes}
    for job in list_jobs((group,)):
        path = kind.path(results, job)
        if path.is_file():
            found[job.recipe.name].append(Measured(**read_json(path)))
    return found


def measurements(kind: Kind, group: Group, place: Place) -> list[Measurement]:
    """Those without results. Raises if the place lacks what they need."""
    found = [Measurement(kind, job) for job in list_jobs((group,), place)]
    todo = [one for one in found if not one.is_done(place.results)]
    lacking = kind.lacks(place)
    if todo and lacking:
        raise ValueError(f"{kind.name}: {lacking}")
    return todo


@dataclass(frozen=True, kw_only=True)
class MeasuredStudy(QueueStudy):
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

    def state(self, results: Path) -> State:
        jobs = list_jobs((self.group,))
        return State(sum(self.kind.path(results, job).is_file() for job in jobs), len(jobs))

    def needs(self, place: Place) -> Needs:
        return Needs(measurements=measurements(self.kind, self.group, place))

    def page(self, results: Path) -> Page:
        return self.write(read_measured(results, self.kind, self.group))


def labels(group: Group) -> dict[str, str]:
    return {recipe.name: recipe.label for recipe in group.recipes}
