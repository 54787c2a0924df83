"""Perplexity against the number of experts for every method, and all methods at the final number on every text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grmoe.pictures import COLORS, GREY, INK, two_panels
from grmoe.prune.choose import RANDOM
from grmoe.prune.results import PruneResults, Result
from grmoe.prune.tables import text_names

FIGURE = "prune.png"
_METHOD_COLORS = (*COLORS[:5], INK, "#c9a227", "#2a9d8f")  # grey is for random draws
MARKS = dict(zip(RANDOM, "x+", strict=True))


def draw(result: Result, path: Path) -> Path:
    """Write the picture."""
    with two_panels(path) as (left, right):
        _counts(left, result.body)
        _texts(right, result.body)
        for ax in (left, right):
            ax.axhline(0, color=INK, lw=0.8)
            ax.set_ylabel("perplexity increase, %")
        left.legend(frameon=False, fontsize=8)
    return path


def _names(body: PruneResults) -> list[str]:
    return list(dict.fromkeys(o.method for o in body.outcomes if o.draw is None))


def _counts(ax: Any, body: PruneResults) -> None:
    colors = dict.fromkeys(RANDOM, GREY) | dict(zip(_names(body), _METHOD_COLORS, strict=False))
    for name, color in colors.items():
        outcomes = [o for o in body.outcomes if o.method == name]
        x, y = [o.experts for o in outcomes], [100 * o.texts[0].increase.value for o in outcomes]
        if name in RANDOM:
            ax.plot(x, y, MARKS[name], color=color, ms=5, label=f"{name}, each draw")
        else:
            ax.plot([body.trained_experts, *x], [0, *y], "o-", color=color, ms=4, lw=1.2, label=name)
    counts = sorted({body.trained_experts, *(o.experts for o in body.outcomes)})
    ax.set(title="Calibration text", xlabel="experts in every layer", xticks=counts)
    ax.invert_xaxis()


def _texts(ax: Any, body: PruneResults) -> None:
    """Each text in its place, methods side by side with the interval over windows."""
    names = [*_names(body), *RANDOM]
    step = 0.8 / len(names)
    for place in range(len(body.texts)):
        for i, name in enumerate(names):
            x = place - 0.4 + i * step
            increases = [o.texts[place].increase for o in body.final if o.method == name]
            values = [100 * g.value for g in increases]
            if name in RANDOM:
                ax.plot([x] * len(values), values, MARKS[name], color=GREY, ms=5)
            else:
                color = _METHOD_COLORS[i]
                ax.plot([x, x], [100 * increases[0].low, 100 * increases[0].high], color=color, lw=1)
                ax.plot(x, values[0], "o", color=color, ms=4)
    ax.set(title=f"{body.experts} experts (bars: 90 % over windows)", xticks=range(len(body.texts)))
    ax.set_xticklabels(text_names(body))
