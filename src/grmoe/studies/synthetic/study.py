"""The synthetic study from start to finish: every method on every setting, each at its best learning rate.

A job is one method on all settings. It runs twice as one tensor program: all learning rates on other tasks, then the
best rate of each setting on the tasks that are scored. Results are written when a job is done, so an interrupted study
continues where it stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import torch

from grmoe.hardware import device_name, use_device
from grmoe.runs.folder import environment
from grmoe.studies.study import Place, State, short_revision
from grmoe.studies.synthetic import results
from grmoe.studies.synthetic.evaluation import SeedScore, frame_recovery, score, sweep_dial
from grmoe.studies.synthetic.methods import METHODS, Method
from grmoe.studies.synthetic.results import Config, MethodResult, Saved, Screening, SettingResult, spec_of
from grmoe.studies.synthetic.task import EASY, HARD, SKEWED, Setting, Task
from grmoe.studies.synthetic.training import Trained, train
from grmoe.terminal import Progress, Steps, silent

SETTINGS = {s.name: s for s in (EASY, HARD, SKEWED)}
QUICK_METHODS = ["softmax_top1", "switch", "expert_choice", "soft_moe", "vmf", "grmoe", "supervised"]
DIALED = ("grmoe_paper", "grmoe", "softmax_top1", "softmax_top2")  # the figures show their dials
ALPHAS = [2.0 ** (i / 2) for i in range(-6, 9)]  # 1/8 … 16


class JobError(RuntimeError):
    """A process that ran jobs failed."""

    status = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every method on every setting."""

    out: Path
    """Folder where each finished method is kept, METHOD.json."""
    config: Config = field(default_factory=Config)
    settings: tuple[Setting, ...] = (EASY, HARD, SKEWED)
    methods: tuple[Method, ...] = METHODS
    curves: bool = True
    """Measure dials and recovered subspaces too, for the figures."""
    at_once: int = 1
    """Jobs that run at the same time, each in its own process."""
    until: float | None = None
    """No job starts that would not finish by then (`time.monotonic`), by the longest of those before."""
    revision: str = ""
    """To note with results where git cannot be asked."""


@dataclass(frozen=True)
class Result:
    config: Config
    settings: list[SettingResult]


