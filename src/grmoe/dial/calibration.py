"""`grmoe dial` from a model's folder to results: search, time, choose, certify, check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grmoe import checks
from grmoe.dial.beside import check_tokens, measure_budgets, model_names, round_budgets
from grmoe.dial.certify import certify
from grmoe.dial.curve import MAX_POINTS, build_curve, chosen_budget, measured_at, use_curve
from grmoe.dial.frontier import dial_points, frontier, gains, rule_points, top_k_points, uniform_points
from grmoe.dial.gates import Gates
from grmoe.dial.level import Levels
from grmoe.dial.meter import RULES, Meter, Point
from grmoe.dial.results import (
    AlphaRow,
    Calibration,
    Check,
    DialResults,
    PointResult,
    Result,
    SensitivityResult,
)
from grmoe.dial.saved import Book, Saved
from grmoe.dial.search import ALPHAS, expected, search
from grmoe.dial.setting import apply, at_least, check_router, mass
from grmoe.dial.speed import ROUNDS, Speed, time_points
from grmoe.dial.straight import straighten
from grmoe.dial.target import REFINEMENTS, Target, choose, refine
from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.probe.losses import Measurement, increase, increase_by_domain
from grmoe.probe.windows import Text, read_texts
from grmoe.runs.open import open_model
from grmoe.terminal import Progress, Steps, note, silent

_TABLE_TAU = 0.9  # of the α table, where the chosen setting has no τ
_MAX_TIMED, _MAX_RULE = 16, 3  # frontier points that are timed, and those of a rule beside τ and α
# Figures of a `Measurement` that the results keep.
_FIGURES = (
    "loss", "perplexity", "experts_per_token", "layer_experts", "entropy", "effective_experts_entropy",
    "effective_experts_inverse", "load_cv", "min_load",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do. With the defaults, preset `tiny` takes less than a minute on a CPU."""

    model: str | Path
    """Folder of a run or of an exported model."""
    target: Target
    text: str | None = None
    """Calibration text. Default: the run's validation split."""
    checks: Sequence[str] = ()
    """Other texts, to check the chosen setting on."""
    tokens: int | None = None
    """Of each text. Default: 8192, on a GPU 131072."""
    length: int | None = None
    """Tokens per window. Default: as trained."""
    cap: int | None = None
    """The most experts per token. Default: as trained."""
    checkpoint: str = "best"
    """Of a run: "best", "last" or a step."""
    beside: Sequence[str | Path] = ()
    """Other models to compare with: along their own curves, or as trained."""
    timed: bool = True
    """Whether speeds are measured. On a busy machine they mean nothing."""
    folder: Path | None = None
    """Where measurements are kept as they are made. The same plan takes them up after an interruption, and `save`
    removes them. Default: nowhere."""

    def __post_init__(self) -> None:
        checks.require(
            self.timed or self.target.kind != "throughput",
            "a target of throughput needs measured speeds, got --no-speed (timed=False)",
        )


