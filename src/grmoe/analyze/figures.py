"""The figures of an analysis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

from grmoe.analyze.results import Analysis, Layer
from grmoe.analyze.statistics import Correlation
from grmoe.pictures import INK, picture

_MAX_LABELLED = 32  # experts; with more, rows are too thin for numbers


def draw(analysis: Analysis, folder: Path) -> dict[str, Path]:
    """Draw all figures that the analysis has data for. Returns name → file."""
    figures: dict[str, tuple[bool, Callable[[Analysis, Path], None]]] = {
        "types": (True, _types),
        "entropy": (True, _entropy),
        "kappa": (analysis.kappa_correlation is not None, _kappa),
        "domains": (len(_present(analysis)) > 1, _domains),
        "overlap": (any(layer.geometry for layer in analysis.layers), _overlap),
        "training": (analysis.training is not None, _training),
    }
    drawn = {}
    for name, (wanted, make) in figures.items():
        path = folder / f"{name}.png"
        path.unlink(missing_ok=True)  # an earlier analysis may have had one
        if wanted:
            make(analysis, path)
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
    return matplotlib.colormaps["viridis"](np.linspace(0, 0.78, count))


@contextmanager
def _grid(
    path: Path, count: int, width: float, height: float, columns: int = 4
) -> Iterator[tuple[Any, list[Any]]]:
    """A figure of `count` panels of this size, at most `columns` side by side."""
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    with picture(path, max(4.5, columns * width), max(3.2, rows * height)) as figure:
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax in axes[count:]:
            ax.axis("off")
        yield figure, axes[:count]


def _legend_beside(ax: Any) -> None:
    """Outside, because a model may have many layers."""
    ax.legend(frameon=False, fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _heat(ax: Any, rows: Any, title: str, top: float | None = None) -> Any:
    image = ax.imshow(_array(rows), cmap="Blues", vmin=0.0, vmax=top, aspect="auto")
    ax.set_title(title, fontsize=9)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return image


def _write_percent(ax: Any, rows: Any, top: float) -> None:
    for (i, j), value in np.ndenumerate(_array(rows)):
        if math.isfinite(value):
            color = "white" if value > 0.6 * top else INK
            ax.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color=color)


def _types(analysis: Analysis, path: Path) -> None:
    """One row per layer: the types of an expert's tokens, and the experts of a type's tokens."""
    L, N = len(analysis.layers), analysis.experts
    largest = max(float(np.nanmax(_array(layer.of_type), initial=0.3)) for layer in analysis.layers)
    height = max(2.6, 0.24 * min(N, 24) + 1.3)
    with picture(path, 10.5, L * height) as figure:
        for row, layer in zip(figure.subplots(L, 2, squeeze=False), analysis.layers, strict=True):
            panels = (
                (layer.of_expert, f"block {layer.layer}: types of an expert's tokens, % of the row", 1.0),
                (layer.of_type, f"block {layer.layer}: experts of a type's tokens, % of the column", largest),
            )
            for ax, (table, title, top) in zip(row, panels, strict=True):
                _heat(ax, table, title, top)
                if N <= _MAX_LABELLED:
                    _write_percent(ax, table, top)
                    ax.set_yticks(range(N))
                names = [name.replace(" ", "\n") for name in analysis.types]
                ax.set_xticks(range(len(names)), names)
                ax.tick_params(axis="x", labelsize=8)
                ax.set_ylabel("expert")


def _entropy(analysis: Analysis, path: Path) -> None:
    """Mean entropy of the gate over the tokens of each type, one line per layer."""
    places = range(len(analysis.types))
    with picture(path, 9.5, 4) as figure:
        ax = figure.subplots()
        for color, layer in zip(_colors(len(analysis.layers)), analysis.layers, strict=True):
            label = f"block {layer.layer} (mean {layer.entropy:.2f})"
            ax.plot(places, _array(layer.type_entropy), "o-", color=color, lw=1.2, ms=5, label=label)
        uniform = math.log(analysis.experts)
        ax.axhline(uniform, color=INK, lw=0.8, ls=":")
        ax.annotate(f"uniform: log {analysis.experts}", (0, uniform), va="bottom", fontsize=8)
        names = [f"{name}\nn = {n:,}" for name, n in zip(analysis.types, analysis.type_tokens, strict=True)]
        ax.set_xticks(places, names, fontsize=8)
        ax.set(ylabel="nats", ylim=(0, 1.1 * uniform))
        ax.set_title("entropy of the gate by token type", fontsize=9)
        _legend_beside(ax)


def _kappa(analysis: Analysis, path: Path) -> None:
    """κ against the entropy of an expert's types, one point per expert."""
    few = len(analysis.layers) * analysis.experts <= 48
    with picture(path, 8.5, 4.6) as figure:
        ax = figure.subplots()
        for color, layer in zip(_colors(len(analysis.layers)), analysis.layers, strict=True):
            enough = np.array(layer.expert_tokens) >= analysis.least_tokens
            kappa, spread = _array(layer.kappa), _array(layer.expert_type_entropy)
            label = f"block {layer.layer}: {correlation_text(layer.kappa_correlation)}"
            ax.scatter(kappa[enough], spread[enough], color=color, s=34, label=label)
            for expert in np.flatnonzero(enough) if few else ():
                at = (kappa[expert], spread[expert])
                ax.annotate(str(expert), at, (4, 3), textcoords="offset points", fontsize=7, color=color)
        ax.set_title(
            "concentration and specialisation, one point per expert\n"
            f"all layers: {correlation_text(analysis.kappa_correlation)}\n"
            f"within layers: {correlation_text(analysis.kappa_correlation_within)}",
            fontsize=9,
        )
        ax.set(xlabel="κ of the expert", ylabel="entropy of its tokens' types, nats")
        _legend_beside(ax)


