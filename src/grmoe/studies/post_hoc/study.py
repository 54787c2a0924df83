"""The dial after training: a model trained dense, as in the paper, at several α, beside softmax models trained again.

Speed is measured after the trainings, with nothing else on the machine: results/post-hoc-speed.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from grmoe.files import write_file
from grmoe.pictures import COLORS, picture
from grmoe.studies.language_model import BASE
from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.runner import Job, has_model, run_folder
from grmoe.studies.models.store import Run, Store
from grmoe.studies.models.summary import Mean, difference, mean_of, show_mean
from grmoe.studies.page import Figure, Page
from grmoe.studies.post_hoc.claims import WHERE, claims
from grmoe.studies.post_hoc.frontier import matched_table
from grmoe.studies.post_hoc.models import (
    DENSE,
    ELASTIC,
    PAPER,
    PAPER_SOFTMAX,
    RETRAINED,
    TIMED,
    Models,
    Speeds,
    cut,
    dense,
    effective_experts,
    name_of,
    relative,
    times,
)
from grmoe.studies.queue import Needs
from grmoe.studies.study import Place, State, provenance
from grmoe.studies.throughput import Speed, read_speeds, speed_file, time_run
from grmoe.tables import Table
from grmoe.terminal import Progress, note

SEEDS = 3
TIMING = 240.0  # seconds that timing all models may take on a GPU: each is compiled


class PostHoc(ModelStudy):
    """Trains the models, then times the first seed of each."""

    def state(self, results: Path) -> State:
        before = super().state(results)
        return State(before.done + speed_file(results).is_file(), before.total + 1)

    def needs(self, place: Place) -> Needs:
        return replace(super().needs(place), models=_untimed(place))

    def finish(self, place: Place, progress: Progress) -> None:
        """All in one call: speeds of two calls do not compare."""
        todo = _untimed(place)
        missing = [job.name for job in todo if not has_model(place.work, job)]
        if missing:
            note(f"speed is not timed yet: {', '.join(missing)} must be trained first")
            return
        if todo and place.time_left < TIMING:
            note(f"speed is not timed yet: it may take {TIMING:.0f} s, and {place.time_left:.0f} s are left")
            return
        rows: list[Speed] = []
        for number, job in enumerate(todo):
            progress(f"timing {job.recipe.name}", number, len(todo))
            rows += time_run(job.recipe.name, run_folder(place.work, job), place.device)
        if rows:
            about = {**provenance(place), "rows": [asdict(row) for row in rows]}
            write_file(speed_file(place.results), (json.dumps(about, indent=1) + "\n").encode())


def _untimed(place: Place) -> list[Job]:
    """First seeds, if there are no speeds yet. Parts of the study and other numbers of steps are not timed."""
    if place.only or place.steps is not None or speed_file(place.results).is_file():
        return []
    return [Job(BASE, recipe, 0) for recipe in TIMED]


def write(store: Store) -> Page:
    models, speeds = runs_of(store, BASE, *TIMED), read_speeds(store.folder.parent)
    return Page(
        claims=claims(models, speeds),
        tables=[_table(models, speeds), _frontier(models, speeds), matched_table(models, speeds)],
        figures=[
            Figure("post-hoc", "Perplexity against measured speed", lambda path: _draw(models, speeds, path))
        ]
        if speeds
        else [],
        notes=[
            "Trained dense: every expert computes every token, at α = 1. This the paper does; prior, scaling and hinge "
            "are ours. The paper's table is of GrMoE with its amortiser, which this model has not. For speed, a rule "
            "must say which experts to leave out; the paper names none. Here it is the fewest experts that hold 90 % "
            "of the probability.",
            "Effective experts are 1/Σg², which is what the paper's column follows. Throughput is that of a prefill, "
            "in every row relative to the model trained dense, at α = 1 with that rule. The paper's is relative to "
            "α = 1, and for softmax to top-2.",
            "The paper's 0.5 to 0.8 of perplexity at matched throughput do not follow from its Table 3: there it is "
            "0.6 at 1.0 times and, between α = 2 and 5, 1.05 at 1.35 times.",
        ],
    )


def _perplexity(runs: Sequence[Run], setting: str) -> Mean | None:
    return mean_of(runs, lambda row: math.exp(row.loss), setting=setting)


def _table(models: Models, speeds: Speeds) -> Table:
    table = Table(
        "Post-hoc sparsity beside the paper",
        [
            "", "paper: effective experts", "perplexity", "throughput", "here: effective experts", "perplexity, dense",
            "experts computed", "perplexity", "throughput",
        ],
    )  # fmt: skip
    runs = models[DENSE.name]
    for alpha, paper in PAPER.items():
        table.add(
            f"α = {alpha:g}",
            *paper,
            show_mean(effective_experts(runs, alpha), 2),
            show_mean(_perplexity(runs, dense(alpha)), 2),
            show_mean(mean_of(runs, lambda row: row.experts_per_token, setting=cut(alpha)), 2),
            show_mean(_perplexity(runs, cut(alpha)), 2),
            times(relative(speeds, DENSE, cut(alpha))),
        )
    for setting, paper in PAPER_SOFTMAX.items():
        recipe = RETRAINED[setting]
        table.add(
            f"softmax trained at {setting}", *paper, "–", "–", setting.removeprefix("top-"),
            show_mean(_perplexity(models[recipe.name], setting), 2), times(relative(speeds, recipe, setting)),
        )  # fmt: skip
    return table


def _frontier(models: Models, speeds: Speeds) -> Table:
    table = Table(
        "One GrMoE model with random budgets beside softmax models of one budget",
        [
            "model",
            "computed at",
            "experts per token",
            "loss",
            "loss minus softmax's of this budget",
            "throughput",
        ],
        left=2,
    )
    for recipe, settings in (
        (ELASTIC, ("top-2", "mass 0.7", "mass 0.5", "mass 0.3", "top-1")),
        (RETRAINED["top-2"], ("top-2", "top-1")),
        (RETRAINED["top-1"], ("top-1",)),
    ):
        runs = models[recipe.name]
        for setting in settings:
            other = RETRAINED.get(setting)
            gap = (
                difference(runs, models[other.name], setting=setting, other_setting=setting)
                if other
                else None
            )
            same = other is not None and other.name == recipe.name
            table.add(
                name_of(recipe),
                setting,
                show_mean(mean_of(runs, lambda row: row.experts_per_token, setting=setting), 2),
                show_mean(mean_of(runs, lambda row: row.loss, setting=setting), 4),
                "–" if same else show_mean(gap, 4, "+"),
                times(relative(speeds, recipe, setting)),
            )
    return table


def _draw(models: Models, speeds: Speeds, path: Path) -> None:
    with picture(path, 6.5, 4.4) as figure:
        ax = figure.subplots()
        for color, recipe in zip(COLORS, TIMED, strict=False):
            points = []
            for (name, setting), speed in speeds.items():
                found = _perplexity(models[recipe.name], setting) if name == recipe.name else None
                if found is not None:
                    points.append((speed.tokens_per_second / 1e6, found.value, found.half or 0.0))
            points.sort()
            if points:
                x, y, error = zip(*points, strict=True)
                ax.errorbar(
                    x, y, error, color=color, marker="o", ms=4, lw=1, capsize=3, label=name_of(recipe)
                )
        ax.set(xlabel="prefill, million tokens per second", ylabel="perplexity")
        ax.legend(frameon=False)


STUDY = PostHoc(
    name="post-hoc",
    title="The dial after training",
    where=f"{WHERE}, Figure 4",
    groups=(Group(BASE, TIMED, SEEDS),),
    write=write,
)