class Bench:
    """Tasks of a configuration. They are the same for all methods, and slow to make."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._made: dict[tuple[Setting, bool], Task] = {}

    def task(self, settings: Iterable[Setting], *, screening: bool = False) -> Task:
        """One task for each setting, joined. screening: those on which rates are chosen."""
        return Task.joined([self._one(setting, screening) for setting in settings])

    def _one(self, setting: Setting, screening: bool) -> Task:
        c = self.config
        if (setting, screening) not in self._made:
            self._made[setting, screening] = Task(
                setting,
                c.screening_seeds if screening else c.seeds,
                num_experts=c.num_experts,
                dim=c.dim,
                rank=c.rank,
                out_dim=c.out_dim,
                seed=c.screening_seed if screening else c.task_seed,
                device=c.device,
            )
        return self._made[setting, screening]


@dataclass(frozen=True)
class Fit:
    """A method trained at its best rates, with the tokens it was scored on. Entries are settings × seeds."""

    task: Task
    trained: Trained
    x_SBD: torch.Tensor
    scores: list[list[SeedScore]]
    """By setting and seed."""
    oracle: list[float]
    """Accuracy of the Bayes classifier, by setting."""
    rates: list[float]
    """By setting."""
    screening: list[Screening] | None
    """By setting."""


def run(plan: Plan, progress: Progress = silent) -> Result:
    """Train and score every method on every setting. Finished methods are read back from `plan.out`."""
    if plan.at_once > 1:
        _run_apart(plan, progress)
    else:
        _run_here(plan, progress)
    found = results.read_all(plan.out)
    keys = {method.key for method in plan.methods}
    shown = []
    for setting in plan.settings:
        methods = found[setting.name].methods if setting.name in found else []
        if chosen := [m for m in methods if m.method in keys]:
            shown.append(SettingResult(setting=setting, methods=chosen))
    return Result(plan.config, shown)


def missing(plan: Plan, method: Method) -> tuple[Setting, ...]:
    """The settings on which a method has no results of this configuration yet."""
    known = {result.setting for result in _reusable(plan, method).values()}
    return tuple(setting for setting in plan.settings if setting not in known)


def _reusable(plan: Plan, method: Method) -> dict[str, MethodResult]:
    """What is kept of a method, if it was made with this configuration."""
    saved = results.read(plan.out, method.key)
    return saved.results if saved is not None and _is_planned(saved, plan, method) else {}


def _is_planned(saved: Saved, plan: Plan, method: Method) -> bool:
    """Whether a file was made with this configuration and this definition of the method."""
    return (saved.fingerprint, saved.spec) == (plan.config.fingerprint, spec_of(method))


def outdated(plan: Plan) -> tuple[Method, ...]:
    """Methods whose kept results are of another configuration or definition."""
    kept = ((method, results.read(plan.out, method.key)) for method in plan.methods)
    return tuple(
        method for method, saved in kept if saved is not None and not _is_planned(saved, plan, method)
    )


def state_of(plan: Plan) -> State:
    """How many methods have all their results."""
    return State(sum(not missing(plan, method) for method in plan.methods), len(plan.methods))


def run_at(plan: Plan, place: Place, progress: Progress) -> None:
    """Run a plan as part of `grmoe reproduce`."""
    config = replace(plan.config, device=use_device(place.device).type)
    methods = tuple(method for method in plan.methods if place.wants(method.key))
    asked = replace(plan, config=config, methods=methods, at_once=place.at_once)
    run(replace(asked, until=place.until, revision=place.revision), progress)


def steps_of(config: Config) -> int:
    """Training steps of one job."""
    return config.training.steps * (2 if len(config.rates) > 1 else 1)


def _run_here(plan: Plan, progress: Progress) -> None:
    bench = Bench(plan.config)
    steps = Steps(progress, len(plan.methods) * steps_of(plan.config))
    for method in plan.methods:
        settings = missing(plan, method)
        if not settings:
            steps(method.title, steps_of(plan.config))
        elif plan.until is None or time.monotonic() + _longest(plan) < plan.until:
            _run_job(plan, bench, method, settings, steps)


def _longest(plan: Plan) -> float:
    """Seconds of the longest job of this configuration and machine that is kept; 0 if none is."""
    machine = device_name(torch.device(plan.config.device))
    kept = [saved for method in METHODS if (saved := results.read(plan.out, method.key)) is not None]
    same = [
        saved for saved in kept if (saved.fingerprint, saved.machine) == (plan.config.fingerprint, machine)
    ]
    return max((found.seconds for saved in same for found in saved.results.values()), default=0.0)


def _run_apart(plan: Plan, progress: Progress) -> None:
    """Every process takes each `at_once`-th of the unfinished methods. They share nothing but the folder."""
    left = [method for method in plan.methods if missing(plan, method)]
    context = get_context("spawn")  # CUDA does not fork
    shares = [replace(plan, methods=tuple(left[i :: plan.at_once]), at_once=1) for i in range(plan.at_once)]
    workers = [context.Process(target=_run_here, args=(share, silent)) for share in shares if share.methods]
    for worker in workers:
        worker.start()
    total = len(plan.methods)
    while any(worker.is_alive() for worker in workers):
        done = total - sum(bool(missing(plan, method)) for method in left)
        progress(f"{len(workers)} methods at once", done, total)
        time.sleep(1)
    if any(worker.exitcode for worker in workers):
        raise JobError("a process of the study failed; its error is above")


def _run_job(plan: Plan, bench: Bench, method: Method, settings: tuple[Setting, ...], steps: Steps) -> None:
    started = time.perf_counter()
    fit = fit_best(bench, method, settings, steps)
    config, S = plan.config, plan.config.seeds
    found = {}
    for i, setting in enumerate(settings):
        entries = slice(i * S, (i + 1) * S)
        overlap = bench.task([setting]).achieved_overlap()
        dial = None
        if plan.curves and method.key in DIALED:
            dial = sweep_dial(fit.trained.routers, fit.x_SBD[:, : config.dial_tokens], ALPHAS, entries)
        found[setting.name] = MethodResult(
            method=method.key,
            title=method.title,
            setting=setting,
            num_experts=config.num_experts,
            scores=fit.scores[i],
            oracle_accuracy=fit.oracle[i],
            overlap=(float(overlap.mean()), float(overlap.min()), float(overlap.max())),
            rate=fit.rates[i],
            screening=None if fit.screening is None else fit.screening[i],
            dial=dial,
            recovery=frame_recovery(fit.task, fit.trained.routers, entries.start) if plan.curves else None,
            seconds=time.perf_counter() - started,
        )
    results.write(
        Saved(
            method=method.key,
            fingerprint=config.fingerprint,
            spec=spec_of(method),
            machine=device_name(torch.device(config.device)),
            revision=short_revision(environment(), plan.revision),
            results={**_reusable(plan, method), **found},
        ),
        plan.out,
    )


def fit_best(bench: Bench, method: Method, settings: tuple[Setting, ...], steps: Steps) -> Fit:
    """Choose the rate of each setting on other tasks, train at these, and score on fresh tokens."""
    config = bench.config
    screening = _screen(bench, method, settings, steps) if len(config.rates) > 1 else None
    rates = [config.rates[0]] * len(settings)
    if screening is not None:
        rates = [best_rate(found, by_accuracy=method.supervised) for found in screening]
    task = bench.task(settings)
    by_entry = [rate for rate in rates for _ in range(config.seeds)]
    trained = _train(task, method, config, by_entry, config.task_seed, lambda: steps(method.title))
    x_SBD, label_SB = task.tokens(config.eval_tokens, config.task_seed + _HELD_OUT)
    scores = score(task, trained, x_SBD, label_SB, group=config.training.batch)
    right_S = (task.oracle(x_SBD) == label_SB).double().mean(-1)
    return Fit(
        task=task,
        trained=trained,
        x_SBD=x_SBD,
        scores=_blocks(scores, config.seeds),
        oracle=right_S.view(len(settings), -1).mean(-1).tolist(),
        rates=rates,
        screening=screening,
    )


_HELD_OUT = 1_000_003  # distance of the seed of held-out tokens from that of the task


def _screen(bench: Bench, method: Method, settings: tuple[Setting, ...], steps: Steps) -> list[Screening]:
    """All rates on all settings as one tensor program. Every rate has the same tasks, tokens and starts."""
    config = bench.config
    task = bench.task(settings, screening=True).repeated(len(config.rates))
    by_entry = [rate for rate in config.rates for _ in range(task.entries // len(config.rates))]
    label = f"{method.title}: learning rates"
    trained = _train(task, method, config, by_entry, config.screening_seed, lambda: steps(label))
    tokens = task.tokens(config.eval_tokens, config.screening_seed + _HELD_OUT)
    scores = score(task, trained, *tokens, group=config.training.batch)
    blocks = _blocks(scores, config.screening_seeds)  # rates × settings
    found = []
    for i in range(len(settings)):
        mine = blocks[i :: len(settings)]
        found.append(
            Screening(
                rates=list(config.rates),
                loss=[[s.loss for s in block] for block in mine],
                accuracy=[[s.accuracy for s in block] for block in mine],
            )
        )
    return found


def best_rate(found: Screening, *, by_accuracy: bool = False) -> float:
    """The factor with the least mean held-out loss: what one sees without labels. A diverged seed rules a factor out.

    by_accuracy: for a gate that was trained on the labels; its experts were not trained.
    """
    values = found.accuracy if by_accuracy else found.loss
    cost = [-fmean(row) if by_accuracy else fmean(row) for row in values]
    cost = [value if math.isfinite(value) else math.inf for value in cost]
    return found.rates[cost.index(min(cost))]


def _train(
    task: Task, method: Method, config: Config, rates: list[float], seed: int, on_step: Callable[[], None]
) -> Trained:
    task.restart(seed + 17)  # every method sees the same training tokens
    return train(
        task,
        method.builder(config.dim, config.num_experts, config.rank, config.training.batch),
        config.training,
        rates=rates,
        seed=seed + 29,
        supervised=method.supervised,
        overlap=method.overlap,
        on_step=on_step,
    )


def _blocks(scores: list[SeedScore], size: int) -> list[list[SeedScore]]:
    return [scores[i : i + size] for i in range(0, len(scores), size)]
