"""The map of the synthetic task: accuracy as a share of the Bayes oracle over overlap ρ* and noise σ²."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grmoe.files import write_file
from grmoe.pictures import INK, picture
from grmoe.studies.intervals import student
from grmoe.studies.synthetic.methods import find_methods
from grmoe.studies.synthetic.results import Config, MethodResult, SettingResult
from grmoe.studies.synthetic.study import Plan, Result
from grmoe.studies.synthetic.task import Setting
from grmoe.studies.synthetic.training import Training
from grmoe.tables import Table

# Both of the paper's settings are cells: (0.1, 0.1) and (0.4, 0.5).
RHOS = (0.05, 0.1, 0.2, 0.4, 0.6)
SIGMA2S = (0.05, 0.1, 0.2, 0.35, 0.5)
METHODS = ("softmax_top1", "softmax_top2", "grmoe")


def grid(
    rhos: Sequence[float] = RHOS, sigma2s: Sequence[float] = SIGMA2S, ratio: float = 1.0
) -> tuple[Setting, ...]:
    """A setting for every pair."""
    return tuple(own_setting(rho, sigma2, ratio) for rho in rhos for sigma2 in sigma2s)


def axes(quick: bool = False) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """ρ* and σ² of the map."""
    return ((0.1, 0.4), (0.1, 0.5)) if quick else (RHOS, SIGMA2S)


def own_setting(rho: float, sigma2: float, ratio: float = 1.0) -> Setting:
    """A setting named after its numbers."""
    name = f"rho{rho:g}-sigma{sigma2:g}" + ("" if ratio == 1 else f"-ratio{ratio:g}")
    return Setting(name, rho, sigma2, ratio)


def map_config(quick: bool = False) -> Config:
    """Fewer seeds than the table, because a map has many cells."""
    if quick:
        return Config(seeds=2, eval_tokens=1024, training=Training(steps=300), rates=(1.0,))
    return Config(seeds=10, eval_tokens=2048, screening_seeds=4)


def map_plan(out: Path, config: Config | None = None, settings: tuple[Setting, ...] | None = None) -> Plan:
    config = map_config() if config is None else config
    cells = grid() if settings is None else settings
    return Plan(out=out, config=config, settings=cells, methods=find_methods(METHODS), curves=False)


@dataclass(frozen=True)
class Map:
    """Cells by (ρ*, σ²)."""

    cells: dict[tuple[float, float], SettingResult]

    @classmethod
    def of(cls, settings: Sequence[SettingResult]) -> Map:
        return cls({(s.setting.rho, s.setting.sigma2): s for s in settings})

    @property
    def rhos(self) -> list[float]:
        return sorted({rho for rho, _ in self.cells})

    @property
    def sigma2s(self) -> list[float]:
        return sorted({sigma2 for _, sigma2 in self.cells})

    @property
    def titles(self) -> dict[str, str]:
        """Of the methods that some cell has."""
        return {m.method: m.title for cell in self.cells.values() for m in cell.methods}

    def at(self, rho: float, sigma2: float, method: str) -> MethodResult | None:
        cell = self.cells.get((rho, sigma2))
        return None if cell is None else cell.find(method)

    def oracle(self, rho: float, sigma2: float) -> float | None:
        """Accuracy of the Bayes classifier."""
        cell = self.cells.get((rho, sigma2))
        return None if cell is None else cell.methods[0].oracle_accuracy


def share(result: MethodResult) -> float:
    """Mean accuracy as a share of the oracle's."""
    return fmean(s.share for s in result.scores)


def show(result: Result) -> Iterator[Table]:
    yield from tables(Map.of(result.settings))


def save(result: Result, out: Path) -> dict[str, Path]:
    """table.md and synthetic-map.png. The numbers are in METHOD.json already."""
    written = {"Numbers": out, "Table": out / "table.md", "Figure": out / "synthetic-map.png"}
    parts = [f"{t.title}\n\n{t.markdown()}\n" for t in show(result)]
    write_file(written["Table"], "\n".join(parts).encode())
    draw_map(Map.of(result.settings), written["Figure"])
    return written


def tables(found: Map) -> list[Table]:
    """One for the oracle, one per method."""
    shown = [_table(found, "Accuracy of the Bayes classifier, %", lambda r, s: _percent(found.oracle(r, s)))]
    for key, title in found.titles.items():
        shown.append(
            _table(
                found,
                f"{title}: accuracy, % of the Bayes classifier's (± 95 % over seeds; factor on the learning rates)",
                lambda r, s, key=key: _cell(found.at(r, s, key)),
            )
        )
    return shown


def _table(found: Map, title: str, cell: Any) -> Table:
    shown = Table(title, ["ρ* \\ σ²", *(f"{s:g}" for s in found.sigma2s)])
    for rho in found.rhos:
        shown.add(f"{rho:g}", *(cell(rho, sigma2) for sigma2 in found.sigma2s))
    return shown


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _cell(result: MethodResult | None) -> str:
    if result is None:
        return "–"
    half = student([s.share for s in result.scores])
    error = "" if half is None else f" ± {100 * half:.1f}"
    return f"{_percent(share(result))}{error} (×{result.rate:g})"


def draw_map(found: Map, path: Path) -> None:
    """A panel for the oracle and one per method."""
    panels: list[tuple[str, Any]] = [("Bayes classifier: accuracy, %", found.oracle)]
    for key, title in found.titles.items():
        panels.append((f"{title}: % of Bayes", lambda r, s, key=key: _share_at(found, r, s, key)))
    with picture(path, 3.3 * len(panels) + 0.6, 3.6) as figure:
        drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for ax, (title, value) in zip(drawn, panels, strict=True):
            image = _panel(ax, found, title, value)
        drawn[0].set_ylabel("overlap ρ* of the classes")
        figure.colorbar(image, ax=list(drawn), shrink=0.85, label="%")


def _share_at(found: Map, rho: float, sigma2: float, key: str) -> float | None:
    result = found.at(rho, sigma2, key)
    return None if result is None else share(result)


def _panel(ax: Any, found: Map, title: str, value: Any) -> Any:
    rhos, sigma2s = found.rhos, found.sigma2s
    rows = [[value(rho, sigma2) for sigma2 in sigma2s] for rho in rhos]
    numbers = [[float("nan") if v is None else 100 * v for v in row] for row in rows]
    image = ax.imshow(numbers, vmin=0, vmax=100, cmap="Blues", origin="lower", aspect="auto")
    for i, row in enumerate(numbers):
        for j, number in enumerate(row):
            if number == number:
                ax.text(
                    j, i, f"{number:.0f}", ha="center", va="center", color="white" if number > 55 else INK
                )
    ax.set_xticks(range(len(sigma2s)), [f"{s:g}" for s in sigma2s])
    ax.set_yticks(range(len(rhos)), [f"{r:g}" for r in rhos])
    ax.spines[:].set_visible(False)
    ax.set_xlabel("noise σ²")
    ax.set_title(title, loc="left", fontsize=9)
    return image
