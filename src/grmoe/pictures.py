"""One look for all figures: colours, fonts, and a figure that is saved when it is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK = "#22303c"
GREY = "#9aa5b1"
COLORS = ("#1b6ca8", "#d1495b", "#e07a1f", "#3a8f5c", "#7a5195", GREY)


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
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=130)
        finally:
            plt.close(figure)


@contextmanager
def two_panels(path: Path) -> Iterator[tuple[Any, Any]]:
    """Two axes side by side with small titles."""
    with picture(path, 11, 4.4) as figure:
        left, right = figure.subplots(1, 2)
        yield left, right
        for ax in (left, right):
            ax.title.set_fontsize(9)
