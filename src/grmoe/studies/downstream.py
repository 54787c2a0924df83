"""HellaSwag, ARC-Easy, PIQA and LAMBADA on trained models, without and with examples in the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grmoe.evaluate import Plan
from grmoe.evaluate import run as evaluate
from grmoe.evaluate.harness import find_files
from grmoe.studies.judging import all_of, below, changed
from grmoe.studies.language_model import BASE, SEEDS
from grmoe.studies.language_model_claims import OURS
from grmoe.studies.measured import MeasuredStudy, Models, labels
from grmoe.studies.measuring import Kind, Measured
from grmoe.studies.model_study import Group
from grmoe.studies.models.recipes import RECIPES
from grmoe.studies.models.summary import Mean, mean
from grmoe.studies.page import Claim, Page, Verdict
from grmoe.studies.study import Place
from grmoe.tables import Table
from grmoe.terminal import Progress

WHERE = "Appendix, Downstream Task Evaluation"
SHOTS = (0, 5)
DECIDING = 5  # examples: the paper says few-shot
BATCH = 64
LENGTH = 512  # tokens of a prompt at most: what the models were trained on
LIMIT = 2000  # rows of each task: a standard error of one point
# The metric that counts of each task, and what guessing gets.
METRICS = {"hellaswag": "acc_norm", "arc_easy": "acc", "piqa": "acc", "lambada_openai": "acc"}
CHANCE = {"hellaswag": 0.25, "arc_easy": 0.25, "piqa": 0.5, "lambada_openai": 0.0}
TITLES = {"hellaswag": "HellaSwag", "arc_easy": "ARC-Easy", "piqa": "PIQA", "lambada_openai": "LAMBADA"}
THREE = ("hellaswag", "arc_easy", "piqa")  # the paper's
# The paper at 350M, in percent.
PAPER = {
    "GrMoE": (42.1, 51.3, 65.8),
    "Softmax Top-2": (41.5, 50.8, 65.2),
    "Switch": (40.2, 49.1, 64.0),
    "Expert Choice": (41.8, 50.5, 65.0),
}
GROUP = Group(
    BASE, tuple(RECIPES[n] for n in ("grmoe", "grmoe-amortised", "softmax", "softmax-bias", "switch")), SEEDS
)


def measure_run(folder: Path, place: Place, progress: Progress) -> Mapping[str, Any]:
    """{shots: {task: {"metric,none": value, …}}}, as `grmoe eval` names them."""
    found = {}
    for shots in SHOTS:
        plan = Plan(
            model=folder, out=folder / f"eval-{shots}", tasks=tuple(METRICS), tasks_from=place.tasks, shots=shots,
            batch=BATCH, scorer="grmoe", checkpoint="last", limit=LIMIT, length=LENGTH,
        )  # fmt: skip
        found[str(shots)] = evaluate(plan, progress).evaluation.points[0].tasks
    return found


def _lacks(place: Place) -> str:
    if place.tasks is None:
        return "give the folder of its tasks with --tasks-from FOLDER"
    missing = set(METRICS) - set(find_files(place.tasks))
    return f"{place.tasks} has no rows of {', '.join(sorted(missing))}" if missing else ""


KIND = Kind("downstream", measure_run, _lacks)


def score(run: Measured, task: str, shots: int) -> float:
    value: float = run.body[str(shots)][task][f"{METRICS[task]},none"]
    return value


def row_error(run: Measured, task: str, shots: int) -> float:
    """Standard error over the rows of a task, of one model."""
    value: float | None = run.body[str(shots)][task][f"{METRICS[task]}_stderr,none"]
    return float("nan") if value is None else value


def differences(runs: Sequence[Measured], others: Sequence[Measured], task: str, shots: int) -> Mean | None:
    """Score of others minus score of runs, by seed: below zero where `runs` are better."""
    theirs = {run.seed: run for run in others}
    return mean(
        score(theirs[run.seed], task, shots) - score(run, task, shots) for run in runs if run.seed in theirs
    )


def _percent(found: Mean | None, factor: int = 1, sign: str = "") -> str:
    """In points, ±; factor −1 turns a difference around."""
    if found is None:
        return "–"
    half = None if found.half is None else 100 * found.half
    return Mean(100 * factor * found.value, half, found.seeds).show(1, sign)


def write(models: Models) -> Page:
    return Page(
        claims=_claims(models),
        tables=[_table(models, shots) for shots in SHOTS] if any(models.values()) else [],
        notes=[
            "HellaSwag counts the likeliest ending per character (acc_norm), ARC-Easy and PIQA the likeliest answer "
            "(acc), LAMBADA the last word under greedy decoding. ± is the 95 % interval over seeds; in brackets the "
            f"standard error over the rows of a task, for one model. The first {LIMIT:,} rows of each. Prompts and "
            "scores are those of lm-evaluation-harness.",
            "The paper says few-shot and does not name the number of examples. Here it is 0 and 5, and 5 decides. It "
            "does not say either whether its GrMoE has the amortiser; ours has. Without training rows the examples "
            f"are other rows of the evaluated set. A prompt of more than {LENGTH} tokens, the length of training, "
            "loses its beginning.",
            "Expert Choice looks at later tokens to route earlier ones, so its likelihoods of a continuation leak. It "
            "is left out.",
        ],
    )


def _table(models: Models, shots: int) -> Table:
    table = Table(
        f"Accuracy with {shots} examples, %", ["model", "seeds", *(TITLES[task] for task in METRICS)], left=1
    )
    table.add("guessing", "–", *(f"{100 * CHANCE[task]:.0f}" for task in METRICS))
    for name, runs in models.items():
        cells = []
        for task in METRICS if runs else ():
            found = mean(score(run, task, shots) for run in runs)
            error = mean(row_error(run, task, shots) for run in runs)
            cells.append(f"{_percent(found)} ({100 * (error.value if error else 0):.1f})")
        table.add(labels(GROUP)[name], str(len(runs)), *(cells or ["–"] * len(METRICS)))
    for name, numbers in PAPER.items():
        table.add(f"paper, 350M: {name}", "–", *(f"{n:.1f}" for n in numbers), "–")
    return table


def _claims(models: Models) -> list[Claim]:
    ours = models["grmoe-amortised"]
    return [
        _above(ours, models["softmax"], "Softmax Top-2"),
        _above(ours, models["switch"], "Switch"),
        Claim(
            WHERE,
            "Expert Choice has 41.8 %, 50.5 % and 65.0 %, below GrMoE",
            "",
            Verdict.UNTESTABLE,
            "Its router sees later tokens, so the likelihood of an answer is not a likelihood.",
        ),
        Claim(
            WHERE,
            "GrMoE reaches 42.1 %, 51.3 % and 65.8 %",
            ", ".join(f"{_percent(mean(score(run, t, DECIDING) for run in ours))} %" for t in THREE)
            if ours
            else "",
            Verdict.UNTESTABLE,
            "The paper trains 350M parameters on 26 billion tokens; these models are smaller and saw 41 M.",
        ),
    ]


def _above(ours: Sequence[Measured], theirs: Sequence[Measured], paper: str) -> Claim:
    """Of "ours is more accurate on all three tasks": with examples it decides, without it is shown."""
    found = {(t, s): differences(ours, theirs, t, s) for t in THREE for s in SHOTS}
    shown = "; ".join(
        f"{TITLES[t]} " + ", ".join(f"{_percent(found[t, s], -1, '+')} ({s} examples)" for s in SHOTS)
        for t in THREE
    )
    said = ", ".join(f"{a - b:.1f}" for a, b in zip(PAPER["GrMoE"], PAPER[paper], strict=True))
    return Claim(
        WHERE,
        f"GrMoE's 42.1 %, 51.3 % and 65.8 % on HellaSwag, ARC-Easy and PIQA are above {_list(PAPER[paper])} of {paper}",
        shown if any(gap is not None for gap in found.values()) else "",
        changed(all_of(below(found[t, DECIDING]) for t in THREE)),
        f"GrMoE with an amortiser minus the other, points of accuracy, by seed. With {DECIDING} examples all intervals "
        f"must be above zero. The paper's differences are {said} points; with {LIMIT:,} rows {SEEDS} models hardly see "
        f"less than one. {OURS}",
    )


def _list(numbers: Sequence[float]) -> str:
    *first, last = (f"{number:.1f} %" for number in numbers)
    return f"{', '.join(first)} and {last}"


STUDY = MeasuredStudy(
    name="downstream",
    title="Downstream tasks",
    where=WHERE,
    kind=KIND,
    group=GROUP,
    write=write,
)