def _present(analysis: Analysis) -> list[int]:
    """Domains that have tokens."""
    return [i for i, n in enumerate(analysis.domain_tokens) if n]


def _domains(analysis: Analysis, path: Path) -> None:
    """Which experts lead the tokens of a domain."""
    present, N = _present(analysis), analysis.experts
    width = max(4.0, 0.34 * min(N, 24) + 2)
    tables = [_array(layer.domain_of_expert)[present] for layer in analysis.layers]
    top = max(float(np.nanmax(table)) for table in tables)
    with _grid(path, len(tables), width, 0.3 * len(present) + 1.4, columns=3) as (_, axes):
        for ax, layer, table in zip(axes, analysis.layers, tables, strict=True):
            _heat(ax, table, f"block {layer.layer}: experts of a domain's tokens, % of the row", top)
            ax.set_yticks(range(len(present)), [analysis.domains[i] for i in present])
            ax.set_xlabel("expert")
            if N <= _MAX_LABELLED:
                _write_percent(ax, table, top)
                ax.set_xticks(range(N))


def _overlap(analysis: Analysis, path: Path) -> None:
    """How much experts share, without the diagonal. Above it, for frames, the smallest principal angle."""
    layers = [layer for layer in analysis.layers if layer.geometry is not None]
    grams = [_gram(layer) for layer in layers]
    top = max(float(np.nanmax(np.abs(gram))) for gram in grams)
    few = analysis.experts <= 12
    with _grid(path, len(layers), 4.0, 3.7) as (figure, axes):
        for ax, layer, gram in zip(axes, layers, grams, strict=True):
            geometry = layer.geometry
            assert geometry is not None
            if geometry.kind == "overlap":
                title = f"block {layer.layer}: overlap ‖UᵢᵀUⱼ‖²/k (random: {geometry.random:.3f})"
                top = max(top, geometry.random)
                image = _heat(ax, gram, title, top)
            else:
                image = _heat(ax, gram, f"block {layer.layer}: cosine of gate rows")
                image.set(cmap="RdBu_r", clim=(-top, top))
            if geometry.angle_min is not None and few:
                for (i, j), angle in np.ndenumerate(np.degrees(_array(geometry.angle_min))):
                    if i < j:
                        color = "white" if gram[i, j] > 0.6 * top else INK
                        ax.text(j, i, f"{angle:.0f}°", ha="center", va="center", fontsize=6.5, color=color)
            ax.set(xlabel="expert", ylabel="expert")
            if len(gram) <= _MAX_LABELLED:
                ax.set_xticks(range(len(gram)))
                ax.set_yticks(range(len(gram)))
                ax.tick_params(labelsize=8 if few else 6)
            figure.colorbar(image, ax=ax, shrink=0.85)
        if few and any(layer.geometry and layer.geometry.angle_min for layer in layers):
            figure.supxlabel("above the diagonal: smallest principal angle", fontsize=8)


def _gram(layer: Layer) -> NDArray[np.float64]:
    assert layer.geometry is not None
    gram = _array(layer.geometry.gram)
    np.fill_diagonal(gram, np.nan)
    return gram


def _training(analysis: Analysis, path: Path) -> None:
    """The load of every expert over the run."""
    training = analysis.training
    assert training is not None
    top = max(max(max(step) for step in layer) for layer in training.load)
    with _grid(path, len(training.load), 4.4, 2.9, columns=3) as (_, axes):
        for ax, layer, load in zip(axes, analysis.layers, training.load, strict=True):
            lines = _array(load)
            for expert, color in enumerate(_colors(lines.shape[1])):
                ax.plot(training.steps, lines[:, expert], color=color, lw=1, label=str(expert))
            ax.axhline(lines.mean(), color=INK, lw=0.8, ls=":")  # the fair share
            ax.set_title(f"block {layer.layer}: load of each expert over training", fontsize=9)
            ax.set(xlabel="step", ylim=(0, 1.05 * top))
        if analysis.experts <= 16:
            axes[0].legend(title="expert", frameon=False, fontsize=7, title_fontsize=7, ncols=2)
