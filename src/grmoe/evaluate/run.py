"""`grmoe eval`: open a model, go through texts and tasks at each α and each budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from grmoe.checks import one_of, positive_int, require
from grmoe.evaluate import harness
from grmoe.evaluate.perplexity import Perplexity, count_windows, measure_text
from grmoe.evaluate.results import Alpha, Evaluation, Point, Result, show_alpha
from grmoe.evaluate.scoring import Scorer
from grmoe.evaluate.tables import save
from grmoe.evaluate.texts import DomainText, read_domains
from grmoe.extras import missing
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.routing import routing_figures
from grmoe.probe.text import VALIDATION
from grmoe.probe.windows import window_length
from grmoe.runs.folder import versions
from grmoe.runs.open import LoadedModel, open_model
from grmoe.terminal import Progress, Steps, silent

Setting = tuple[Alpha, float | None]  # α and budget; with a budget, α is what it sets

LIBRARIES = ("torch", "transformers", "lm_eval")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    model: Path
    """Folder of a run or of an exported model."""
    out: Path
    """Folder for results.json and the task files made."""
    texts: Sequence[str] = ()
    """As `grmoe.probe.text` names them. Empty: the validation split, unless there are tasks."""
    tasks: Sequence[str] = ()
    """Names of the harness, or YAML files of it. Empty: all of `tasks_from`."""
    tasks_from: Path | None = None
    """Folder of TASK_SPLIT.jsonl to take tasks from."""
    alphas: Sequence[float] = ()
    """Empty, without budgets too: as saved with the model."""
    budgets: Sequence[float] = ()
    """Experts per token, within the model's curve. Measured after the alphas."""
    shots: int | None = None
    """Examples per prompt of a task. None: the task's own number."""
    limit: int | None = None
    """Most rows of each task."""
    tokens: int | None = None
    """Most tokens of each domain of a text."""
    length: int | None = None
    """Tokens per window. None: as trained, or the model's longest. Also the most tokens of a prompt, under "grmoe"."""
    stride: int | None = None
    """Tokens from window to window. None: the length, so that windows do not overlap."""
    batch: int = 8
    """Windows, or sequences of a task, per forward pass."""
    scorer: str = "auto"
    """Of tasks: "harness" (lm_eval), "grmoe" (files of `tasks_from` alone), or "auto": lm_eval if it is installed."""
    checkpoint: str = "best"


def run(plan: Plan, progress: Progress = silent) -> Result:
    """Measure texts first, then tasks. OUT/results.json is written after every point, with all that is known."""
    loaded = open_model(plan.model, plan.checkpoint)
    length = window_length(loaded, plan.length)
    stride = positive_int("stride", length if plan.stride is None else plan.stride)
    require(stride <= length, f"stride must be at most the length of a window, {length}, got {stride}")
    settings = check_settings(loaded.model, plan.alphas, plan.budgets)
    wants_tasks = bool(plan.tasks) or plan.tasks_from is not None
    scorer = choose_scorer(plan.scorer, plan.tasks, plan.tasks_from) if wants_tasks else ""
    sources = plan.texts or ([] if wants_tasks else [VALIDATION])
    texts = read_domains(sources, loaded, plan.tokens)
    points: list[Point] = []  # grows while the evaluation is saved again and again
    evaluation = Evaluation(
        length=length, stride=stride, batch=plan.batch, tokens=plan.tokens, shots=plan.shots, limit=plan.limit,
        scorer=scorer, versions=versions(LIBRARIES), points=points,
    )  # fmt: skip
    result = Result(loaded=loaded, evaluation=evaluation)
    # Loaded before anything is measured, so that a wrong name shows at once.
    answers = _open_tasks(plan, loaded, scorer) if wants_tasks else None
    plan.out.mkdir(
        parents=True, exist_ok=True
    )  # now: a place that cannot be written must not cost a measurement
    if texts:
        windows = sum(count_windows(text, length, stride) for text in texts)
        steps = Steps(progress, windows * len(settings))
        for setting in settings:
            _use(loaded, setting)
            points.append(_measure_texts(loaded.model, texts, setting, evaluation, steps))
            save(result, plan.out)
    if answers is not None:
        for place, setting in enumerate(settings):
            _use(loaded, setting)
            at = show_alpha(*setting)
            tasks = answers.run(plan.limit, lambda s, n, of, at=at: progress(f"{s} at {at}", n, of))
            routing = routing_figures(loaded.model)
            if not texts:
                alpha, budget = setting
                experts = routing.experts_per_token
                points.append(Point(alpha=alpha, budget=budget, experts_per_token=experts))
            points[place] = replace(points[place], tasks=tasks, task_routing=routing)
            save(result, plan.out)
    return result


