"""The Pareto picture: perplexity against experts per token, and against tokens/s where they were measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grmoe.dial.beside import BudgetRow
from grmoe.dial.results import DialResults, PointResult, Result
from grmoe.pictures import COLORS, GREY, INK, panels, readable_range

FIGURE = "pareto.png"
MARKS = "os^vP"


def draw(result: Result, path: Path) -> Path:
    """Write the picture."""
    body = result.body
    with panels(path, 2 if body.timed else 1) as axes:
        left, *others = axes
        _experts(left, body)
        left.set(title="Perplexity against experts per token (lines: frontiers)", xlabel="experts per token")
        left.set_ylabel("perplexity, calibration text")
        low, high = _range(body)
        room = high - low or 1.0
        for ax in axes:
            ax.set_ylim(low - 0.08 * room, high + 0.12 * room)
        above = [p for p in _drawn(body) if p.perplexity > high]
        _mark_above(left, {(p.experts_per_token, p.perplexity) for p in above})
        for right in others:
            _speed(right, body, "GPU" if result.loaded.model.device.type == "cuda" else "CPU")
            _mark_above(
                right, {(p.speed.tokens_per_second, p.perplexity) for p in above if p.speed is not None}
            )
        # Below the axes: a frontier may run anywhere between them.
        left.legend(frameon=False, ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    return path


def _range(body: DialResults) -> tuple[float, float]:
    """Perplexities to show: the settings drawn, except those far above the rest, and the models compared.

    The limit asked for is shown too: beside it, differences within noise look as small as they are.
    """
    needed = [body.trained.perplexity, body.chosen.perplexity]
    low, high = readable_range([p.perplexity for p in _drawn(body)], needed)
    compared = [row.perplexity for row in body.budgets]
    return min(low, *compared, high), max(high, *compared, _limit(body) or high)


def _drawn(body: DialResults) -> list[PointResult]:
    return [p for points in body.families.values() for p in points]


def _mark_above(ax: Any, points: set[tuple[float, float]]) -> None:
    """Settings above the scale: an arrow on the upper edge, with the perplexity."""
    edge = ax.get_xaxis_transform()  # x in data, y in shares of the panel
    middle = sum(ax.get_xlim()) / 2
    for row, (x, y) in enumerate(sorted(points)):
        ax.plot(x, 1, "^", color=INK, ms=5, transform=edge, clip_on=False)
        side = 8 if x < middle else -8
        ax.annotate(
            f"{y:.4g}", (x, 1), xycoords=edge, xytext=(side, -4 - 10 * row), textcoords="offset points",
            fontsize=8, ha="left" if side > 0 else "right", va="center",
        )  # fmt: skip


def _experts(ax: Any, body: DialResults) -> None:
    for color, family in zip(COLORS, ("uniform", "per layer"), strict=False):
        every = [p for p in body.points if p.family == family]
        x, y = [p.experts_per_token for p in every], [p.perplexity for p in every]
        ax.plot(x, y, ".", color=color, ms=3, alpha=0.35)
    for (name, points), color, mark in zip(body.families.items(), COLORS, MARKS, strict=False):
        x, y = [p.experts_per_token for p in points], [p.perplexity for p in points]
        width = 0 if name in ("top-k", "k per layer") else 1.2  # there is nothing between two k
        ax.plot(x, y, mark + "-", color=color, ms=4, lw=width, label=name, drawstyle="steps-post")
    compared = _by_model(body) if len(_by_model(body)) > 1 else {}
    for (name, rows), color in zip(compared.items(), (INK, *COLORS[len(body.families) :]), strict=False):
        x, y = [row.experts_per_token for row in rows], [row.perplexity for row in rows]
        ax.plot(x, y, "D--", color=color, ms=4, lw=1.2, label=f"{name}, by budget")
    if limit := _limit(body):
        ax.axhline(limit, color=GREY, lw=0.8, ls=":")
        ax.annotate(
            f"+{100 * body.target.value:g} %", (1, limit), xycoords=("axes fraction", "data"), color=GREY,
            ha="right", va="bottom",
        )  # fmt: skip
    _ring(ax, body.chosen.experts_per_token, body.chosen.perplexity)


def _by_model(body: DialResults) -> dict[str, list[BudgetRow]]:
    """This model at its budgets, then the models it was compared with."""
    names = dict.fromkeys(row.model for row in body.budgets)
    return {name: [row for row in body.budgets if row.model == name] for name in names}


def _limit(body: DialResults) -> float | None:
    """The highest perplexity that was asked for."""
    return body.trained.perplexity * (1 + body.target.value) if body.target.kind == "perplexity" else None


def _speed(ax: Any, body: DialResults, machine: str) -> None:
    for points, color, mark in zip(body.families.values(), COLORS, MARKS, strict=False):
        for point in points:
            if point.speed is not None:
                ax.plot(point.speed.interval, [point.perplexity] * 2, color=color, lw=0.8, alpha=0.5)
                ax.plot(point.speed.tokens_per_second, point.perplexity, mark, color=color, ms=4)
    assert body.chosen.speed is not None  # in a dial with speeds, the chosen setting is timed
    ax.set_title(f"The same against measured prefill, {machine}, {body.chosen.speed.how} (bars: middle 80 %)")
    ax.set_xlabel("tokens/s")
    _ring(ax, body.chosen.speed.tokens_per_second, body.chosen.perplexity)


def _ring(ax: Any, x: float, y: float) -> None:
    ax.plot(x, y, "o", mfc="none", mec=INK, ms=13, mew=1.5, label="chosen")
