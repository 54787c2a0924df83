"""Benchmarks as pictures: bars of medians with the middle 80 % of the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grmoe.bench.measure import Kind, Result, Row
from grmoe.probe.timing import three_figures

INK = "#22303c"
COLORS: dict[Kind, str] = {"ours": "#1b6ca8", "peer": "#d1495b", "ceiling": "#9aa5b1"}


@contextmanager
def canvas(path: Path, rows: int, columns: int, height: float, title: str) -> Iterator[Any]:
    """A grid of axes that ends up in `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            rows, columns, figsize=(6.4 * columns, height * rows + 0.6), layout="constrained", squeeze=False
        )
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        yield axes
        figure.savefig(path, dpi=130)
        plt.close(figure)


def bars(results: list[Result], path: Path, title: str) -> Path:
    """One row of axes a shape, one column a mode; shorter is faster."""
    modes = list(dict.fromkeys(mode for r in results for row in r.rows for mode in row.times))
    most = max(len(result.rows) for result in results)
    with canvas(path, len(results), max(1, len(modes)), 0.9 + 0.26 * most, title) as axes:
        for line, result in zip(axes, results, strict=True):
            for ax, mode in zip(line, modes, strict=False):
                _bars(ax, [row for row in result.rows if mode in row.times], mode)
                ax.set_title(f"{result.shape}\n{mode}", loc="left", fontsize=9)
    return path


def _bars(ax: Any, rows: list[Row], mode: str) -> None:
    for y, row in enumerate(rows):
        times = row.times[mode]
        low, high = times.interval
        ax.barh(y, times.median, color=COLORS[row.kind], height=0.7)
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