def choose_scorer(scorer: str, tasks: Sequence[str], tasks_from: Path | None) -> str:
    """ "harness" or "grmoe". Local files of tasks we know need no lm_eval; all else does."""
    one_of("scorer", scorer, ("auto", "harness", "grmoe"))
    local = tasks_from is not None and not any(task.endswith((".yaml", ".yml")) for task in tasks)
    require(
        scorer != "grmoe" or local,
        "scorer must be harness for tasks that are not in the folder of --tasks-from, got grmoe",
    )
    if scorer == "auto":
        return "grmoe" if local and missing("eval") else "harness"
    return scorer


def _open_tasks(plan: Plan, loaded: LoadedModel, scorer: str) -> harness.Harness | Scorer:
    if scorer == "grmoe":
        assert plan.tasks_from is not None  # by `choose_scorer`
        given = (loaded.model, loaded.tokenizer, plan.batch, plan.shots)
        return Scorer(plan.tasks, plan.tasks_from, *given, longest=plan.length)
    specs = harness.task_specs(plan.tasks, plan.tasks_from, plan.out / "tasks")
    return harness.Harness(specs, loaded.model, loaded.tokenizer, plan.batch, plan.shots)


def check_alphas(model: GrmoeForCausalLM, alphas: Sequence[float]) -> list[Alpha]:
    """The settings to measure, each once. None given: the model's own. The model refuses a wrong one here."""
    current, budget = model.config.alpha, model.budget
    saved: Alpha = float(current) if isinstance(current, int | float) else [float(a) for a in current]
    if alphas:
        model.config.check_has_dial()
    for alpha in alphas:
        model.set_alpha(alpha)
    model.set_alpha(saved)
    model.set_budget(budget)
    return list(dict.fromkeys(map(float, alphas))) or [saved]


def check_settings(
    model: GrmoeForCausalLM, alphas: Sequence[float], budgets: Sequence[float]
) -> list[Setting]:
    """(α, budget) of everything to measure, each once. None given: the model's own."""
    given = budgets or ([model.budget] if model.budget is not None and not alphas else [])
    found: list[Setting] = []
    if alphas or not given:
        found += [(alpha, None) for alpha in check_alphas(model, alphas)]
    for budget in dict.fromkeys(map(float, given)):
        values = [numbers.alpha for numbers in model.config.layer_numbers(budget)]
        found.append((values[0] if len(set(values)) == 1 else values, budget))
    return found


def _use(loaded: LoadedModel, setting: Setting) -> None:
    alpha, budget = setting
    if budget is None:
        loaded.model.set_alpha(alpha)
    else:
        loaded.model.set_budget(budget)
    loaded.model.reset_routing_metrics()


def _measure_texts(
    model: GrmoeForCausalLM,
    texts: Sequence[DomainText],
    setting: Setting,
    evaluation: Evaluation,
    steps: Steps,
) -> Point:
    """All texts at the model's present setting, which is `setting`."""
    length, stride, batch = evaluation.length, evaluation.stride, evaluation.batch
    found: dict[str, dict[str, Perplexity]] = {}
    totals: dict[str, Perplexity] = {}
    for text in texts:
        done = partial(steps, f"{text.domain} at {show_alpha(*setting)}")
        value = measure_text(model, text, length, stride, batch, done)
        found.setdefault(text.text, {})[text.domain] = value
        totals[text.text] = totals[text.text] + value if text.text in totals else value
    routing = routing_figures(model)
    return Point(
        alpha=setting[0],
        budget=setting[1],
        experts_per_token=routing.experts_per_token,
        texts=found,
        totals=totals,
        text_routing=routing,
    )
