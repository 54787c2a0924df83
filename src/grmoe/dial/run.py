"""`grmoe dial` from a model's folder to results: calibrate, search, time, choose, certify, check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from grmoe import checks
from grmoe.dial.certify import LayerCertificate, certify
from grmoe.dial.frontier import dial_points, frontier, top_k_points, uniform_points
from grmoe.dial.measure import Increase, Meter, Point, increase
from grmoe.dial.search import ALPHAS, Sensitivity, expected, search
from grmoe.dial.setting import apply, mass
from grmoe.dial.speed import ROUNDS, Speed, time_points
from grmoe.dial.target import REFINED, Target, choose, refine
from grmoe.dial.text import Text, default_tokens, read_text, window_length
from grmoe.model.configuration_grmoe import OWN_CHOICE
from grmoe.runs.open import LoadedModel, open_model

TABLE_TAU = 0.9  # of the table, where the chosen setting has no τ of its own
TIMED = 16  # points of the frontiers at most


@dataclass(frozen=True)
class Plan:
    """What to do; the defaults take less than a minute with `tiny` on a CPU."""

    target: Target
    text: str | None = None
    checks: Sequence[str] = ()
    tokens: int | None = None  # default: 8192, on a GPU 131072
    length: int | None = None  # default: the run's sequence length
    cap: int | None = None  # default: the trained number of experts
    checkpoint: str = "best"


@dataclass(frozen=True)
class Check:
    """The chosen setting on text it was not calibrated on."""

    text: str
    tokens: int
    trained: Point
    chosen: Point
    increase: Increase


@dataclass(frozen=True)
class Result:
    opened: LoadedModel
    target: Target
    text: Text
    trained: Point
    chosen: Point
    points: list[Point]
    speeds: dict[Point, Speed]
    table: list[tuple[float, Point]]  # α and what it does at the chosen τ and cap
    table_speeds: dict[Point, Speed]  # of the table, the trained and the chosen setting, timed together
    sensitivities: list[Sensitivity]
    certificates: list[LayerCertificate]
    checks: list[Check]


def run_dial(
    path: str | Path, plan: Plan, tick: Callable[[str, int], None] = lambda label, total: None
) -> Result:
    """tick: called after every measurement with what was measured and how many there are about to be."""
    opened = _open(path, plan)
    model = opened.model
    checks.require(
        model.config.router not in OWN_CHOICE,
        f"router {model.config.router!r} chooses its experts by itself: there is no dial to set",
    )
    length = plan.length or window_length(opened)
    tokens = plan.tokens or default_tokens(length, on_gpu=model.device.type == "cuda")
    # All text is read before anything is measured: a mistake in a name should not cost minutes.
    text = read_text(plan.text, opened, length, tokens)
    others = [read_text(source, opened, length, tokens) for source in plan.checks]
    cap = plan.cap or min(model.config.num_experts_per_tok or 2, model.config.num_experts)
    checks.require(
        cap <= model.config.num_experts, f"cap must be at most {model.config.num_experts}, got {cap}"
    )
    total = expected(len(model.config.moe_layers), cap) + REFINED + 2 * ROUNDS + 2 + 2 * len(others)

    def count(label: str) -> None:
        tick(label, total)

    meter = Meter(model, text, count)
    aim = plan.target.value if plan.target.kind == "experts" else None
    sensitivities = search(meter, cap, aim)
    refine(plan.target, meter)
    points = list(meter.points.values())
    worth = _worth_timing(points, meter.trained)

    def timed(contenders: list[Point]) -> dict[Point, Speed]:
        return time_points(model, text, contenders, meter.trained, tick=count)

    # A speed has to be measured before it can be asked for; otherwise everything is timed in the same minutes.
    speeds = timed(worth) if plan.target.kind == "throughput" else {}
    relative = {point: speed.relative for point, speed in speeds.items()}
    chosen = choose(plan.target, points, meter.trained, relative.get)
    table = _table(meter, chosen, cap)
    table_speeds = timed([*([] if speeds else worth), chosen, *(point for _, point in table)])
    return Result(
        opened,
        plan.target,
        text,
        meter.trained,
        chosen,
        list(meter.points.values()),
        speeds or table_speeds,
        table,
        table_speeds,
        sensitivities,
        certify(model, chosen.setting, text),
        [_check(meter, chosen, other, count) for other in others],
    )


def _open(path: str | Path, plan: Plan) -> LoadedModel:
    opened = open_model(path, plan.checkpoint)
    # A run is saved in fp32 and served in bf16; on a GPU its speed in fp32 would be nobody's.
    if opened.step is not None and opened.model.device.type == "cuda":
        torch.nn.Module.to(opened.model, torch.bfloat16)
    return opened


def _worth_timing(points: list[Point], trained: Point) -> list[Point]:
    """The frontiers of all families, thinned evenly, and every top-k."""
    best = dict.fromkeys([*frontier(dial_points(points)), *frontier(uniform_points(points))])
    ordered = sorted(best, key=lambda p: p.experts)
    if len(ordered) > TIMED:
        ordered = [ordered[i * (len(ordered) - 1) // (TIMED - 1)] for i in range(TIMED)]
    return [*ordered, *top_k_points(points, trained)]


def _table(meter: Meter, chosen: Point, cap: int) -> list[tuple[float, Point]]:
    """What `set_alpha` does to the model as it would be written: one α, the chosen τ and cap."""
    tau = chosen.setting.tau if chosen.setting.selection == "mass" else None
    return [
        (alpha, meter.measure(mass((alpha,) * meter.layers, tau or TABLE_TAU, cap), "uniform"))
        for alpha in ALPHAS
    ]


def _check(meter: Meter, chosen: Point, text: Text, tick: Callable[[str], None]) -> Check:
    model = meter.model
    apply(model, meter.trained.setting)
    other = Meter(model, text, tick)
    point = other.measure(chosen.setting, chosen.family)
    return Check(text.name, text.tokens, other.trained, point, increase(point, other.trained))
