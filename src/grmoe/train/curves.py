"""Training as a picture: loss, load and entropy over steps, one run or several over each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from grmoe.data import TokenDataset, unigram_perplexity
from grmoe.runs.folder import read_log, saved_config

INK = "#22303c"
COLORS = ("#1b6ca8", "#d1495b", "#e07a1f", "#3a8f5c", "#7a5195", "#9aa5b1")


def draw_curves(runs: list[Path], path: Path, unigram: float | None = None) -> Path:
    """One PNG: loss with validation, load of the experts, entropy. `unigram`: the perplexity to beat."""
    named = _named(runs)
    logs = {name: read_log(run) for name, run in named.items()}
    if missing := [str(run) for name, run in named.items() if not logs[name]]:
        raise ValueError(f"no training log in {', '.join(missing)}")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
        for color, (name, lines) in zip(COLORS * len(logs), logs.items(), strict=False):
            train = [line for line in lines if line["kind"] == "train"]
            held_out = [line for line in lines if line["kind"] == "validation"]
            _loss(axes[0, 0], name, color, train, held_out)
            _band(axes[0, 1], name, color, train, "leading_cv" if _is_dense(train) else "load_cv")
            _load(axes[1, 0], name, color, train)
            _band(axes[1, 1], name, color, train, "entropy")
        if unigram is not None:
            axes[0, 0].axhline(math.log(unigram), color=INK, lw=1, ls=":")
            place = {"xycoords": ("axes fraction", "data"), "va": "bottom", "fontsize": 8}
            axes[0, 0].annotate("unigram model", (0, math.log(unigram)), **place)
        axes[0, 0].set(title="loss, nats a token (dots: validation)", ylim=_loss_range(logs, unigram))
        axes[0, 1].set(title="load imbalance: CV over experts (band: layers)", ylim=(0, None))
        axes[1, 0].set(
            title="tokens received (dense: led) over the fair share, least and most used expert",
            ylim=(0, None),
        )
        axes[1, 1].set(title="entropy of the gate, nats (band: layers)", ylim=(0, None))
        for ax in axes.flat:
            ax.set_xlabel("step")
            ax.title.set_fontsize(9)
        axes[0, 0].legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        plt.close(figure)
    return path


def summary(runs: list[Path]) -> Table:
    """The last validation of each run, beside what a unigram model of its training text reaches there."""
    table = Table("run", "router", title="Held-out text, last validation", title_justify="left")
    for heading in ("step", "perplexity", "unigram", "H", "load CV", "min load", "experts a token"):
        table.add_column(heading, justify="right")
    for name, run in _named(runs).items():
        held_out = [line for line in read_log(run) if line["kind"] == "validation"]
        if not held_out:
            table.add_row(name, "no validation yet")
            continue
        last, config = held_out[-1], saved_config(run)
        table.add_row(
            name,
            config.model.get("router", "grassmann"),
            str(last["step"]),
            f"{last['perplexity']:.2f}",
            _unigram(config.data.path),
            f"{last['entropy']:.2f}",
            f"{last['load_cv']:.3f}",
            f"{last['min_load']:.3f}",
            f"{last['experts_per_token']:.2f}",
        )
    return table


def _named(runs: list[Path]) -> dict[str, Path]:
    """A name of its own for each: the folder's, or the path of those that share it."""
    names = [run.resolve().name for run in runs]
    return {str(run) if names.count(name) > 1 else name: run for name, run in zip(names, runs, strict=True)}


def _unigram(data: str) -> str:
    try:
        return f"{unigram_perplexity(TokenDataset(data, 'validation')):.1f}"
    except ValueError:  # the text lies elsewhere by now; the run can be looked at all the same
        return "–"


def _loss(
    ax: Any, name: str, color: str, train: list[dict[str, Any]], held_out: list[dict[str, Any]]
) -> None:
    ax.plot([t["step"] for t in train], [t["loss"] for t in train], color=color, lw=1, alpha=0.6)
    label = name
    if held_out:
        label = f"{name}: validation perplexity {held_out[-1]['perplexity']:.2f}"
    ax.plot([v["step"] for v in held_out], [v["loss"] for v in held_out], "o", color=color, ms=4, label=label)


def _band(ax: Any, name: str, color: str, train: list[dict[str, Any]], key: str) -> None:
    steps = [t["step"] for t in train]
    layers = [[layer[key] for layer in t["layers"]] for t in train]
    ax.fill_between(
        steps, [min(v) for v in layers], [max(v) for v in layers], color=color, alpha=0.15, linewidth=0
    )
    ax.plot(steps, [t[key] for t in train], color=color, lw=1.5, label=name)


def _load(ax: Any, name: str, color: str, train: list[dict[str, Any]]) -> None:
    """Over all layers, so that one starving expert anywhere shows."""
    steps = [t["step"] for t in train]
    key = "leading_load" if _is_dense(train) else "load"
    for extreme in (min, max):
        shares = [extreme(_over_fair(layer[key], extreme) for layer in t["layers"]) for t in train]
        ax.plot(steps, shares, color=color, lw=1.2)
    ax.axhline(1, color=INK, lw=0.8, ls=":")


def _over_fair(load: list[float], extreme: Callable[[list[float]], float]) -> float:
    return extreme(load) * len(load) / (sum(load) or 1.0)


def _is_dense(train: list[dict[str, Any]]) -> bool:
    """Every expert computes every token: received load is uniform, and the leading expert is what differs."""
    layers = train[-1]["layers"]
    return train[-1]["experts_per_token"] == len(layers[0]["load"]) and "leading_cv" in layers[0]


def _loss_range(logs: dict[str, list[dict[str, Any]]], unigram: float | None) -> tuple[float, float]:
    losses = [line["loss"] for lines in logs.values() for line in lines if math.isfinite(line["loss"])]
    losses += [math.log(unigram)] if unigram else []
    return 0.95 * min(losses), 1.03 * max(losses)
