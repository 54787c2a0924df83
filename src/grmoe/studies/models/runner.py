"""Trainings as tasks: each trains and measures one model, and its results are kept in the store.

Models with results are not trained again, unless somebody needs the model itself and it is gone.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from grmoe.checks import require
from grmoe.files import read_json
from grmoe.runs.folder import CHECKPOINTS, CONFIG, read_log
from grmoe.runs.meta import PREFIX
from grmoe.studies.models.recipes import Base, Recipe
from grmoe.studies.models.store import Point, Row, Run, Store, Trained
from grmoe.studies.study import Place
from grmoe.studies.tasks import Task, result_file, run_tasks
from grmoe.terminal import Progress, silent


@dataclass(frozen=True)
class Job:
    base: Base
    recipe: Recipe
    seed: int

    @property
    def name(self) -> str:
        return f"{self.recipe.name}-{self.seed}"


def run_folder(work: Path, job: Job) -> Path:
    """Where a job trains its model. The folder is a run of `grmoe train`."""
    return work / "models" / job.base.name / job.name


def has_results(store: Store, job: Job) -> bool:
    return any(run.seed == job.seed for run in store.runs(job.base, job.recipe))


def has_model(work: Path, job: Job) -> bool:
    """Whether the trained model is there. One that is still to be trained to its end is not."""
    folder = run_folder(work, job)
    return (folder / CONFIG).is_file() and result_file(folder).is_file()


def remove_model(place: Place, job: Job) -> None:
    """Remove a model that is not to be kept."""
    if place.keep is not None and job.recipe.name not in place.keep:
        shutil.rmtree(run_folder(place.work, job), ignore_errors=True)


def run_jobs(jobs: Sequence[Job], place: Place, progress: Progress = silent) -> None:
    """Train the models that have no results yet. Raises `StudyError` at the end if some failed."""
    run_tasks(training_tasks(jobs, place), place, progress)


def training_tasks(
    jobs: Sequence[Job],
    place: Place,
    models: Collection[Job] = (),
    after: Callable[[Job], None] | None = None,
) -> list[Task]:
    """One task per model that is to be trained, in the order of `jobs`.

    models: jobs with a model that must be there, results or not.
    after: called when a job has its results. By default a model that is not to be kept is removed.
    """
    store = Store(place.results)
    done = {job for job in dict.fromkeys(jobs) if has_results(store, job)}
    todo = [
        job
        for job in dict.fromkeys(jobs)
        if job not in done or (job in models and not has_model(place.work, job))
    ]
    if not todo and place.data is None:
        return []
    plans = _plans(jobs, place, store)
    return [
        _task(job, plans[job.base.name, job.recipe.name], place, store, after or partial(remove_model, place))
        for job in todo
    ]


def _task(job: Job, plan: Trained, place: Place, store: Store, after: Callable[[Job], None]) -> Task:
    folder, steps = run_folder(place.work, job), int(plan.config["steps"])
    places = {"out": folder, "data.path": place.data, "device": place.device}
    # Quoted, because a path may be something else to YAML: a group of keys, a date.
    quoted = (f"{name}={json.dumps(str(value), ensure_ascii=False)}" for name, value in places.items())
    settings = (*plan.settings, f"seed={job.seed}", *quoted)

    def finish(result: Path) -> None:
        if not has_results(store, job):  # else the model was gone, and its numbers were not
            store.add(job.base, replace(plan, runs=[_read_run(result)]))
        after(job)

    return Task(
        name=job.name,
        module="grmoe.studies.models.worker",
        order={
            "settings": settings, "result": str(result_file(folder)), "texts": [str(text) for text in place.texts],
            "tokens": place.tokens, "revision": place.revision, "at_once": place.at_once,
        },
        path=folder,
        like=job.base.name,
        finish=finish,
        steps=steps,
        saved=lambda: _saved_step(folder) / steps,
        progress=lambda: _logged_step(folder) / steps,
        before=lambda: _seconds_before(store, job),
    )  # fmt: skip


def _saved_step(folder: Path) -> int:
    """Of the last checkpoint; 0 without one."""
    names = (path.name.removeprefix(PREFIX) for path in (folder / CHECKPOINTS).glob(f"{PREFIX}*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _logged_step(folder: Path) -> int:
    return max((line["step"] for line in read_log(folder)), default=0)


def _seconds_before(store: Store, job: Job) -> float | None:
    """Of jobs of the same recipe, else of the same base."""
    files = sorted(store.path(job.base, job.recipe).parent.glob("*.json"))
    of_base = {path.stem: store.runs(job.base, path.stem) for path in files}
    for runs in (of_base.get(job.recipe.name, []), [run for each in of_base.values() for run in each]):
        if kept := [run.seconds for run in runs if run.seconds is not None]:
            return statistics.median(kept)
    return None


def _plans(jobs: Sequence[Job], place: Place, store: Store) -> dict[tuple[str, str], Trained]:
    """What will be kept of each recipe, without its runs. Every recipe is checked before anything is trained."""
    from grmoe.config import read_tree
    from grmoe.data.sources import find_units
    from grmoe.runs.start import starting_config
    from grmoe.studies.models.worker import default_identity, describe, identity

    find_units(
        place.texts
    )  # raises for a text that cannot be read, which would fail every job after its training
    names = ["validation", *(Path(text).name for text in place.texts)]
    if len(set(names)) < len(names):
        raise ValueError(f"texts must have different names, got {', '.join(names[1:])}")
    if place.data is None:
        raise ValueError("this study trains language models: give prepared text with --data FOLDER")
    data, defaults = describe(place.data), default_identity()
    found: dict[tuple[str, str], Trained] = {}
    for job in jobs:
        key = job.base.name, job.recipe.name
        settings = (*job.base.settings, *job.recipe.settings, *place.settings)
        if key in found:
            if found[key].settings != settings:
                raise ValueError(f"two recipes of {job.base.name} have the name {job.recipe.name!r}")
            continue
        try:
            config, own = (
                identity(starting_config(read_tree(None, (*given, f"device={place.device}"))))
                for given in (settings, (*job.base.settings, *job.recipe.settings))
            )
        except ValueError as error:
            raise ValueError(f"recipe {job.recipe.name!r}: {error}") from error
        changed = sorted(name for name in config.keys() | own.keys() if config.get(name) != own.get(name))
        changed += [
            s for s in place.settings if s.partition("=")[0] in ("seed", "out", "device", "data.path")
        ]
        if changed:
            raise ValueError(f"these settings change what a study trains, or where: {', '.join(changed)}")
        found[key] = Trained(
            recipe=job.recipe.name, label=job.recipe.label, settings=settings, config=config, data=data
        )
        store.check(job.base, found[key], defaults)
        _check_tokens(store, job, place)
    return found


def _check_tokens(store: Store, job: Job, place: Place) -> None:
    """Raise if a recipe has models that were measured on fewer or more tokens: their losses cannot be compared."""
    for run in store.runs(job.base, job.recipe):
        require(
            run.measured == place.tokens,
            f"{store.path(job.base, job.recipe)} was measured with --tokens {run.measured or '(default)'}: give the "
            "same, or other folders",
        )


def _read_run(path: Path) -> Run:
    tree: dict[str, Any] = read_json(path)
    curve, rows = [Point(**p) for p in tree["curve"]], [Row(**r) for r in tree["rows"]]
    return Run(**{**tree, "curve": curve, "rows": rows})
