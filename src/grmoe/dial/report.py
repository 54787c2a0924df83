"""Results in words, tables and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from grmoe import __version__
from grmoe.dial.frontier import dial_points, frontier, gains, top_k_points, uniform_points
from grmoe.dial.measure import Point, increase
from grmoe.dial.run import Check, Result
from grmoe.dial.setting import show_alphas
from grmoe.dial.target import Target

RESULTS = "results.json"


def summary(result: Result) -> list[str]:
    """The chosen point in a few lines."""
    chosen, trained = result.chosen, result.trained
    cost, speed = increase(chosen, trained), result.speeds[chosen]
    lines = [
        f"Asked:  {result.target}",
        f"Chosen: {chosen.family}: {chosen.setting}",
        f"        {chosen.experts:.3f} experts a token (trained {trained.experts:.3f}), perplexity "
        f"{chosen.perplexity:.3f} (trained {trained.perplexity:.3f}): {_percent(cost.value)}, "
        f"90 % interval {_percent(cost.low)} to {_percent(cost.high)}",
        f"        {speed.relative:.2f} times the trained speed (middle 80 %: {_span(speed.relative_interval)}), "
        f"{speed.tokens_per_second:,.0f} tokens/s",
    ]
    lines.append(per_layer(gains(result.points)))
    return lines + [verdict(result.target, check) for check in result.checks]


def per_layer(rows: list[dict[str, float]]) -> str:
    """Where one α per layer beats one α for all: the points whose gain exceeds their noise, and the best of these."""
    better = [row for row in rows if row["gain"] > row["error"]]
    if not better:
        return "        one α per layer: nowhere better than one α for all by more than its noise"
    best = max(better, key=lambda row: row["gain"])
    return (
        f"        one α per layer: lower loss at {len(better)} of {len(rows)} points of the uniform frontier by more "
        f"than its noise, at most {best['gain']:.4f} ± {best['error']:.4f} nats at {best['experts']:.2f} experts"
    )


def verdict(target: Target, check: Check) -> str:
    """Whether the promise held on text it was not made on, or by how much it missed."""
    grown = check.increase
    facts = (
        f"Check:  {check.text} ({check.tokens:,} tokens): {check.chosen.experts:.3f} experts a token, perplexity "
        f"{check.trained.perplexity:.3f} → {check.chosen.perplexity:.3f}, {_percent(grown.value)} "
        f"({_percent(grown.low)} to {_percent(grown.high)})"
    )
    missed = miss(target, check)
    if missed is None:
        return facts
    if missed <= 0:
        sure = target.kind != "perplexity" or grown.high <= target.value
        return f"{facts}: kept" + ("" if sure else ", but the interval reaches past the limit")
    if target.kind == "experts":
        return f"{facts}: missed by {missed:.3f} experts"
    doubt = ", within its noise" if grown.low <= target.value else ""
    return f"{facts}: missed by {100 * missed:.2f} points{doubt}"


def miss(target: Target, check: Check) -> float | None:
    """How far past its target a check is, ≤ 0 where it was kept; None for a speed, which is no matter of text."""
    if target.kind == "perplexity":
        return check.increase.value - target.value
    return check.chosen.experts - target.value if target.kind == "experts" else None


def alpha_table(result: Result) -> Table:
    """The paper's table: what α does, at the chosen τ and cap."""
    setting = result.table[0][1].setting
    title = f"One α for all layers, mass {setting.tau:g}, cap {setting.cap}"
    table = Table("α", title=title, title_justify="left")
    for heading in ("exp(H)", "1/Σg²", "experts computed", "perplexity", "relative throughput", "tokens/s"):
        table.add_column(heading, justify="right")
    trained = ("trained", result.trained)
    for name, point in [
        trained,
        *((f"{alpha:g}", p) for alpha, p in result.table),
        ("chosen", result.chosen),
    ]:
        speed = result.table_speeds[point]
        table.add_row(
            name,
            f"{point.effective_entropy:.2f}",
            f"{point.effective_inverse:.2f}",
            f"{point.experts:.3f}",
            f"{point.perplexity:.3f}",
            f"{speed.relative:.2f} ({_span(speed.relative_interval)})",
            f"{speed.tokens_per_second:,.0f}",
        )
    return table


