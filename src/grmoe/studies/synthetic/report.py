"""The synthetic study as a table, a JSON file and a figure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from grmoe.studies.synthetic.evaluation import mean_interval, wilson
from grmoe.studies.synthetic.methods import METHODS, PaperRow
from grmoe.studies.synthetic.study import Config, MethodResult, SettingResult

PAPER: dict[str, PaperRow | None] = {m.key: m.paper for m in METHODS}


@dataclass
class Row:
    """One line of the table, over all seeds."""

    title: str
    accuracy: float
    accuracy_interval: float
    share: float
    cv: float
    collapsed: int
    seeds: int
    collapse_interval: tuple[float, float]
    entropy: float
    experts: float
    loss: float

    @classmethod
    def of(cls, result: MethodResult) -> Row:
        scores = result.scores
        accuracy, half = mean_interval([s.accuracy for s in scores])
        collapsed = sum(s.collapsed for s in scores)

        def mean(name: str) -> float:
            return mean_interval([getattr(s, name) for s in scores])[0]

        return cls(
            title=result.title,
            accuracy=accuracy,
            accuracy_interval=half,
            share=mean("share"),
            cv=mean("cv"),
            collapsed=collapsed,
            seeds=len(scores),
            collapse_interval=wilson(collapsed, len(scores)),
            entropy=mean("entropy"),
            experts=mean("experts_computed"),
            loss=mean("loss"),
        )

    def cells(self, paper: PaperRow | None) -> list[str]:
        low, high = self.collapse_interval
        return [
            self.title,
            f"{100 * self.accuracy:.1f} ± {100 * self.accuracy_interval:.1f}",
            f"{100 * self.share:.1f}",
            f"{self.cv:.3f}",
            f"{self.collapsed}/{self.seeds} ({100 * low:.0f}–{100 * high:.0f} %)",
            f"{self.entropy:.2f}",
            f"{self.experts:.1f}",
            f"{self.loss:.3f}",
            f"{paper.accuracy:.1f} / {paper.cv:.3f} / {paper.collapse:.0f} % / {paper.entropy:.2f}"
            if paper
            else "–",
        ]


HEADER = [
    "method",
    "accuracy %",
    "% of oracle",
    "CV",
    "collapsed (95 %)",
    "H",
    "experts",
    "loss",
    "paper: acc / CV / coll. / H",
]


def _paper_row(result: SettingResult, method: MethodResult) -> PaperRow | None:
    return PAPER[method.method] if result.setting.name == "easy" else None


def caption(result: SettingResult) -> str:
    s = result.setting
    return (
        f"{s.name}: wanted overlap ρ* = {s.rho:g}, achieved {result.overlap_mean:.3f} "
        f"({result.overlap_min:.3f}–{result.overlap_max:.3f}); σ² = {s.sigma2:g}; "
        f"Bayes oracle {100 * result.oracle_accuracy:.2f} %"
    )


def rich_table(result: SettingResult) -> Table:
    table = Table(title=caption(result), title_justify="left")
    for i, name in enumerate(HEADER):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for method in result.methods:
        style = "bold" if method.method.startswith("grmoe") else None
        table.add_row(*Row.of(method).cells(_paper_row(result, method)), style=style)
    return table


def markdown_table(result: SettingResult) -> str:
    lines = [caption(result), "", "| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    for method in result.methods:
        lines.append("| " + " | ".join(Row.of(method).cells(_paper_row(result, method))) + " |")
    return "\n".join(lines) + "\n"


def write_results(results: list[SettingResult], config: Config, out: Path) -> Path:
    """results.json (everything) and table.md, in `out`."""
    import torch

    content: dict[str, Any] = {
        "config": asdict(config),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "settings": [
            {**asdict(result), "rows": [asdict(Row.of(m)) for m in result.methods]} for result in results
        ],
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text("\n".join(markdown_table(r) for r in results))
    path = out / "results.json"
    path.write_text(json.dumps(content, indent=1))
    return path
