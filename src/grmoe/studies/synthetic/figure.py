"""The figure of the synthetic study: accuracy, load, the dial, and the learned subspaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grmoe.pictures import COLORS, GREY, INK, picture
from grmoe.studies.synthetic.evaluation import SeedScore
from grmoe.studies.synthetic.results import MethodResult, SettingResult
from grmoe.studies.synthetic.tables import Row, caption

OURS, RIVAL, RIVAL_DIAL = COLORS[:3]
_OTHERS = GREY


def draw(result: SettingResult, path: Path) -> Path:
    """One PNG per setting."""
    # A line of text per method, in each of two rows of panels.
    height = max(8.6, 3 + 0.44 * len(result.methods))
    with picture(path, 14.5, height, font_size=10) as figure:
        grid = figure.add_gridspec(2, 2, width_ratios=[1.25, 1], height_ratios=[1, 1])
        _accuracy(figure.add_subplot(grid[0, 0]), result)
        dialed = [
            m for m in map(result.find, ("grmoe", "softmax_top1")) if m is not None and m.dial is not None
        ]
        for row, method in enumerate(dialed):
            draw_dial(figure.add_subplot(grid[row, 1]), method)
        lower = grid[1, 0].subgridspec(1, 2, width_ratios=[1.2, 1])
        _load(figure.add_subplot(lower[0]), result)
        _recovery(figure, figure.add_subplot(lower[1]), result)
        title = f"Synthetic routing task, {len(result.methods[0].scores)} seeds per method\n{caption(result)}"
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return path


def _color(method: MethodResult) -> str:
    return OURS if method.method.startswith("grmoe") else _OTHERS


def _strip(axes: Any, result: SettingResult, value: Callable[[SeedScore], float]) -> None:
    """A row of dots per method, one dot per seed, a bar at the mean."""
    for row, method in enumerate(result.methods):
        values = [value(s) for s in method.scores]
        spread = [row + 0.28 * math.sin(2.4 * i) for i in range(len(values))]  # fixed jitter: always the same
        axes.scatter(values, spread, s=12, color=_color(method), alpha=0.45, linewidths=0)
        mean = sum(values) / len(values)
        axes.plot([mean, mean], [row - 0.38, row + 0.38], color=INK, lw=1.8)
    axes.set_yticks(range(len(result.methods)), [m.title for m in result.methods])
    axes.invert_yaxis()
    axes.grid(axis="x", color="#e6e9ec", zorder=0)
    axes.set_axisbelow(True)


def _accuracy(axes: Any, result: SettingResult) -> None:
    _strip(axes, result, lambda s: 100 * s.accuracy)
    oracle = 100 * result.methods[0].oracle_accuracy
    axes.axvline(oracle, color=RIVAL, lw=1.2)
    axes.text(oracle - 0.6, -0.75, "Bayes classifier", color=RIVAL, fontsize=9, ha="right", va="center")
    axes.axvline(100 / result.num_experts, color=_OTHERS, lw=1, ls=":")
    axes.set_xlim(0, 103)
    axes.set_xlabel("tokens sent to the right expert, % (dotted: chance)")
    axes.set_title("Who finds the classes? Trained on the task loss only", loc="left", fontsize=11)


def _load(axes: Any, result: SettingResult) -> None:
    N = result.num_experts
    _strip(axes, result, lambda s: 100 * s.least_share(N))
    axes.axvspan(-4, 10, color=RIVAL, alpha=0.12, lw=0)
    for row, method in enumerate(result.methods):
        stats = Row.of(method, N)
        starved = stats.leading_collapsed if stats.dense else stats.collapsed
        if starved:
            text = f"{starved}/{stats.seeds} {'without a lead' if stats.dense else 'collapsed'}"
            axes.text(28, row, text, color=RIVAL, fontsize=8, va="center")
    axes.set_xlim(-4, None)
    received = "tokens the least used expert receives (vMF, GrMoE: leads)"
    axes.set_xlabel(f"{received},\n% of the fair share (red: < 10 %)")
    axes.set_title("Is an expert starving?", loc="left", fontsize=11)


def draw_dial(axes: Any, method: MethodResult) -> None:
    """Entropy of every seed along the dial, between its certificates."""
    ours, dial = method.method.startswith("grmoe"), method.dial
    assert dial is not None
    color = OURS if ours else RIVAL_DIAL
    alphas, entropy_AS = dial.alphas, dial.entropy_AS
    band = {"color": color, "alpha": 0.15, "lw": 0, "label": "certified band, mean over tokens"}
    axes.fill_between(alphas, dial.lower, dial.upper, **band)
    for seed in zip(*entropy_AS, strict=True):
        axes.plot(alphas, seed, color=color, alpha=0.3, lw=0.7)
    mean = [sum(row) / len(row) for row in entropy_AS]
    axes.plot(alphas, mean, color=color, lw=2.4, label="entropy (thin: seeds)")
    paper = [max(0.0, v) for v in dial.paper_lower]
    axes.plot(alphas, paper, color=INK, lw=1.1, ls="--", label="the paper's lower bound")
    axes.axvline(1, color=_OTHERS, lw=1, ls=":")
    at_top = {"va": "top", "transform": axes.get_xaxis_transform()}
    axes.text(1.05, 0.99, "trained here", color=INK, fontsize=8.5, **at_top)
    axes.set_xscale("log", base=2)
    axes.set_xlim(alphas[0], alphas[-1])
    axes.set_ylim(0, None)
    axes.set_xticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16], ["⅛", "¼", "½", "1", "2", "4", "8", "16"])
    axes.set_xlabel(f"{'the dial α' if ours else 'α = 1/temperature'}, turned after training")
    axes.set_ylabel("routing entropy, nats")
    sharp = mean[len(mean) // 2] < mean[0] / 2  # then the curve leaves the right half of the panel free
    axes.legend(frameon=False, loc="center right" if sharp else "lower left", fontsize=8.5)
    what = "GrMoE" if method.method == "grmoe" else f"{method.title} gate"
    title = f"{what}: entropy falls in {dial.falling_seeds()}/{len(method.scores)} seeds"
    axes.set_title(title, loc="left", fontsize=11)


def _recovery(figure: Any, axes: Any, result: SettingResult) -> None:
    found = next((m for m in result.methods if m.recovery is not None), None)
    if found is None or found.recovery is None:
        axes.axis("off")
        return
    image = axes.imshow(found.recovery, vmin=0, vmax=1, cmap="Blues")
    ticks = range(len(found.recovery))
    axes.set_xticks(ticks, [str(i + 1) for i in ticks])
    axes.set_yticks(ticks, [str(i + 1) for i in ticks])
    axes.spines[:].set_visible(False)
    axes.set_xlabel("true class subspace")
    axes.set_ylabel("learned expert subspace")
    axes.set_title(f"{found.title}, one seed", loc="left", fontsize=11)
    figure.colorbar(image, ax=axes, orientation="horizontal", label="overlap ‖UᵀV‖² / k")
