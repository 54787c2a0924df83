"""Claims of the paper as questions to results: what a verdict needs, and how it follows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from statistics import fmean

from grmoe.studies.intervals import plus_minus, student
from grmoe.studies.models.summary import Mean
from grmoe.studies.models.summary import mean as over_seeds
from grmoe.studies.page import Claim, Verdict
from grmoe.studies.synthetic.evaluation import SeedScore
from grmoe.studies.synthetic.results import MethodResult, SettingResult

Answer = tuple[str, Verdict, str]
"""What was measured, the verdict, and the reason."""


BEFORE = "(settings of before)"


class Found:
    """Results by setting and method.

    old: methods whose results are of other settings than today's. Claims say so.
    """

    def __init__(self, settings: dict[str, SettingResult], old: Collection[str] = ()) -> None:
        self.settings = settings
        self.old = old

    def get(self, setting: str, method: str) -> MethodResult | None:
        return None if setting not in self.settings else self.settings[setting].find(method)

    def __call__(self, setting: str, method: str) -> MethodResult:
        """What a question said it needs."""
        result = self.get(setting, method)
        if result is None:
            raise KeyError(f"{method} on {setting}")
        return result


@dataclass(frozen=True)
class Question:
    """One claim of the paper. `decide` is called only when everything it needs has results."""

    where: str
    text: str
    settings: tuple[str, ...]
    methods: tuple[str, ...]
    """Needed on each of the settings."""
    decide: Callable[[Found], Answer]

    def answer(self, found: Found) -> Claim:
        needed = [found.get(s, m) for s in self.settings for m in self.methods]
        if absent := needed.count(None):
            reason = f"{absent} of {len(needed)} results are missing, by method and setting."
            return Claim(self.where, self.text, "", Verdict.OPEN, reason)
        ours, verdict, reason = self.decide(found)
        if ours and any(method in found.old for method in self.methods):
            ours = f"{ours} {BEFORE}"
        return Claim(self.where, self.text, ours, verdict, reason)


def holds(condition: bool) -> Verdict:
    return Verdict.HOLDS if condition else Verdict.FAILS


def values(result: MethodResult, figure: str = "accuracy") -> list[float]:
    """By seed."""
    return [getattr(score, figure) for score in result.scores]


def mean(result: MethodResult, figure: str) -> float:
    return fmean(values(result, figure))


def accuracy(result: MethodResult) -> str:
    """43.6 ± 0.8 %."""
    return f"{points(values(result))} %"


def points(values: Iterable[float]) -> str:
    """Mean of shares in per cent, with Student's interval."""
    values = [100 * v for v in values]
    return plus_minus(fmean(values), student(values), 1)


def paired(a: MethodResult, b: MethodResult, figure: str = "accuracy") -> list[float]:
    """a − b by seed, for the seeds that both have."""
    return [x - y for x, y in zip(values(a, figure), values(b, figure), strict=False)]


def minus(given: Iterable[float], number: float) -> Mean | None:
    """The mean above a number, with its interval."""
    return over_seeds(value - number for value in given)


def count_starved(result: MethodResult) -> tuple[int, int]:
    """(seeds that collapsed, seeds)."""
    return starved(result), len(result.scores)


def starved(result: MethodResult) -> int:
    """Seeds that collapsed by the paper's rule: some expert gets less than 1 % of the tokens.

    Received tokens count. Where every expert computes every token, the tokens it leads.
    """
    return sum(_starved(score, result.num_experts) for score in result.scores)


def _starved(score: SeedScore, num_experts: int) -> bool:
    return score.without_lead() if score.is_dense(num_experts) else score.collapsed_paper
