"""Benchmarks as figures: bars of medians with the middle 80 % of the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grmoe.bench.measure import Kind, Result, Row
from grmoe.pictures import COLORS, GREY, INK, picture
from grmoe.probe.timing import three_figures

BY_KIND: dict[Kind, str] = {"ours": COLORS[0], "peer": COLORS[1], "ceiling": GREY}


@contextmanager
def canvas(path: Path, rows: int, columns: int, height: float, title: str) -> Iterator[Any]:
    """A grid of axes, each `height` inches high, under a common title."""
    with picture(path, 6.4 * columns, height * rows + 0.6) as figure:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        yield figure.subplots(rows, columns, squeeze=False)


def bars(results: list[Result], path: Path, title: str) -> Path:
    """One row of axes per shape, one column per mode. Shorter is faster."""
    modes = list(dict.fromkeys(mode for r in results for row in r.rows for mode in row.times))
    rows = max(len(result.rows) for result in results)
    with canvas(path, len(results), max(1, len(modes)), 0.9 + 0.26 * rows, title) as axes:
        for line, result in zip(axes, results, strict=True):
            for ax, mode in zip(line, modes, strict=False):
                _bars(ax, [row for row in result.rows if mode in row.times], mode)
                ax.set_title(f"{result.shape}\n{mode}", loc="left", fontsize=9)
    return path


def _bars(ax: Any, rows: list[Row], mode: str) -> None:
    for y, row in enumerate(rows):
        times = row.times[mode]
        low, high = times.interval
        ax.barh(y, times.median, color=BY_KIND[row.kind], height=0.7)
        ax.plot([low, high], [y, y], color=INK, lw=1.5)
        ax.text(max(times.median, high), y, f" {three_figures(times.median)}", va="center", fontsize=8)
    ax.set_yticks(range(len(rows)), [row.name for row in rows])
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.margins(x=0.12)
    ax.set_xlabel("ms")


def curve(
    ax: Any, x: list[float], rows: list[Row], mode: str, color: str, fit: Callable[[float], float] | None
) -> None:
    """Medians over x with their spread, and a fitted line."""
    times = [row.times[mode] for row in rows]
    low, high = zip(*(t.interval for t in times), strict=True)
    ax.vlines(x, low, high, color=color, lw=1.5)
    ax.plot(x, [t.median for t in times], "o", color=color, ms=4, label=mode)
    if fit is not None:
        ax.plot(x, [fit(value) for value in x], color=color, lw=1)
