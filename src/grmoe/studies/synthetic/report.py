"""The synthetic study as a table, a JSON file and a figure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from grmoe.files import write_file
from grmoe.studies.synthetic.evaluation import mean_interval, wilson
from grmoe.studies.synthetic.methods import METHODS, PaperRow
from grmoe.studies.synthetic.study import Config, MethodResult, SettingResult

PAPER = {m.key: m.paper for m in METHODS}


@dataclass(kw_only=True)
class Row:
    """One line of the table, over all seeds. Counts are numbers of seeds; everything else is a mean."""

    title: str
    seeds: int
    accuracy: float
    accuracy_interval: float
    """Half the width of the 95 % interval of the mean."""
    share: float
    dense: bool
    """Every expert computes every token."""
    load_cv: float
    collapsed: int
    collapsed_paper: int
    leading_cv: float
    leading_collapsed: int
    entropy: float
    experts: float
    loss: float

    @classmethod
    def of(cls, result: MethodResult, num_experts: int) -> Row:
        scores = result.scores
        accuracy, half = mean_interval([s.accuracy for s in scores])

        def mean(name: str) -> float:
            return mean_interval([getattr(s, name) for s in scores])[0]

        return cls(
            title=result.title,
            seeds=len(scores),
            accuracy=accuracy,
            accuracy_interval=half,
            share=mean("share"),
            dense=all(s.is_dense(num_experts) for s in scores),
            load_cv=mean("load_cv"),
            collapsed=sum(s.collapsed for s in scores),
            collapsed_paper=sum(s.collapsed_paper for s in scores),
            leading_cv=mean("leading_cv"),
            leading_collapsed=sum(s.leading_collapsed for s in scores),
            entropy=mean("entropy"),
            experts=mean("experts_per_token"),
            loss=mean("loss"),
        )

    def cells(self, paper: PaperRow | None) -> list[str]:
        return [
            self.title,
            f"{100 * self.accuracy:.1f} ± {100 * self.accuracy_interval:.1f}",
            f"{100 * self.share:.1f}",
            "–" if self.dense else f"{self.load_cv:.3f}",
            "–" if self.dense else self._seeds(self.collapsed),
            "–" if self.dense else f"{self.collapsed_paper}/{self.seeds}",
            f"{self.leading_cv:.3f}",
            self._seeds(self.leading_collapsed),
            f"{self.entropy:.2f}",
            f"{self.experts:.1f}",
            f"{self.loss:.3f}",
            _paper_cell(paper),
        ]

    def _seeds(self, count: int) -> str:
        low, high = wilson(count, self.seeds)
        return f"{count}/{self.seeds} ({100 * low:.0f}–{100 * high:.0f} %)"


def _paper_cell(paper: PaperRow | None) -> str:
    if paper is None:
        return "–"
    cv = "–" if paper.cv is None else f"{paper.cv:.3f}"
    collapse = "–" if paper.collapse is None else f"{paper.collapse:.0f} %"
    entropy = "–" if paper.entropy is None else f"{paper.entropy:.2f}"
    return f"{paper.accuracy:.1f} / {cv} / {collapse} / {entropy}"


HEADER = [
    "method",
    "accuracy %",
    "% of oracle",
    "load CV",
    "collapsed (95 %)",
    "< 1 %",
    "leading CV",
    "no lead (95 %)",
    "H",
    "experts",
    "loss",
    "paper: acc / CV / coll. / H",
]

NOTES = """\
load CV: standard deviation over mean of the tokens each expert receives. collapsed: seeds in which some expert receives
less than a tenth of its fair share; < 1 %: the paper's rule, less than 1 % of the tokens. leading CV, no lead: the same
two figures for the tokens in which an expert has the largest weight. –: every expert computes every token, so all
receive the same; there only the leading expert tells them apart. Intervals are Wilson's, over seeds.
"""


def _rows(result: SettingResult) -> list[tuple[MethodResult, list[str]]]:
    name, N = result.setting.name, result.num_experts
    return [(m, Row.of(m, N).cells(PAPER[m.method].get(name))) for m in result.methods]


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
    for method, cells in _rows(result):
        table.add_row(*cells, style="bold" if method.method.startswith("grmoe") else None)
    return table


def markdown_table(result: SettingResult) -> str:
    lines = [caption(result), "", "| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    lines += ["| " + " | ".join(cells) + " |" for _, cells in _rows(result)]
    return "\n".join(lines) + "\n"


def write_results(results: list[SettingResult], config: Config, out: Path) -> Path:
    """results.json (everything) and table.md, in `out`."""
    import torch

    content: dict[str, Any] = {
        "config": asdict(config),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "settings": [
            {**asdict(result), "rows": [asdict(Row.of(m, result.num_experts)) for m in result.methods]}
            for result in results
        ],
    }
    out.mkdir(parents=True, exist_ok=True)
    tables = "\n".join([*(markdown_table(r) for r in results), NOTES])
    write_file(out / "table.md", tables.encode())
    path = out / "results.json"
    write_file(path, json.dumps(content, indent=1).encode())
    return path
