"""The dial after training: a model trained dense, as in the paper, at several α, beside softmax models trained again.

Speed is measured after the trainings, with nothing else on the machine: results/post-hoc-speed.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from grmoe.files import write_file
from grmoe.pictures import COLORS, picture
from grmoe.studies.judging import MIN_SEEDS, all_of, below, in_doubt, with_change
from grmoe.studies.language_model import BASE
from grmoe.studies.model_study import Group, ModelStudy, runs_of
from grmoe.studies.models.recipes import RECIPES, Recipe
from grmoe.studies.models.runner import Job, has_model, run_folder
from grmoe.studies.models.store import Run, Store
from grmoe.studies.models.summary import (
    Mean,
    difference,
    mean,
    mean_of,
    rows_by_seed,
    show_mean,
)
from grmoe.studies.page import Claim, Figure, Page, Verdict
from grmoe.studies.queue import Needs
from grmoe.studies.study import Place, State, provenance
from grmoe.studies.throughput import Speed, loss_at, read_speeds, speed_file, time_run
from grmoe.tables import Table
from grmoe.terminal import Progress, note

WHERE = "Table 3, Section 6.4.2"
SEEDS = 3
DENSE = RECIPES["grmoe"].plus("grmoe-dense", "GrMoE, trained dense", "model.selection=dense")
RETRAINED = {"top-2": RECIPES["softmax-bias"], "top-1": RECIPES["softmax-one"]}
ELASTIC = RECIPES["token-mass"]
TIMED = (DENSE, ELASTIC, *RETRAINED.values())
# The paper's table at 350M: effective experts, perplexity, throughput.
PAPER = {
    0.5: ("5.2", "18.4", "0.82"),
    1.0: ("3.1", "18.1", "1.00"),
    2.0: ("1.8", "18.3", "1.24"),
    5.0: ("1.1", "19.0", "1.41"),
}
PAPER_SOFTMAX = {"top-2": ("2.0", "18.7", "1.00"), "top-1": ("1.0", "19.8", "1.35")}


def dense(alpha: float) -> str:
    return f"dense, α {alpha:g}"


def cut(alpha: float) -> str:
    """Experts up to 90 % of the probability are computed. The paper names no rule."""
    return f"mass 0.9, α {alpha:g}"


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


Models = Mapping[str, Sequence[Run]]
Speeds = Mapping[tuple[str, str], Speed]


def write(store: Store) -> Page:
    models, speeds = runs_of(store, BASE, *TIMED), read_speeds(store.folder.parent)
    return Page(
        claims=_claims(models, speeds),
        tables=[_table(models, speeds), _frontier(models, speeds), _matched_table(models, speeds)],
        figures=[
            Figure("post-hoc", "Perplexity against measured speed", lambda path: _draw(models, speeds, path))
        ]
        if speeds
        else [],
        notes=[
            "Trained dense: every expert computes every token, at α = 1, as the paper trains. For speed, a rule must "
            "say which experts to leave out; the paper names none. Here it is the fewest experts that hold 90 % of the "
            "probability.",
            "Effective experts are 1/Σg², which is what the paper's column follows. Throughput is that of a prefill, "
            "in every row relative to the model trained dense, at α = 1 with that rule. The paper's is relative to "
            "α = 1, and for softmax to top-2.",
        ],
    )


def _relative(speeds: Speeds, recipe: Recipe, setting: str) -> float | None:
    mine, base = speeds.get((recipe.name, setting)), speeds.get((DENSE.name, cut(1.0)))
    return None if mine is None or base is None else mine.tokens_per_second / base.tokens_per_second


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


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
            show_mean(mean_of(runs, lambda row: row.effective_experts or math.nan, setting=dense(alpha)), 2),
            show_mean(_perplexity(runs, dense(alpha)), 2),
            show_mean(mean_of(runs, lambda row: row.experts_per_token, setting=cut(alpha)), 2),
            show_mean(_perplexity(runs, cut(alpha)), 2),
            _times(_relative(speeds, DENSE, cut(alpha))),
        )
    for setting, paper in PAPER_SOFTMAX.items():
        recipe = RETRAINED[setting]
        table.add(
            f"softmax trained at {setting}", *paper, "–", "–", setting.removeprefix("top-"),
            show_mean(_perplexity(models[recipe.name], setting), 2), _times(_relative(speeds, recipe, setting)),
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
                recipe.label,
                setting,
                show_mean(mean_of(runs, lambda row: row.experts_per_token, setting=setting), 2),
                show_mean(mean_of(runs, lambda row: row.loss, setting=setting), 4),
                "–" if same else show_mean(gap, 4, "+"),
                _times(_relative(speeds, recipe, setting)),
            )
    return table


# -- at the throughput of a softmax model ----------------------------------------------------------------------


def matched(models: Models, speeds: Speeds, recipe: Recipe, setting: str) -> tuple[Mean | None, bool]:
    """(loss minus that of the softmax model of this setting at its throughput, by seed; whether it can be as fast)."""
    other = RETRAINED[setting]
    wanted = speeds.get((other.name, setting))
    mine = {s: speed.tokens_per_second for (name, s), speed in speeds.items() if name == recipe.name}
    theirs = rows_by_seed(models[other.name], setting=setting)
    if wanted is None or not mine:
        return None, True
    found = {run.seed: loss_at(run, mine, wanted.tokens_per_second) for run in models[recipe.name]}
    gaps = [loss - theirs[s].loss for s, loss in found.items() if loss is not None and s in theirs]
    return mean(gaps), None not in found.values()


def _matched_table(models: Models, speeds: Speeds) -> Table:
    table = Table(
        "At the measured throughput of a softmax model: loss minus that model's, by seed",
        ["softmax model", "its throughput", "its loss", *(recipe.label for recipe in (DENSE, ELASTIC))],
    )
    for setting, other in RETRAINED.items():
        cells = []
        for recipe in (DENSE, ELASTIC):
            gap, reached = matched(models, speeds, recipe, setting)
            cells.append(show_mean(gap, 4, "+") if reached else "not as fast")
        table.add(
            f"{other.label}, {setting}",
            _times(_relative(speeds, other, setting)),
            show_mean(mean_of(models[other.name], lambda row: row.loss, setting=setting), 4),
            *cells,
        )
    return table


def _dominates(models: Models, speeds: Speeds) -> Claim:
    shown, verdicts = [], []
    for recipe in (DENSE, ELASTIC):
        parts = []
        for setting in RETRAINED:
            gap, reached = matched(models, speeds, recipe, setting)
            parts.append(below(gap) if reached else Verdict.FAILS)
            if gap is not None or not reached:
                shown.append(
                    f"{recipe.label}, {setting}: {show_mean(gap, 4, '+') if reached else 'not as fast'}"
                )
        verdicts.append(all_of(parts))
    return Claim(
        "Figure 4, Appendix, Pareto Frontier",
        "One GrMoE model dominates separately trained softmax models at every throughput, by 0.5 to 0.8 of perplexity "
        "(2.7 to 4.3 % of 18.7)",
        "; ".join(shown),
        with_change(*verdicts),
        "Loss minus that of the softmax model at its measured throughput, between the measured settings of GrMoE, by "
        "seed. Every interval must be below zero. The change: random budgets in training.",
    )


def _claims(models: Models, speeds: Speeds) -> list[Claim]:
    runs, one = models[DENSE.name], models["softmax-one"]
    cost = difference(runs, runs, setting=cut(2.0), other_setting=dense(1.0))
    against_one = difference(runs, one, setting=cut(5.0), other_setting="top-1")
    effective = [
        mean_of(runs, lambda row: row.effective_experts or math.nan, setting=dense(alpha)) for alpha in PAPER
    ]
    falling = [m.value for m in effective if m is not None]
    cheap = Verdict.OPEN
    if cost is not None and cost.seeds >= MIN_SEEDS:
        cheap = Verdict.HOLDS if cost.value <= 0.011 else Verdict.FAILS
    faster = _relative(speeds, DENSE, cut(2.0))
    return [
        Claim(
            WHERE,
            "A larger α computes fewer experts: 5.2, 3.1, 1.8, 1.1 effective ones at α = 0.5, 1, 2, 5",
            ", ".join(f"{value:.2f}" for value in falling),
            Verdict.OPEN
            if len(falling) < len(PAPER) or min(m.seeds for m in effective if m is not None) < MIN_SEEDS
            else Verdict.HOLDS
            if falling == sorted(falling, reverse=True)
            else Verdict.FAILS,
            "Entropy falls with α for any logits, those of a softmax gate too: α is an inverse temperature.",
        ),
        Claim(
            WHERE,
            "α = 2 costs 0.2 of 18.1 in perplexity (1.1 %)",
            show_mean(cost, 4, "+"),
            cheap,
            "Loss at α = 2 with 90 % of the probability minus loss as trained. At most .011 nats are asked for.",
        ),
        Claim(
            WHERE,
            "α = 2 has 1.24 times the throughput of α = 1",
            _times(faster) if faster else "",
            Verdict.OPEN if faster is None else Verdict.HOLDS if faster >= 1.24 else Verdict.FAILS,
            "Prefill of the whole model, measured with nothing else on the machine.",
        ),
        Claim(
            WHERE,
            "At α = 5 it beats a softmax model trained again at top-1 (19.0 against 19.8)",
            show_mean(against_one, 4, "+"),
            below(against_one),
            f"Loss minus that of the softmax model, by seed. {in_doubt(against_one)}",
        ),
        _dominates(models, speeds),
        Claim(
            WHERE,
            "The same at 1.3B: 14.1 at 1.21 times the throughput, softmax top-1 15.1",
            "",
            Verdict.UNTESTABLE,
            "A trained 1.3B model is out of reach here.",
        ),
    ]


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
                ax.errorbar(x, y, error, color=color, marker="o", ms=4, lw=1, capsize=3, label=recipe.label)
        ax.set(xlabel="prefill, million tokens per second", ylabel="perplexity")
        ax.legend(frameon=False)


STUDY = PostHoc(
    name="post-hoc",
    title="The dial after training",
    where=f"{WHERE}, Figure 4",
    groups=(Group(BASE, TIMED, SEEDS),),
    write=write,
)
