"""Claims of the paper as questions to results: what a verdict needs, and how it follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean

from grmoe.studies.intervals import plus_minus, student
from grmoe.studies.page import Claim, Verdict
from grmoe.studies.synthetic.evaluation import SeedScore
from grmoe.studies.synthetic.results import MethodResult, SettingResult

Answer = tuple[str, Verdict, str]
"""What was measured, the verdict, and the reason."""


class Found:
    """Results by setting and method."""

    def __init__(self, settings: dict[str, SettingResult]) -> None:
        self.settings = settings

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
        absent = [f"{m} ({s})" for s in self.settings for m in self.methods if found.get(s, m) is None]
        if absent:
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            return Claim(
                self.where, self.text, "", Verdict.OPEN, f"No results of {', '.join(absent[:3])}{more}."
            )
        return Claim(self.where, self.text, *self.decide(found))


def holds(condition: bool) -> Verdict:
    return Verdict.HOLDS if condition else Verdict.FAILS


def mean(result: MethodResult, figure: str) -> float:
    return fmean(getattr(score, figure) for score in result.scores)


def accuracy(result: MethodResult) -> str:
    """43.6 ± 0.8 %."""
    return f"{points([s.accuracy for s in result.scores])} %"


def points(values: Iterable[float]) -> str:
    """Mean of shares in per cent, with Student's interval."""
    values = [100 * v for v in values]
    return plus_minus(fmean(values), student(values), 1)


def paired(a: MethodResult, b: MethodResult, figure: str = "accuracy") -> list[float]:
    """a − b by seed, for the seeds that both have."""
    return [getattr(x, figure) - getattr(y, figure) for x, y in zip(a.scores, b.scores, strict=False)]


def interval(values: list[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean. A single seed says nothing: it is then the whole line."""
    half = student(values)
    half = float("inf") if half is None else half
    return fmean(values) - half, fmean(values) + half


def starved(result: MethodResult) -> int:
    """Seeds that collapsed by the paper's rule: some expert gets less than 1 % of the tokens.

    Received tokens count. Where every expert computes every token, the tokens it leads.
    """
    return sum(_starved(score, result.num_experts) for score in result.scores)


def _starved(score: SeedScore, num_experts: int) -> bool:
    return score.without_lead() if score.is_dense(num_experts) else score.collapsed_paper
