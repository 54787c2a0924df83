"""One queue for the trained models of all studies: a free place goes to the next model, of whichever study.

Studies come in their order, because a study with all its models has verdicts, and two studies with half of theirs have
none. Within a study first seeds come first. A model is measured as soon as it is trained. What must run alone, such as
timing, waits until the queue is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from grmoe.studies.measuring import Measurement, measuring_task
from grmoe.studies.models.runner import Job, remove_model, training_tasks
from grmoe.studies.study import Place, Study
from grmoe.studies.tasks import StudyError, run_tasks
from grmoe.terminal import Progress


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a study asks of the queue."""

    jobs: Sequence[Job] = ()
    """Trained models with results."""
    measurements: Sequence[Measurement] = ()
    """Without results yet."""
    models: Sequence[Job] = ()
    """What `finish` opens."""

    @property
    def all_jobs(self) -> list[Job]:
        """First seeds first."""
        found = [*self.jobs, *(wanted.job for wanted in self.measurements), *self.models]
        return sorted(found, key=lambda job: job.seed)


class QueueStudy:
    """Part of a `Study` that needs trained models."""

    def needs(self, place: Place) -> Needs:
        raise NotImplementedError

    def finish(self, place: Place, progress: Progress) -> None:
        """What is left to do with the trained models, alone on the machine."""

    def run(self, place: Place, progress: Progress) -> None:
        run_queue([self], place, progress)


def run_queue(studies: Sequence[QueueStudy], place: Place, progress: Progress) -> None:
    """Train and measure what the studies need, then finish each. Raises `StudyError` at the end if jobs failed."""
    needs = [study.needs(place) for study in studies]
    measurements = list(dict.fromkeys(m for each in needs for m in each.measurements))
    opened = {job for each in needs for job in each.models}
    pending = Counter(m.job for m in measurements)
    jobs = dict.fromkeys(job for each in needs for job in each.all_jobs)

    def trained(job: Job) -> None:
        if not pending[job] and job not in opened:
            remove_model(place, job)

    def measured(job: Job) -> None:
        pending[job] -= 1
        trained(job)

    tasks = [measuring_task(m, place, measured) for m in measurements]
    tasks += training_tasks([*jobs], place, {*pending, *opened}, trained)
    failed: StudyError | None = None
    try:
        run_tasks(tasks, place, progress)
    except StudyError as error:
        failed = error
    for study in studies:
        if place.time_left > 0:
            study.finish(place, progress)
    still = {job for study in studies for job in study.needs(place).models}
    for job in opened - still:
        if not pending[job]:
            remove_model(place, job)
    if failed is not None:
        raise failed


def run_studies(studies: Sequence[Study], place: Place, progress: Progress) -> None:
    """In their order. The first one that needs trained models starts the queue of all that do.

    Jobs that fail stop no study that comes later. Raises `StudyError` at the end if there were any.
    """
    queued = [study for study in studies if isinstance(study, QueueStudy)]
    for asking in queued:
        asking.needs(place)  # what is missing is said before any work
    failures: list[str] = []
    for study in studies:
        if place.time_left <= 0:
            break
        try:
            if not isinstance(study, QueueStudy):
                study.run(place, progress)
            elif study is queued[0]:
                run_queue(queued, place, progress)
        except StudyError as error:
            failures.append(str(error))
    if failures:
        raise StudyError("\n".join(failures))
