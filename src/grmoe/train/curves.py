"""Training as a figure: loss, load and entropy over steps, one run or several in the same axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grmoe.data import TokenDataset, unigram_perplexity
from grmoe.pictures import COLORS, INK, picture
from grmoe.runs.folder import load_keys, read_log, saved_config
from grmoe.tables import Table


def draw_curves(runs: list[Path], path: Path, unigram: float | None = None) -> Path:
    """Draw loss with validation, load of the experts, entropy. `unigram`: the perplexity to beat."""
    named = _named(runs)
    logs = {name: read_log(run) for name, run in named.items()}
    trained = {name for name, lines in logs.items() if any(line["kind"] == "train" for line in lines)}
    if missing := [str(run) for name, run in named.items() if name not in trained]:
        raise ValueError(f"no training log in {', '.join(missing)}")
    with picture(path, 11, 7) as figure:
        (loss, imbalance), (load, entropy) = figure.subplots(2, 2)
        for color, (name, lines) in zip(COLORS * len(logs), logs.items(), strict=False):
            train = [line for line in lines if line["kind"] == "train"]
            held_out = [line for line in lines if line["kind"] == "validation"]
            _loss(loss, name, color, train, held_out)
            _band(imbalance, name, color, train, load_keys(train[-1])[1])
            _load(load, color, train)
            _band(entropy, name, color, train, "entropy")
        if unigram is not None:
            loss.axhline(math.log(unigram), color=INK, lw=1, ls=":")
            place = {"xycoords": ("axes fraction", "data"), "va": "bottom", "fontsize": 8}
            loss.annotate("unigram model", (0, math.log(unigram)), **place)
        loss.set(title="loss, nats per token (dots: validation)", ylim=_loss_range(logs, unigram))
        imbalance.set(title="load imbalance: CV over experts (band: layers)", ylim=(0, None))
        load.set(
            title="tokens received (dense: led) over the fair share, least and most used expert",
            ylim=(0, None),
        )
        entropy.set(title="entropy of the gate, nats (band: layers)", ylim=(0, None))
        for ax in (loss, imbalance, load, entropy):
            ax.set_xlabel("step")
            ax.title.set_fontsize(9)
        loss.legend(frameon=False)
    return path


def summary(runs: list[Path]) -> Table:
    """The last validation of each run, next to what a unigram model of its training text reaches there."""
    numbers = ["step", "perplexity", "unigram", "H", "load CV", "min load", "experts per token"]
    table = Table("Held-out text, last validation", ["run", "router", *numbers], left=2)
    for name, run in _named(runs).items():
        held_out = [line for line in read_log(run) if line["kind"] == "validation"]
        if not held_out:
            table.add(name, "no validation yet", *[""] * len(numbers))
            continue
        last, config = held_out[-1], saved_config(run)
        table.add(
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
    """Name each run by its folder, or by its path if several folders have that name."""
    names = [run.resolve().name for run in runs]
    return {str(run) if names.count(name) > 1 else name: run for name, run in zip(names, runs, strict=True)}


def _unigram(data: str) -> str:
    try:
        return f"{unigram_perplexity(TokenDataset(data, 'validation')):.1f}"
    except ValueError:  # the text has moved or is gone; the run can still be shown
        return "–"


def _loss(
    ax: Any, name: str, color: str, train: list[dict[str, Any]], held_out: list[dict[str, Any]]
) -> None:
    ax.plot([t["step"] for t in train], [t["loss"] for t in train], color=color, lw=1, alpha=0.6)
    label = f"{name}: validation perplexity {held_out[-1]['perplexity']:.2f}" if held_out else name
    ax.plot([v["step"] for v in held_out], [v["loss"] for v in held_out], "o", color=color, ms=4, label=label)


def _band(ax: Any, name: str, color: str, train: list[dict[str, Any]], key: str) -> None:
    steps = [t["step"] for t in train]
    layers = [[layer[key] for layer in t["layers"]] for t in train]
    low, high = [min(v) for v in layers], [max(v) for v in layers]
    ax.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    ax.plot(steps, [t[key] for t in train], color=color, lw=1.5, label=name)


def _load(ax: Any, color: str, train: list[dict[str, Any]]) -> None:
    """Extremes over all layers, so that one starving expert anywhere shows."""
    steps = [t["step"] for t in train]
    key, _ = load_keys(train[-1])
    for extreme in (min, max):
        shares = [extreme(_over_fair(layer[key], extreme) for layer in t["layers"]) for t in train]
        ax.plot(steps, shares, color=color, lw=1.2)
    ax.axhline(1, color=INK, lw=0.8, ls=":")


def _over_fair(load: list[float], extreme: Callable[[list[float]], float]) -> float:
    return extreme(load) * len(load) / (sum(load) or 1.0)


def _loss_range(logs: dict[str, list[dict[str, Any]]], unigram: float | None) -> tuple[float, float]:
    losses = [line["loss"] for lines in logs.values() for line in lines if math.isfinite(line["loss"])]
    losses += [math.log(unigram)] if unigram else []
    return 0.95 * min(losses), 1.03 * max(losses)
