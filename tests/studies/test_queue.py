"""One queue for the models of all studies: what starts when, what is measured, and what happens when the time is up."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from test_models_store import BASE, MINE, FakeProcess, a_run, trains

from grmoe.runs.folder import CHECKPOINTS, CONFIG
from grmoe.studies import measuring, tasks
from grmoe.studies.measured import MeasuredStudy
from grmoe.studies.measuring import Kind
from grmoe.studies.model_study import Group
from grmoe.studies.models import Base, Job, Recipe, Store, StudyError, worker
from grmoe.studies.models.runner import has_model, run_folder, training_tasks
from grmoe.studies.page import Page
from grmoe.studies.queue import Needs, QueueStudy, run_queue, run_studies
from grmoe.studies.study import Place, State
from grmoe.studies.tasks import Task
from grmoe.terminal import silent

OTHER = replace(MINE, name="other", settings=(*MINE.settings, "optim.lr=1e-3"))
THIRD = replace(MINE, name="third", settings=(*MINE.settings, "optim.lr=2e-3"))
LONG = Base("long", tuple("steps=30" if s == "steps=3" else s for s in BASE.settings))


def third(folder: Path, *_: Any) -> dict[str, float]:
    """A measurement."""
    assert (folder / CONFIG).is_file()
    return {"x": 1 / 3}


def fails(*_: Any) -> dict[str, float]:
    raise RuntimeError("out of memory")


@dataclass
class Asks(QueueStudy):
    """A study that needs these."""

    asked: Needs
    finished: list[bool] = field(default_factory=list)

    def needs(self, place: Place) -> Needs:
        return self.asked

    def finish(self, place: Place, progress: Any) -> None:
        self.finished.append(True)


def behave(order: dict[str, Any]) -> int:
    """As a process would: a training leaves a run, a measurement is really done."""
    if "function" not in order:
        folder = Path(order["result"].removesuffix(".result.json"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).touch()
        return trains(order)
    try:
        return measuring.main(order["result"].replace(".result.", ".order."))
    except RuntimeError:
        return 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was started, in order."""
    names: list[str] = []

    def noted(order: dict[str, Any]) -> int:
        names.append(Path(order["result"]).name.removesuffix(".result.json"))
        names[-1] += " measured" if "function" in order else ""
        return behave(order)

    monkeypatch.setattr(tasks, "POLL", 0.0)
    monkeypatch.setattr(tasks.subprocess, "Popen", FakeProcess)
    monkeypatch.setattr(FakeProcess, "behave", staticmethod(noted), raising=False)
    return names


@pytest.fixture
def place(prepared: Path, tmp_path: Path) -> Place:
    return Place(results=tmp_path / "results", work=tmp_path / "work", data=prepared, device="cpu")


def a_study(measure: Any = third, seeds: int = 2) -> MeasuredStudy:
    return MeasuredStudy(
        name="mine", title="Mine", where="here", kind=Kind("kind", measure), group=Group(BASE, (MINE,), seeds),
        write=lambda models: Page([], notes=[str(run.body["x"]) for run in models["mine"]]),
    )  # fmt: skip


def jobs(recipe: Recipe = MINE, seeds: int = 2) -> list[Job]:
    return [Job(BASE, recipe, seed) for seed in range(seeds)]


def test_all_studies_share_one_queue_and_each_has_its_first_seeds_first(
    place: Place, started: list[str]
) -> None:
    studies = [Asks(Needs(jobs=jobs(MINE))), Asks(Needs(jobs=[*jobs(THIRD), *jobs(OTHER), *jobs(MINE)]))]
    run_queue(studies, place, silent)
    assert started == ["mine-0", "mine-1", "third-0", "other-0", "third-1", "other-1"]
    assert [study.finished for study in studies] == [[True], [True]]


def test_the_first_study_with_models_starts_the_queue_of_all(place: Place, started: list[str]) -> None:
    class Alone:
        def run(self, place: Place, progress: Any) -> None:
            started.append("alone")

    studies: list[Any] = [
        Alone(),
        Asks(Needs(jobs=jobs(seeds=1))),
        Alone(),
        Asks(Needs(jobs=jobs(OTHER, 1))),
    ]
    run_studies(studies, place, silent)
    assert started == ["alone", "mine-0", "other-0", "alone"]


def test_a_model_is_measured_as_soon_as_it_is_trained_and_once(place: Place, started: list[str]) -> None:
    study = a_study()
    assert study.state(place.results) == State(0, 2)
    study.run(place, silent)
    assert started == ["mine-0", "mine-0 measured", "mine-1", "mine-1 measured"]
    assert study.state(place.results) == State(2, 2)
    assert study.page(place.results).notes == ["0.33333", "0.33333"]
    kept = json.loads((place.results / "kind" / "tiny" / "mine-0.json").read_text())
    assert (kept["seed"], kept["recipe"]) == (0, "mine")
    assert kept["machine"].startswith("CPU, torch")
    assert kept["revision"]
    study.run(place, silent)
    assert len(started) == 4


