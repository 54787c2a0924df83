"""The pictures of an analysis."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from grmoe.analyze.results import Analysis, Layer
from grmoe.analyze.statistics import Correlation

INK = "#22303c"
STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
NUMBERS_UP_TO = 32  # experts: more rows than that are too thin for numbers


def draw(analysis: Analysis, folder: Path) -> dict[str, Path]:
    """All figures that the analysis has data for: name → file."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, tuple[bool, Callable[[Analysis], Any]]] = {
        "types": (True, _types),
        "entropy": (True, _entropy),
        "kappa": (analysis.kappa_correlation is not None, _kappa),
        "domains": (len(_present(analysis)) > 1, _domains),
        "overlap": (any(layer.geometry for layer in analysis.layers), _overlap),
        "training": (analysis.training is not None, _training),
    }
    drawn = {}
    with plt.rc_context(STYLE):
        for name, (wanted, make) in figures.items():
            path = folder / f"{name}.png"
            path.unlink(missing_ok=True)  # of an earlier analysis that had one
            if wanted:
                figure = make(analysis)
                figure.savefig(path, dpi=110)
                plt.close(figure)
                drawn[name] = path
    return drawn


def correlation_text(found: Correlation | None) -> str:
    """r = −0.31 [−0.70, 0.22], n = 16."""
    if found is None or found.r is None:
        return "r not defined" + (f" (n = {found.n})" if found else "")
    interval = "" if found.lower is None else f" [{found.lower:.2f}, {found.upper:.2f}]"
    return f"r = {found.r:.2f}{interval}, n = {found.n}"


def _array(rows: Any) -> NDArray[np.float64]:
    return np.array(rows, dtype=float)  # None becomes NaN, which is drawn as a gap


def _colors(count: int) -> Any:
    return plt.get_cmap("viridis")(np.linspace(0, 0.78, count))


def _grid(count: int, width: float, height: float, most: int = 4) -> tuple[Any, list[Any]]:
    columns = min(count, most)
    rows = math.ceil(count / columns)
    size = (max(4.5, columns * width), max(3.2, rows * height))
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for ax in list(axes.flat)[count:]:
        ax.axis("off")
    return figure, list(axes.flat)[:count]


def _legend_beside(ax: Any) -> None:
    """Outside: a model may have many layers."""
    ax.legend(frameon=False, fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _heat(ax: Any, rows: Any, title: str, top: float | None = None) -> Any:
    values = _array(rows)
    image = ax.imshow(values, cmap="Blues", vmin=0.0, vmax=top, aspect="auto")
    ax.set_title(title, fontsize=9)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return image


def _write_percent(ax: Any, rows: Any, top: float) -> None:
    values = _array(rows)
    for (i, j), value in np.ndenumerate(values):
        if math.isfinite(value):
            color = "white" if value > 0.6 * top else INK
            ax.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color=color)


def _types(analysis: Analysis) -> Any:
    """A row for each layer: what an expert's tokens are, and who has a type's tokens."""
    L, N = len(analysis.layers), analysis.experts
    most = max(float(np.nanmax(_array(layer.of_type), initial=0.3)) for layer in analysis.layers)
    height = max(2.6, 0.24 * min(N, 24) + 1.3)
    figure, axes = plt.subplots(L, 2, figsize=(10.5, L * height), squeeze=False, layout="constrained")
    for row, layer in zip(axes, analysis.layers, strict=True):
        panels = (
            (layer.of_expert, f"layer {layer.layer}: what an expert's tokens are, % of the row", 1.0),
            (layer.of_type, f"layer {layer.layer}: which expert has a type, % of the column", most),
        )
        for ax, (table, title, top) in zip(row, panels, strict=True):
            _heat(ax, table, title, top)
            if N <= NUMBERS_UP_TO:
                _write_percent(ax, table, top)
                ax.set_yticks(range(N))
            ax.set_xticks(range(len(analysis.types)), [name.replace(" ", "\n") for name in analysis.types])
            ax.tick_params(axis="x", labelsize=8)
            ax.set_ylabel("expert")
    return figure


def _entropy(analysis: Analysis) -> Any:
    """Mean entropy of the gate over the tokens of each type, a line for each layer."""
    figure, ax = plt.subplots(figsize=(9.5, 4), layout="constrained")
    places = range(len(analysis.types))
    for color, layer in zip(_colors(len(analysis.layers)), analysis.layers, strict=True):
        label = f"layer {layer.layer} (mean {layer.entropy:.2f})"
        ax.plot(places, _array(layer.type_entropy), "o-", color=color, lw=1.2, ms=5, label=label)
    most = math.log(analysis.experts)
    ax.axhline(most, color=INK, lw=0.8, ls=":")
    ax.annotate(f"uniform: log {analysis.experts}", (0, most), va="bottom", fontsize=8)
    names = [f"{name}\nn = {n:,}" for name, n in zip(analysis.types, analysis.type_tokens, strict=True)]
    ax.set_xticks(places, names, fontsize=8)
    ax.set(ylabel="nats", ylim=(0, 1.1 * most), title="entropy of the gate by token type")
    ax.title.set_fontsize(9)
    _legend_beside(ax)
    return figure


