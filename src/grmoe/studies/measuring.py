"""Measurements of trained models as tasks: each looks at one model and writes what it found.

A kind of measurement has a folder: results/KIND/BASE/RECIPE-SEED.json. Several studies may read it.
`python -m grmoe.studies.measuring ORDER.json` does one.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grmoe.files import read_json, write_file
from grmoe.runs.results import plain
from grmoe.studies.models.runner import Job, has_model, run_folder
from grmoe.studies.study import Place, provenance
from grmoe.studies.tasks import Task, result_file
from grmoe.terminal import Progress, silent

DIGITS = 5  # significant, of every number that is kept


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was found of one trained model."""

    recipe: str
    seed: int
    revision: str
    machine: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One way to measure a run."""

    name: str
    """Folder of its results."""
    measure: Callable[[Path, Place, Progress], Mapping[str, Any]]
    """(a run's folder, the place, progress) → what is kept. A function of a module: another process calls it."""
    lacks: Callable[[Place], str] = lambda place: ""
    """What a place lacks for it, as a message; empty if nothing."""

    def path(self, results: Path, job: Job) -> Path:
        return results / self.name / job.base.name / f"{job.name}.json"


@dataclass(frozen=True)
class Measurement:
    """One model to be measured."""

    kind: Kind
    job: Job

    def is_done(self, results: Path) -> bool:
        return self.kind.path(results, self.job).is_file()


def measuring_task(wanted: Measurement, place: Place, after: Callable[[Job], None]) -> Task:
    """It can start once the model is trained. after: called when the job was measured."""
    kind, job = wanted.kind, wanted.job
    path = place.work / kind.name / job.base.name / job.name
    kept = kind.path(place.results, job)

    def finish(result: Path) -> None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_file(kept, result.read_bytes())
        after(job)

    return Task(
        name=f"{kind.name} of {job.name}",
        module=__name__,
        order={
            "function": [kind.measure.__module__, kind.measure.__qualname__],
            "folder": str(run_folder(place.work, job)),
            "recipe": job.recipe.name, "seed": job.seed, "result": str(result_file(path)), "device": place.device,
            "tokens": place.tokens, "texts": [str(text) for text in place.texts],
            "tasks": None if place.tasks is None else str(place.tasks),
            "revision": place.revision,
        },
        path=path,
        like=kind.name,
        finish=finish,
        ready=lambda: has_model(place.work, job),
    )  # fmt: skip


def main(path: str) -> int:
    order = read_json(Path(path))
    module, function = order["function"]
    folder, tasks = Path(order["folder"]), order["tasks"]
    place = Place(
        results=folder, work=folder, device=order["device"], tokens=order["tokens"], revision=order["revision"],
        texts=tuple(map(Path, order["texts"])), tasks=None if tasks is None else Path(tasks),
    )  # fmt: skip
    body = getattr(importlib.import_module(module), function)(folder, place, silent)
    about = {
        "recipe": order["recipe"],
        "seed": order["seed"],
        **provenance(place),
        "body": plain(body, DIGITS),
    }
    write_file(Path(order["result"]), (json.dumps(about, ensure_ascii=False) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
