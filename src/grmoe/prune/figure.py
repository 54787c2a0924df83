"""Perplexity against the number of experts, every method; at the final number on every text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grmoe.dial.figure import two_panels
from grmoe.dial.measure import increase
from grmoe.prune.choose import RANDOM
from grmoe.prune.report import draws
from grmoe.prune.run import Result
from grmoe.train.curves import COLORS, INK

FIGURE = "prune.png"


def draw(result: Result, path: Path) -> Path:
    with two_panels(path) as (left, right):
        _counts(left, result)
        _texts(right, result)
        for ax in (left, right):
            ax.axhline(0, color=INK, lw=0.8)
            ax.set_ylabel("perplexity increase, %")
        left.legend(frameon=False, fontsize=8)
    return path


def _names(result: Result) -> list[str]:
    return list(dict.fromkeys(o.method for o in result.outcomes if o.draw is None))


def _counts(ax: Any, result: Result) -> None:
    had = result.opened.model.config.num_experts
    counts = sorted({o.experts for o in result.outcomes}, reverse=True)
    for kind, mark in zip(RANDOM, ("x", "+"), strict=True):
        own = [o for o in result.outcomes if o.method == kind]
        grown = [100 * increase(o.point, result.trained).value for o in own]
        ax.plot([o.experts for o in own], grown, mark, color="#9aa5b1", ms=5, label=f"{kind}, each draw")
    for name, color in zip(_names(result), COLORS, strict=False):
        own = [o for o in result.outcomes if o.method == name]
        grown = [100 * increase(o.point, result.trained).value for o in own]
        ax.plot([had, *(o.experts for o in own)], [0, *grown], "o-", color=color, ms=4, lw=1.2, label=name)
    ax.set(title="calibration text", xlabel="experts in every layer", xticks=[had, *counts])
    ax.invert_xaxis()


def _texts(ax: Any, result: Result) -> None:
    """At the final number: each text in its place, methods side by side with the band of their windows."""
    texts: list[int | None] = [None, *range(len(result.others))]
    bases = [result.trained, *result.trained_checks]
    names = _names(result)
    step = 0.8 / (len(names) + len(RANDOM))
    for place, (text, base) in enumerate(zip(texts, bases, strict=True)):
        for i, (name, color) in enumerate(zip(names, COLORS, strict=False)):
            outcome = next(o for o in result.final if o.method == name)
            point = outcome.point if text is None else outcome.checks[text]
            grown = increase(point, base)
            x = place - 0.4 + i * step
            ax.plot([x, x], [100 * grown.low, 100 * grown.high], color=color, lw=1)
            ax.plot(x, 100 * grown.value, "o", color=color, ms=4)
        for i, (kind, mark) in enumerate(zip(RANDOM, ("x", "+"), strict=True)):
            points = draws(result, kind, text)
            x = place - 0.4 + (len(names) + i) * step
            values = [100 * increase(p, base).value for p in points]
            ax.plot([x] * len(values), values, mark, color="#9aa5b1", ms=5)
    labels = ["calibration", *(Path(other.name).name for other in result.others)]
    ax.set(title=f"{result.experts} experts (bars: 90 % over windows)", xticks=range(len(texts)))
    ax.set_xticklabels(labels)
