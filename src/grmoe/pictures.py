"""One look for all figures: colours, fonts, and a figure that is saved when it is drawn."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from grmoe.files import write_file

INK = "#22303c"
GREY = "#9aa5b1"
COLORS = ("#1b6ca8", "#d1495b", "#e07a1f", "#3a8f5c", "#7a5195", GREY)


def readable_range(values: Collection[float], needed: Collection[float]) -> tuple[float, float]:
    """The values that a scale shows, so that a few far above do not flatten the rest.

    low is the smallest value, q their third quartile or the largest `needed` value. Shown are all values up to
    low + 2·(q − low): three quarters of them fill at least half of the scale. What is above belongs on the upper edge.
    """
    ordered = sorted({*values, *needed})
    low, quartile = ordered[0], ordered[math.ceil(0.75 * len(ordered)) - 1]
    limit = low + 2 * (max(quartile, *needed) - low)
    return low, max(v for v in ordered if v <= limit)


@contextmanager
def picture(path: Path, width: float, height: float, font_size: float = 9) -> Iterator[Any]:
    """Yield an empty matplotlib figure (sizes in inches); save it as a PNG at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {
        "font.size": font_size,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": INK,
    }
    with plt.rc_context(style):
        figure = plt.figure(figsize=(width, height), layout="constrained")
        try:
            yield figure
            content = BytesIO()
            figure.savefig(content, dpi=130, format="png")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content.getbuffer())
        finally:
            plt.close(figure)


@contextmanager
def panels(path: Path, count: int) -> Iterator[list[Any]]:
    """Axes side by side with small titles."""
    with picture(path, 5.5 * count, 4.4) as figure:
        axes = list(figure.subplots(1, count, squeeze=False)[0])
        yield axes
        for ax in axes:
            ax.title.set_fontsize(9)


@contextmanager
def two_panels(path: Path) -> Iterator[tuple[Any, Any]]:
    """Two axes side by side with small titles."""
    with panels(path, 2) as (left, right):
        yield left, right