def test_a_model_that_is_gone_is_trained_again_and_its_numbers_stay(place: Place, started: list[str]) -> None:
    """Before, it could never be measured: results without a model were skipped for good."""
    run_queue([Asks(Needs(jobs=jobs()))], replace(place, keep=()), silent)
    assert not any(has_model(place.work, job) for job in jobs())
    text = Store(place.results).path(BASE, MINE).read_text()
    started.clear()
    study = a_study()
    study.run(replace(place, keep=()), silent)  # kept until it was measured
    assert started == ["mine-0", "mine-0 measured", "mine-1", "mine-1 measured"]
    assert study.state(place.results) == State(2, 2)
    assert Store(place.results).path(BASE, MINE).read_text() == text
    assert not any(run_folder(place.work, job).exists() for job in jobs())


def test_a_model_that_a_study_opens_later_is_there(place: Place, started: list[str]) -> None:
    run_queue([Asks(Needs(jobs=jobs(), models=jobs()[:1]))], replace(place, keep=()), silent)
    assert [has_model(place.work, job) for job in jobs()] == [True, False]


def test_a_model_that_a_study_has_opened_is_removed(place: Place, started: list[str]) -> None:
    """Before, it stayed for good."""

    class Times(Asks):
        def needs(self, place: Place) -> Needs:
            return self.asked if not self.finished else Needs(jobs=self.asked.jobs)

    asked = Needs(jobs=jobs(), models=jobs()[:1])
    run_queue([Times(asked)], place, silent)
    assert all(has_model(place.work, job) for job in jobs())  # all models are kept
    run_queue([Times(asked)], replace(place, keep=()), silent)
    assert [has_model(place.work, job) for job in jobs()] == [False, True]


def test_a_model_that_was_stopped_is_not_measured(place: Place, started: list[str]) -> None:
    """Its folder is there, and results of an earlier training too."""
    run_queue([Asks(Needs(jobs=jobs(seeds=1)))], place, silent)
    folder = run_folder(place.work, jobs()[0])
    tasks.result_file(folder).unlink()
    started.clear()
    a_study(seeds=1).run(replace(place, until=time.monotonic() - 1), silent)
    assert not any("measured" in name for name in started)
    a_study(seeds=1).run(place, silent)
    assert started[-2:] == ["mine-0", "mine-0 measured"]


def test_a_failure_stops_neither_other_jobs_nor_what_comes_after(place: Place, started: list[str]) -> None:
    last = Asks(Needs(jobs=jobs(OTHER, 1)))
    with pytest.raises(StudyError, match="kind of mine-0 ended with status 1"):
        run_queue([a_study(fails, 1), last], place, silent)
    assert started == ["mine-0", "mine-0 measured", "other-0"]
    assert last.finished == [True]


def test_a_failure_stops_no_study_that_comes_later(place: Place, started: list[str]) -> None:
    """Before, one training that failed kept the benchmarks after the queue from running."""

    class Alone:
        def run(self, place: Place, progress: Any) -> None:
            started.append("alone")
            raise StudyError("alone ended")

    studies: list[Any] = [a_study(fails, 1), Alone(), Alone()]
    with pytest.raises(StudyError, match=r"kind of mine-0 ended with status 1[^$]*alone ended\nalone ended"):
        run_studies(studies, place, silent)
    assert started == ["mine-0", "mine-0 measured", "alone", "alone"]


def test_what_is_missing_is_said_before_any_work(place: Place, started: list[str]) -> None:
    lacking = replace(a_study(), kind=Kind("kind", third, lambda _: "give a folder"))
    with pytest.raises(ValueError, match="kind: give a folder"):
        run_studies([Asks(Needs(jobs=jobs())), lacking], place, silent)  # type: ignore[list-item]
    assert started == []


# -- time ---------------------------------------------------------------------------------------------------------


def a_slice(place: Place, seconds: float, *tasks_: Task) -> tasks._Slice:
    return tasks._Slice(list(tasks_), replace(place, until=time.monotonic() + seconds), silent)


def fits(slice_: tasks._Slice, task: Task) -> bool:
    return slice_._fits(task, {})


def test_no_job_starts_that_would_not_finish(place: Place, started: list[str]) -> None:
    short, long = (training_tasks([Job(base, MINE, 0)], place)[0] for base in (BASE, LONG))
    assert (short.steps, long.steps) == (3, 30)
    now = a_slice(place, 100)
    assert fits(now, short)  # nothing is known
    assert fits(now, long)
    now.seconds, now.per_step = {"tiny": [50.0]}, [50.0 / 3]
    assert fits(now, short)
    assert not fits(now, long)  # ten times the steps of the jobs that took 50 s
    now.seconds["long"] = [90.0]
    assert fits(now, long)
    now.seconds["tiny"].append(120.0)
    assert not fits(now, short)  # the slowest one counts