def run(plan: Plan, progress: Progress = silent) -> Result:
    """Measure settings, choose one and certify it.

    The model in the result has the curve of budgets, and the chosen setting as its budget. All else is as trained.
    """
    wanted = [(plan.model, plan.checkpoint), *((path, "best") for path in plan.beside)]
    loaded, *beside = (open_model(path, checkpoint, dtype="served") for path, checkpoint in wanted)
    model, target = loaded.model, plan.target
    own, *names = model_names((loaded, *beside))
    check_router(model.config)
    use_curve(model, None, None)  # what an earlier calibration left
    cap = _cap(plan.cap, model.config)
    if target.kind == "experts":
        _check_reachable(target.value, cap, model.config)
    # All text is read before anything is measured: a wrong file name should not cost minutes.
    text, *others = read_texts((plan.text, *plan.checks), loaded, plan.length, plan.tokens)
    # A target of speed needs speeds to choose by. Otherwise everything is timed together, after the choice.
    by_speed = target.kind == "throughput"
    timings = 2 if by_speed else int(plan.timed)
    check_tokens(beside, text, plan.text, plan.length, plan.tokens)
    total = (
        expected(len(model.config.moe_layers), cap) + REFINEMENTS + MAX_POINTS + 2 * len(others)
        + len(round_budgets(cap)) * (1 + len(others) + len(beside)) + len(beside)
    )  # fmt: skip
    step = Steps(progress, total + timings * (ROUNDS + 1))
    saved = Saved(plan.folder)
    book, *checked_books = (saved.book(loaded, t) for t in (text, *others))
    beside_books = [saved.book(other, text) for other in beside]
    if saved.found:
        note(f"{saved.found} of about {total} measurements were made before ({saved.path})")

    meter = Meter(model, text, step, book)
    trained, levels, gates = meter.trained, Levels(model, text), Gates(model, text, cap)
    sensitivities = search(meter, gates, cap, target.value if target.kind == "experts" else None)
    refine(target, meter, cap)
    points = list(meter.points.values())
    to_time = _points_to_time(points, trained)
    speeds = time_points(model, text, to_time, trained, ROUNDS, step) if by_speed else {}
    chosen = choose(target, points, trained, lambda p: speeds[p].relative if p in speeds else None)
    chosen = levels.within(target, meter, chosen)
    rows = _alpha_rows(meter, chosen, cap)
    contenders = [*([] if by_speed else to_time), chosen, *rows.values()]
    row_speeds = time_points(model, text, contenders, trained, ROUNDS, step) if plan.timed else {}

    measured = sorted(meter.points.values(), key=lambda p: p.experts_per_token)
    describe = _Describer(measured, trained, row_speeds | speeds)
    on_others = [
        _check(model, target, trained, chosen, other, step, kept)
        for other, kept in zip(others, checked_books, strict=True)
    ]
    curve = build_curve(
        measured,
        trained,
        chosen,
        cap,
        model.config.gate_experts,
        lambda p: levels.measure(meter, p),
        lambda found, describe_point: straighten(found, gates, meter, describe_point),
    )
    budget = chosen_budget(curve, chosen)
    apply(model, trained.setting)
    use_curve(model, curve, None)
    budgets = measure_budgets(
        own, loaded, trained.measured, text, cap, step, book, measured_at(curve, meter.points.values())
    )
    checked = [
        replace(check, budgets=measure_budgets(own, loaded, base, other, cap, step, kept))
        for (check, base), other, kept in zip(on_others, others, checked_books, strict=True)
    ]
    for name, other, kept in zip(names, beside, beside_books, strict=True):
        budgets += measure_budgets(name, other, None, text, step=step, book=kept)
    model.set_budget(budget)
    body = DialResults(
        target=target,
        asked=str(target),
        calibration=Calibration(text.name, text.tokens, len(text.rows_WS)),
        trained=PointResult(**describe(trained)),
        chosen=PointResult(**describe(chosen)),
        points=[PointResult(**describe(p)) for p in measured],
        table=[AlphaRow(alpha=a, **describe(p) | {"speed": row_speeds.get(p)}) for a, p in rows.items()],
        per_layer_gains=gains(measured),
        rule_gains={rule: gains(measured, rule) for rule in RULES},
        sensitivities=[SensitivityResult(s.base.setting.fields, s.layers) for s in sensitivities],
        certificates=certify(model, text),
        checks=checked,
        curve=curve,
        budget=budget,
        budgets=budgets,
        domains=increase_by_domain(chosen.measured, trained.measured),
    )
    return Result(loaded=loaded, body=body)


def _cap(asked: int | None, config: GrmoeConfig) -> int:
    """The most experts per token: as asked, or as trained."""
    limit = config.num_experts
    if asked is None:
        asked = min(config.num_experts_per_tok or 2, limit)
    checks.require(1 <= asked <= limit, f"cap must be from 1 to {limit}, the number of experts, got {asked}")
    checks.require(
        asked >= 2,
        f"cap must be at least 2, got {asked}: with one expert per token there is nothing to choose. Give --cap 2.",
    )
    return asked


