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
    LITERAL,
    PAPER,
    PAPER_SOFTMAX,
    RETRAINED,
    TIMED,
    Models,
    Speeds,
    cut,
    dense,
    effective_experts,
    experts_computed,
    name_of,
    relative,
    seed_timed,
    times,
)
from grmoe.studies.queue import Needs
from grmoe.studies.study import Place, State, provenance
from grmoe.studies.throughput import ROUNDS, read_speeds, speed_file, time_models
from grmoe.tables import Table
from grmoe.terminal import Progress, note

SEEDS = 3
TIMING = 300.0  # seconds that timing all models may take on a GPU: each is compiled


class PostHoc(ModelStudy):
    """Trains the models, then times one seed of each."""

    def state(self, results: Path) -> State:
        before = super().state(results)
        return State(before.done + speed_file(results).is_file(), before.total + 1)

    def needs(self, place: Place) -> Needs:
        return replace(super().needs(place), models=_untimed(place))

    def finish(self, place: Place, progress: Progress) -> None:
        """All in one call: speeds of two calls do not compare."""
        todo = _untimed(place)
        if not todo:
            return
        missing = [job.name for job in todo if not has_model(place.work, job)]
        if missing:
            note(f"speed is not timed yet: {', '.join(missing)} must be trained first")
            return
        if place.time_left < TIMING:
            note(f"speed is not timed yet: it may take {TIMING:.0f} s, and {place.time_left:.0f} s are left")
            return
        runs = [(job.recipe.name, run_folder(place.work, job)) for job in todo]
        try:
            rows = time_models(runs, place.device, progress)
        except Exception as error:  # whatever a compiler raises; the other studies go on
            note(f"speed is not timed: {type(error).__name__}: {error}")
            return
        about = {**provenance(place), "rows": [asdict(row) for row in rows]}
        write_file(speed_file(place.results), (json.dumps(about, indent=1) + "\n").encode())


def _untimed(place: Place) -> list[Job]:
    """One model of each, if there are no speeds yet. Parts of the study and other numbers of steps are not timed."""
    if place.only or place.steps is not None or speed_file(place.results).is_file():
        return []
    return [Job(BASE, recipe, seed_timed(recipe)) for recipe in TIMED]


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
            "Trained dense: every expert computes every token, at α = 1. This the paper does. One model has the "
            "paper's gate, prior and penalty too; the other has our prior, scaling and hinge. The paper's table has "
            "the perplexity of its GrMoE with an amortiser, which neither has. For speed, a rule must say which "
            "experts to leave out; the paper names none. Here it is the fewest experts that hold 90 % of the "
            "probability.",
            "Effective experts are 1/Σg², which is what the paper's column follows. Throughput is that of a prefill. "
            "Of a dial it is relative to the same model at α = 1 with that rule. Of all others it is relative to our "
            "model trained dense, at α = 1 with that rule. The paper's is relative to α = 1, and for softmax to top-2.",
            f"One model of each is timed. All of them take turns in {ROUNDS} rounds, at every setting. A throughput is "
            "the median of the ratios by round, in brackets the middle 80 % of them.",
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
            "", "here", "paper: effective experts", "perplexity", "throughput", "here: effective experts",
            "perplexity, dense", "experts computed", "perplexity", "throughput",
        ],
        left=2,
    )  # fmt: skip
    for recipe in (LITERAL, DENSE):
        runs = models[recipe.name]
        for alpha, paper in PAPER.items():
            table.add(
                f"α = {alpha:g}",
                name_of(recipe),
                *paper,
                show_mean(effective_experts(runs, alpha), 2),
                show_mean(_perplexity(runs, dense(alpha)), 2),
                show_mean(experts_computed(runs, alpha), 2),
                show_mean(_perplexity(runs, cut(alpha)), 2),
                times(relative(speeds, recipe, cut(alpha), recipe)),
            )
    for setting, paper in PAPER_SOFTMAX.items():
        recipe = RETRAINED[setting]
        table.add(
            f"softmax trained at {setting}", name_of(recipe), *paper, "–", "–", setting.removeprefix("top-"),
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
                    x, (low, high) = speed.tokens_per_second, speed.interval
                    points.append(
                        (x / 1e6, found.value, found.half or 0.0, (x - low) / 1e6, (high - x) / 1e6)
                    )
            points.sort()
            if points:
                x_values, y, y_error, left, right = zip(*points, strict=True)
                ax.errorbar(
                    x_values, y, y_error, (left, right), color=color, marker="o", ms=4, lw=1, capsize=3,
                    label=name_of(recipe),
                )  # fmt: skip
        ax.set(xlabel="prefill, million tokens per second", ylabel="perplexity")
        ax.legend(frameon=False)


STUDY = PostHoc(
    name="post-hoc",
    title="The dial after training",
    where=f"{WHERE}, Figure 4",
    groups=(Group(BASE, TIMED, SEEDS),),
    write=write,
)