def test_earlier_calls_foretell_the_time_of_a_whole_base(place: Place, started: list[str]) -> None:
    """Before, only earlier jobs of the same recipe did."""
    run_queue([Asks(Needs(jobs=jobs(seeds=1)))], place, silent)
    store = Store(place.results)
    before = store.read(BASE, MINE)
    assert before is not None
    store.add(BASE, replace(before, runs=[a_run(0, seconds=200.0)]))
    (task,) = training_tasks(jobs(OTHER, 1), place)
    assert not fits(a_slice(place, 100), task)
    assert fits(a_slice(place, 300), task)


def test_a_running_job_foretells_the_time_of_those_like_it(place: Place, started: list[str]) -> None:
    first, second = training_tasks(jobs(), place)
    now = a_slice(place, 100)
    running = now._start(replace(first, progress=lambda: 0.5))
    running.started -= 60  # half of it took a minute
    now.running = [running]
    assert not fits(now, second)
    assert fits(a_slice(place, 100), second)
    now.running = [replace_progress(running, 0.05)]
    assert fits(now, second)  # too early to tell


def replace_progress(running: Any, share: float) -> Any:
    return replace(running, task=replace(running.task, progress=lambda: share))


def test_a_stopped_job_needs_less_time(place: Place, started: list[str]) -> None:
    (task,) = training_tasks(jobs(seeds=1), place)
    now = a_slice(place, 100)
    now.seconds = {"tiny": [150.0]}
    assert not fits(now, task)
    (run_folder(place.work, jobs()[0]) / CHECKPOINTS / "step-00000002").mkdir(parents=True)
    assert task.saved() == pytest.approx(2 / 3)
    assert fits(now, task)


def test_with_free_places_a_job_needs_less_time(place: Place, started: list[str]) -> None:
    (task,) = training_tasks(jobs(seeds=1), place)
    now = a_slice(replace(place, at_once=10), 100)
    now.seconds = {"tiny": [150.0]}  # ten at once
    running = now._start(task)
    for count, enough in ((0, True), (4, True), (5, False), (9, False)):
        now.running = [running] * count
        assert fits(now, task) is enough, count  # 150 s · (0.3 + 0.7 · (count + 1) / 10)


def test_a_job_that_does_not_fit_lets_shorter_ones_pass(place: Place, started: list[str]) -> None:
    """Before, the first job that did not fit kept all others waiting."""
    waiting = training_tasks([Job(LONG, MINE, 0), Job(BASE, MINE, 0)], place)
    now = a_slice(place, 100, *waiting)
    now.seconds = {"long": [500.0], "tiny": [5.0]}
    now.run()
    assert started == ["mine-0"]
    assert [run.seed for run in Store(place.results).runs(BASE, MINE)] == [0]
    assert [task.like for task in now.waiting] == ["long"]


def test_a_kill_stops_the_jobs_too(place: Place, started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would train on alone, and the next call would find their folders locked."""
    running: list[Any] = []

    class Kills(FakeProcess):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__(command, **options)
            running.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(tasks.subprocess, "Popen", Kills)
    monkeypatch.setattr(FakeProcess, "behave", staticmethod(lambda _: None))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        run_queue([Asks(Needs(jobs=jobs(seeds=1)))], place, silent)
    assert left.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_trained_model_may_still_be_measured_when_the_time_is_up(
    place: Place, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it was stopped with the others, and what ended in the last second was lost."""
    trained, training = (
        replace(task, progress=lambda share=share: share)
        for task, share in zip(training_tasks(jobs(), place), (1.0, 0.5), strict=True)
    )

    class Ends(FakeProcess):
        def wait(self, timeout: float = 0) -> int | None:
            self.status = 0 if self.status is None else self.status
            return self.status

    def writes(order: dict[str, Any]) -> None:
        trains(order)

    monkeypatch.setattr(tasks.subprocess, "Popen", Ends)
    monkeypatch.setattr(FakeProcess, "behave", staticmethod(writes))
    now = tasks._Slice([trained, training], replace(place, at_once=2, until=time.monotonic() + 0.1), silent)
    now.run()
    assert [run.seed for run in Store(place.results).runs(BASE, MINE)] == [0]


def test_the_time_of_a_continued_job_is_not_kept(place: Place, started: list[str]) -> None:
    """It would be that of its last part."""

    def really(order: dict[str, Any]) -> int:
        return worker.main(order["result"].replace(".result.", ".order."))

    FakeProcess.behave = staticmethod(really)  # type: ignore[method-assign]
    run_queue([Asks(Needs(jobs=jobs(seeds=1)))], place, silent)
    store = Store(place.results)
    (first,) = store.runs(BASE, MINE)
    assert first.seconds is not None
    store.path(BASE, MINE).unlink()
    run_queue([Asks(Needs(jobs=jobs(seeds=1)))], place, silent)
    (second,) = store.runs(BASE, MINE)
    assert second.seconds is None
    assert second.rows == first.rows