def frontier_table(result: Result) -> Table:
    """The lower envelopes as far as they were timed, and plain top-k; results.json has everything."""
    title = "Lower envelopes on the calibration text"
    table = Table("family", "α", "selection", title=title, title_justify="left")
    for heading in ("experts a token", "perplexity", "increase", "relative throughput"):
        table.add_column(heading, justify="right")
    families = {
        "top-k": top_k_points(result.points, result.trained),
        "uniform": frontier(uniform_points(result.points)),
        "per layer or uniform": frontier(dial_points(result.points)),
    }
    for name, points in families.items():
        for point in sorted(points, key=lambda p: p.experts):
            setting, speed = point.setting, result.speeds.get(point)
            if speed is None:
                continue
            how = f"top-{setting.cap}" if setting.tau is None else f"{setting.selection} {setting.tau:.3g}"
            table.add_row(
                name + (" ←" if point is result.chosen else ""),
                show_alphas(setting.alphas),
                "dense" if setting.selection == "dense" else how,
                f"{point.experts:.3f}",
                f"{point.perplexity:.3f}",
                _percent(increase(point, result.trained).value),
                f"{speed.relative:.2f} ({_span(speed.relative_interval)})",
            )
        table.add_section()
    return table


def certificate_table(result: Result) -> Table:
    tokens = result.certificates[0].tokens
    title = (
        f"Certificates of the chosen setting, {tokens} calibration tokens, against all experts at the same α"
    )
    table = Table("block", title=title, title_justify="left")
    headings = (
        "dropped mass",
        "at most",
        "entropy within",
        "entropy",
        "‖ŷ‖",
        "error",
        "bound",
        "bound / error",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for c in result.certificates:
        table.add_row(
            str(c.layer),
            f"{c.dropped_mean:.3f}",
            f"{c.dropped_max:.3f}",
            f"{c.entropy_lower:.2f} to {c.entropy_upper:.2f}",
            f"{c.entropy:.2f}",
            f"{c.output:.3g}",
            f"{c.exact:.3g}",
            f"{c.bound:.3g}" if c.holds else "∞ for some",
            f"{c.looseness:,.0f}",
        )
    return table


def as_json(result: Result) -> dict[str, Any]:
    device = result.opened.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    envelope = {id(p) for p in frontier(dial_points(result.points))}
    uniform = {id(p) for p in frontier(uniform_points(result.points))}
    return {
        "grmoe": __version__,
        "model": str(result.opened.path),
        "step": result.opened.step,
        "device": name,
        "dtype": str(result.opened.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "target": asdict(result.target),
        "asked": str(result.target),
        "calibration": {
            "text": result.text.name,
            "tokens": result.text.tokens,
            "windows": len(result.text.rows_WS),
        },
        "trained": _point(result, result.trained),
        "chosen": _point(result, result.chosen),
        "points": [
            _point(result, p) | {"on_frontier": id(p) in envelope, "on_uniform_frontier": id(p) in uniform}
            for p in sorted(result.points, key=lambda p: p.experts)
        ],
        "table": [
            {"alpha": alpha} | _point(result, p) | {"speed": asdict(result.table_speeds[p])}
            for alpha, p in result.table
        ],
        "per_layer_gains": gains(result.points),
        "sensitivities": [
            {"base": s.base.setting.fields, "layers": [[asdict(o) for o in options] for options in s.layers]}
            for s in result.sensitivities
        ],
        "certificates": [asdict(c) | {"looseness": c.looseness} for c in result.certificates],
        "checks": [
            {
                "text": c.text,
                "tokens": c.tokens,
                "perplexity_trained": c.trained.perplexity,
                "perplexity": c.chosen.perplexity,
                "experts": c.chosen.experts,
                "increase": asdict(c.increase),
                "missed_by": miss(result.target, c),
            }
            for c in result.checks
        ],
    }


def write_results(result: Result, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / RESULTS
    path.write_text(json.dumps(as_json(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _point(result: Result, point: Point) -> dict[str, Any]:
    speed = result.speeds.get(point)
    return {
        "family": point.family,
        "setting": point.setting.fields,
        "loss": point.loss,
        "perplexity": point.perplexity,
        "increase": asdict(increase(point, result.trained)),
        "experts": point.experts,
        "layer_experts": list(point.layer_experts),
        "entropy": point.entropy,
        "effective_experts_entropy": point.effective_entropy,
        "effective_experts_inverse": point.effective_inverse,
        "speed": None if speed is None else asdict(speed),
    }


def _percent(value: float) -> str:
    return f"{100 * value:+.2f} %"


def _span(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.2f} to {interval[1]:.2f}"