def _kappa(analysis: Analysis) -> Any:
    """κ against the entropy of an expert's types, one point an expert."""
    figure, ax = plt.subplots(figsize=(8.5, 4.6), layout="constrained")
    for color, layer in zip(_colors(len(analysis.layers)), analysis.layers, strict=True):
        enough = np.array(layer.expert_tokens) >= analysis.least_tokens
        kappa, spread = _array(layer.kappa), _array(layer.expert_type_entropy)
        label = f"layer {layer.layer}: {correlation_text(layer.kappa_correlation)}"
        ax.scatter(kappa[enough], spread[enough], color=color, s=34, label=label)
        for expert in np.flatnonzero(enough) if len(analysis.layers) * analysis.experts <= 48 else ():
            at = (kappa[expert], spread[expert])
            ax.annotate(str(expert), at, xytext=(4, 3), textcoords="offset points", fontsize=7, color=color)
    pooled, within = analysis.kappa_correlation, analysis.kappa_correlation_within
    ax.set_title(
        "concentration and specialisation, one point an expert\n"
        f"all layers: {correlation_text(pooled)}\nwithin layers: {correlation_text(within)}",
        fontsize=9,
    )
    ax.set(xlabel="κ of the expert", ylabel="entropy of its tokens' types, nats")
    _legend_beside(ax)
    return figure


def _present(analysis: Analysis) -> list[int]:
    return [i for i, n in enumerate(analysis.domain_tokens) if n]


def _domains(analysis: Analysis) -> Any:
    """Which expert has a domain's tokens."""
    present = _present(analysis)
    N = analysis.experts
    width = max(4.0, 0.34 * min(N, 24) + 2)
    figure, axes = _grid(len(analysis.layers), width, 0.3 * len(present) + 1.4, most=3)
    tables = [_array(layer.domain_of_expert)[present] for layer in analysis.layers]
    top = max(float(np.nanmax(table)) for table in tables)
    for ax, layer, table in zip(axes, analysis.layers, tables, strict=True):
        _heat(ax, table, f"layer {layer.layer}: which expert has a domain, % of the row", top)
        ax.set_yticks(range(len(present)), [analysis.domains[i] for i in present])
        ax.set_xlabel("expert")
        if N <= NUMBERS_UP_TO:
            _write_percent(ax, table, top)
            ax.set_xticks(range(N))
    return figure


def _overlap(analysis: Analysis) -> Any:
    """How much experts share, the diagonal left out; above it for frames the smallest principal angle."""
    layers = [layer for layer in analysis.layers if layer.geometry is not None]
    figure, axes = _grid(len(layers), 4.0, 3.7)
    grams = [_gram(layer) for layer in layers]
    top = max(float(np.nanmax(np.abs(gram))) for gram in grams)
    for ax, layer, gram in zip(axes, layers, grams, strict=True):
        geometry = layer.geometry
        assert geometry is not None
        if geometry.kind == "overlap":
            title = f"layer {layer.layer}: overlap ‖UᵢᵀUⱼ‖²/k (random: {geometry.random:.3f})"
            top = max(top, geometry.random)
            image = _heat(ax, gram, title, top)
        else:
            image = _heat(ax, gram, f"layer {layer.layer}: cosine of gate rows")
            image.set(cmap="RdBu_r", clim=(-top, top))
        if geometry.angle_min is not None and len(gram) <= 12:
            for (i, j), angle in np.ndenumerate(np.degrees(_array(geometry.angle_min))):
                if i < j:
                    color = "white" if gram[i, j] > 0.6 * top else INK
                    ax.text(j, i, f"{angle:.0f}°", ha="center", va="center", fontsize=6.5, color=color)
        ax.set(xlabel="expert", ylabel="expert")
        if len(gram) <= NUMBERS_UP_TO:
            ax.set_xticks(range(len(gram)))
            ax.set_yticks(range(len(gram)))
            ax.tick_params(labelsize=8 if len(gram) <= 12 else 6)
        figure.colorbar(image, ax=ax, shrink=0.85)
    if any(layer.geometry and layer.geometry.angle_min for layer in layers) and analysis.experts <= 12:
        figure.supxlabel("above the diagonal: smallest principal angle", fontsize=8)
    return figure


def _gram(layer: Layer) -> NDArray[np.float64]:
    assert layer.geometry is not None
    gram = _array(layer.geometry.gram)
    np.fill_diagonal(gram, np.nan)
    return gram


def _training(analysis: Analysis) -> Any:
    """The load of every expert over the run."""
    training = analysis.training
    assert training is not None
    figure, axes = _grid(len(training.load), 4.4, 2.9, most=3)
    top = max(max(max(step) for step in layer) for layer in training.load)
    for ax, layer, load in zip(axes, analysis.layers, training.load, strict=True):
        lines = _array(load)
        for color, expert in zip(_colors(lines.shape[1]), range(lines.shape[1]), strict=True):
            ax.plot(training.steps, lines[:, expert], color=color, lw=1, label=str(expert))
        ax.axhline(1 / lines.shape[1], color=INK, lw=0.8, ls=":")
        ax.set_title(f"layer {layer.layer}: load of each expert over training", fontsize=9)
        ax.set(xlabel="step", ylim=(0, 1.05 * top))
    if analysis.experts <= 16:
        axes[0].legend(title="expert", frameon=False, fontsize=7, title_fontsize=7, ncols=2)
    return figure
