"""The Pareto picture: perplexity against experts per token, and against measured tokens/s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grmoe.dial.frontier import dial_points, frontier, top_k_points, uniform_points
from grmoe.dial.measure import Point
from grmoe.dial.run import Result
from grmoe.train.curves import COLORS, INK

FIGURE = "pareto.png"


@contextmanager
def two_panels(path: Path) -> Iterator[tuple[Any, Any]]:
    """Axes beside each other, to draw on; saved at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
        yield left, right
        for ax in (left, right):
            ax.title.set_fontsize(9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def draw(result: Result, path: Path) -> Path:
    with two_panels(path) as (left, right):
        _experts(left, result)
        _speed(right, result)
        left.set(
            title="perplexity against experts a token (line: the best with at most so many)",
            xlabel="experts a token",
        )
        machine = "GPU" if result.opened.model.device.type == "cuda" else "CPU"
        right.set(title=f"the same against measured prefill, {machine} (bar: middle 80 %)", xlabel="tokens/s")
        left.set_ylabel("perplexity, calibration text")
        low, high = _range(result)
        for ax in (left, right):
            ax.set_ylim(low - 0.08 * (high - low), high + 0.12 * (high - low))
        left.legend(frameon=False)
    return path


def _families(result: Result) -> dict[str, list[Point]]:
    return {
        "one α for all": frontier(uniform_points(result.points)),
        "one α per layer allowed": frontier(dial_points(result.points)),
        "top-k": sorted(top_k_points(result.points, result.trained), key=lambda p: p.experts),
    }


def _range(result: Result) -> tuple[float, float]:
    """Of what somebody might choose: a top-1 that is far worse must not flatten it."""
    families = _families(result)
    reached = [p.perplexity for p in families.pop("one α for all")] + [result.chosen.perplexity]
    low, high = min(reached), max(reached)
    others = [p.perplexity for points in families.values() for p in points]
    return low, max(p for p in (*reached, *others) if p <= low + 1.5 * (high - low))


def _experts(ax: Any, result: Result) -> None:
    for color, family in ((COLORS[0], "uniform"), (COLORS[1], "per layer")):
        every = [p for p in result.points if p.family == family]
        ax.plot([p.experts for p in every], [p.perplexity for p in every], ".", color=color, ms=3, alpha=0.35)
    for (name, points), color, mark in zip(_families(result).items(), COLORS, "os^", strict=False):
        # Between two k there is nothing.
        line = {"color": color, "marker": mark, "ms": 4, "lw": 0 if name == "top-k" else 1.2}
        ax.plot(
            [p.experts for p in points],
            [p.perplexity for p in points],
            label=name,
            drawstyle="steps-post",
            **line,
        )
    _mark(ax, result.chosen.experts, result.chosen.perplexity)


def _speed(ax: Any, result: Result) -> None:
    for (_, points), color, mark in zip(_families(result).items(), COLORS, ("o", "s", "^"), strict=False):
        for point in points:
            speed = result.speeds.get(point)
            if speed is not None:
                ax.plot(speed.interval, [point.perplexity] * 2, color=color, lw=0.8, alpha=0.5)
                ax.plot(speed.tokens_per_second, point.perplexity, mark, color=color, ms=4)
    _mark(ax, result.speeds[result.chosen].tokens_per_second, result.chosen.perplexity)


def _mark(ax: Any, x: float, y: float) -> None:
    ax.plot(x, y, "o", mfc="none", mec=INK, ms=13, mew=1.5, label="chosen")
