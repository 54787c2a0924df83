"""The synthetic study as tables: scores, one per setting with the paper's figures beside, and learning rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, mean

from grmoe.studies.intervals import out_of, plus_minus, student
from grmoe.studies.synthetic.methods import METHODS, PaperRow
from grmoe.studies.synthetic.results import MethodResult, SettingResult
from grmoe.studies.synthetic.study import Result
from grmoe.tables import Table

PAPER = {m.key: m.paper for m in METHODS}
HEADINGS = (
    "method", "accuracy %", "% of Bayes", "load CV", "collapsed (95 %)", "< 1 %", "leading CV", "leads < 1/10 (95 %)",
    "H", "experts", "loss", "rate", "paper: acc / CV / coll. / H",
)  # fmt: skip
NOTES = """\
load CV: standard deviation over mean of the tokens each expert receives. collapsed: seeds in which some expert receives
less than a tenth of its fair share; < 1 %: the paper's rule, less than 1 % of the tokens. leading CV: of the tokens in
which an expert has the largest weight; leads < 1/10: seeds in which some expert leads less than a tenth of its fair
share. –: every expert computes every token, so all receive the same; there only the leading expert tells them apart.
% of Bayes: accuracy over that of the Bayes classifier. ± is Student's interval, (…) Wilson's, over seeds. rate: factor
on the learning rates."""


@dataclass(kw_only=True)
class Row:
    """One row of the table, over all seeds. Counts are numbers of seeds; everything else is a mean."""

    title: str
    seeds: int
    accuracy: float
    accuracy_interval: float | None
    """Half the width of the 95 % interval of the mean. None for one seed."""
    share: float
    dense: bool
    """Every expert computes every token."""
    load_cv: float
    collapsed: int
    collapsed_paper: int
    leading_cv: float
    leading_collapsed: int
    entropy: float
    experts_per_token: float
    loss: float
    rate: float

    @classmethod
    def of(cls, result: MethodResult, num_experts: int) -> Row:
        scores = result.scores
        means = ("accuracy", "share", "load_cv", "leading_cv", "entropy", "experts_per_token", "loss")
        counts = ("collapsed", "collapsed_paper", "leading_collapsed")
        return cls(
            title=result.title,
            rate=result.rate,
            seeds=len(scores),
            accuracy_interval=student([s.accuracy for s in scores]),
            dense=all(s.is_dense(num_experts) for s in scores),
            **{name: mean(getattr(s, name) for s in scores) for name in means},
            **{name: sum(getattr(s, name) for s in scores) for name in counts},
        )

    def cells(self, paper: PaperRow | None) -> list[str]:
        half, seeds = self.accuracy_interval, self.seeds
        received = (f"{self.load_cv:.3f}", out_of(self.collapsed, seeds), f"{self.collapsed_paper}/{seeds}")
        return [
            self.title,
            plus_minus(100 * self.accuracy, None if half is None else 100 * half, 1),
            f"{100 * self.share:.1f}",
            *(("–", "–", "–") if self.dense else received),
            f"{self.leading_cv:.3f}",
            out_of(self.leading_collapsed, self.seeds),
            f"{self.entropy:.2f}",
            f"{self.experts_per_token:.1f}",
            f"{self.loss:.3f}",
            f"×{self.rate:g}",
            _paper_cell(paper),
        ]


def _paper_cell(paper: PaperRow | None) -> str:
    if paper is None:
        return "–"
    cv = "–" if paper.cv is None else f"{paper.cv:.3f}"
    collapse = "–" if paper.collapse is None else f"{paper.collapse:.0f} %"
    entropy = "–" if paper.entropy is None else f"{paper.entropy:.2f}"
    return f"{paper.accuracy:.1f} / {cv} / {collapse} / {entropy}"


def caption(result: SettingResult) -> str:
    s, (mean_overlap, least, largest) = result.setting, result.methods[0].overlap
    weights = "" if s.ratio == 1 else f"; weights ∝ {s.ratio:g}^e"
    return (
        f"{s.name}: wanted overlap ρ* = {s.rho:g}, achieved {mean_overlap:.3f} ({least:.3f}–{largest:.3f}); "
        f"σ² = {s.sigma2:g}{weights}; Bayes classifier {100 * result.methods[0].oracle_accuracy:.2f} %"
    )


def table(result: SettingResult) -> Table:
    shown = Table(caption(result), HEADINGS)
    for method in result.methods:
        paper = PAPER[method.method].get(result.setting.name)
        shown.add(*Row.of(method, result.num_experts).cells(paper))
    return shown


def rates_table(result: SettingResult) -> Table | None:
    """Held-out loss at every learning rate on the tasks that the rate was chosen on. None if nothing was chosen."""
    screened = [(m, m.screening) for m in result.methods if m.screening is not None]
    if not screened:
        return None
    rates = screened[0][1].rates
    seeds = len(screened[0][1].loss[0])
    title = f"{result.setting.name}: held-out loss by factor on the learning rates, {seeds} other tasks"
    shown = Table(title, ["method", *(f"×{rate:g}" for rate in rates), "chosen"])
    for method, screening in screened:
        shown.add(method.title, *(f"{fmean(row):.3f}" for row in screening.loss), f"×{method.rate:g}")
    return shown


def show(result: Result) -> Iterator[Table | str]:
    yield from map(table, result.settings)
    yield NOTES
    yield from filter(None, map(rates_table, result.settings))