def _check_reachable(experts: float, cap: int, config: GrmoeConfig) -> None:
    """A target above all settings would bound nothing, and who asks for more experts would get no more."""
    most = max(cap, config.num_experts_per_tok or config.num_experts)
    raising = f"; --cap raises it, up to {config.num_experts}" if most < config.num_experts else ""
    checks.require(
        experts <= most,
        f"target-experts must be at most {most}, the most experts per token of this search, got {experts:g}{raising}",
    )


def _points_to_time(points: list[Point], trained: Point) -> list[Point]:
    """The frontiers, thinned evenly, and every top-k."""
    best = dict.fromkeys([*frontier(dial_points(points)), *frontier(uniform_points(points))])
    ordered = _thinned(sorted(best, key=lambda p: p.experts_per_token), _MAX_TIMED)
    rules = (_thinned(frontier(rule_points(points, rule)), _MAX_RULE) for rule in RULES)
    return [*ordered, *top_k_points(points, trained), *(p for found in rules for p in found)]


def _thinned(points: list[Point], most: int) -> list[Point]:
    """At most this many, evenly, with both ends."""
    if len(points) <= most:
        return points
    return [points[i * (len(points) - 1) // (most - 1)] for i in range(most)]


def _alpha_rows(meter: Meter, chosen: Point, cap: int) -> dict[float, Point]:
    """What α does to the model with the chosen τ, or weight, and cap."""
    setting = chosen.setting
    rule = at_least if setting.selection == "at_least" else mass
    tau = setting.tau if setting.selection in ("at_least", "mass") else None
    settings = {alpha: rule((alpha,) * meter.layers, tau or _TABLE_TAU, cap) for alpha in ALPHAS}
    return {alpha: meter.measure(setting, "uniform") for alpha, setting in settings.items()}


def _check(
    model: GrmoeForCausalLM,
    target: Target,
    trained: Point,
    chosen: Point,
    text: Text,
    step: Callable[[str], None],
    book: Book | None = None,
) -> tuple[Check, Measurement]:
    """Measure both settings on another text. Returns the trained one's measurement too."""
    apply(model, trained.setting)
    meter = Meter(model, text, step, book)
    base = meter.trained.measured
    measured = meter.measure(chosen.setting, chosen.family).measured
    change = increase(measured, base)
    reached = {"perplexity": change.value, "experts": measured.experts_per_token}.get(target.kind)
    check = Check(
        text=text.name,
        tokens=text.tokens,
        perplexity_trained=base.perplexity,
        perplexity=measured.perplexity,
        experts_per_token=measured.experts_per_token,
        increase=change,
        missed_by=None if reached is None else reached - target.value,
    )
    return check, base


class _Describer:
    """Turns a point into the fields of a `PointResult`."""

    def __init__(self, points: list[Point], trained: Point, speeds: dict[Point, Speed]) -> None:
        self.trained, self.speeds = trained, speeds
        self.best = frontier(dial_points(points))
        self.best_uniform = frontier(uniform_points(points))
        self.best_of_rule = [p for rule in RULES for p in frontier(rule_points(points, rule))]
        self.best_of_all = frontier(points)

    def __call__(self, point: Point) -> dict[str, Any]:
        measured = point.measured
        return {
            "family": point.family,
            "name": str(point.setting),
            "setting": point.setting.fields,
            **{name: getattr(measured, name) for name in _FIGURES},
            "increase": increase(measured, self.trained.measured),
            "speed": self.speeds.get(point),
            "on_frontier": point in self.best,
            "on_uniform_frontier": point in self.best_uniform,
            "on_rule_frontier": point in self.best_of_rule,
            "best": point in self.best_of_all,
        }
