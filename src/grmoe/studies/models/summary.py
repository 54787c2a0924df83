"""Means over seeds, differences by seed, and the tables made of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from grmoe.studies.intervals import out_of, plus_minus, student
from grmoe.studies.models.store import Row, Run
from grmoe.tables import Table

VALIDATION = "validation"


@dataclass(frozen=True)
class Mean:
    """Over seeds, with half the width of its 95 % interval (None for one seed)."""

    value: float
    half: float | None
    seeds: int

    def show(self, digits: int, sign: str = "") -> str:
        return plus_minus(self.value, self.half, digits, sign)

    @property
    def low(self) -> float:
        return self.value - (math.inf if self.half is None else self.half)

    @property
    def high(self) -> float:
        return self.value + (math.inf if self.half is None else self.half)


def mean(values: Iterable[float]) -> Mean | None:
    """None without values."""
    given = list(values)
    return Mean(statistics.fmean(given), student(given), len(given)) if given else None


def rows_by_seed(runs: Sequence[Run], text: str = VALIDATION, setting: str | None = None) -> dict[int, Row]:
    """The row of each seed that has it; by default at the setting of training."""
    found = {run.seed: run.row(text, setting) for run in runs}
    return {seed: row for seed, row in found.items() if row is not None}


def mean_of(
    runs: Sequence[Run], value: Callable[[Row], float], text: str = VALIDATION, setting: str | None = None
) -> Mean | None:
    return mean(value(row) for row in rows_by_seed(runs, text, setting).values())


def difference(
    runs: Sequence[Run],
    others: Sequence[Run],
    text: str = VALIDATION,
    setting: str | None = None,
    other_setting: str | None = None,
) -> Mean | None:
    """Loss of `runs` minus loss of `others`, by seed. None where they share no seed."""
    mine, theirs = rows_by_seed(runs, text, setting), rows_by_seed(others, text, other_setting)
    return mean(row.loss - theirs[seed].loss for seed, row in mine.items() if seed in theirs)


def collapsed(runs: Sequence[Run], paper: bool = False, setting: str | None = None) -> tuple[int, int]:
    """(models in which an expert collapsed, models that say); by default at the setting of training.

    paper: by the 1 % rule.
    """
    rows = rows_by_seed(runs, setting=setting).values()
    known = [row.collapsed_paper if paper else row.collapsed for row in rows]
    return sum(bool(k) for k in known if k is not None), sum(k is not None for k in known)


def show_mean(found: Mean | None, digits: int, sign: str = "") -> str:
    return "–" if found is None else found.show(digits, sign)


def texts_of(runs: Iterable[Run]) -> list[str]:
    """Names of the texts that models were measured on, validation first."""
    names = dict.fromkeys(row.text for run in runs for row in run.rows)
    return sorted(names, key=lambda name: name != VALIDATION)


def short_name(text: str) -> str:
    """Of a text, for tables: openwebtext, not openwebtext.jsonl.xz."""
    return text.partition(".")[0] or text


HEADINGS = (
    "seeds", "experts per token", "loss", "perplexity", "difference", "load CV", "min load", "collapsed", "< 1 %", "H",
)  # fmt: skip


def model_table(
    title: str,
    models: Sequence[tuple[str, Sequence[Run], str | None]],
    against: tuple[Sequence[Run], str | None] | None = None,
    text: str = VALIDATION,
    first: str = "model",
) -> Table:
    """One line per (label, models, setting); setting None: as trained. against: (models, setting) to differ from."""
    table = Table(title, [first, *HEADINGS])
    for label, runs, setting in models:
        rows = list(rows_by_seed(runs, text, setting).values())
        if not rows:
            table.add(label, *["–"] * len(HEADINGS))
            continue
        other = None if against is None else difference(runs, against[0], text, setting, against[1])
        same = against is not None and runs is against[0] and setting == against[1]
        paper = [row.collapsed_paper for row in rows if row.collapsed_paper is not None]
        entropies = [row.entropy for row in rows if row.entropy is not None]
        table.add(
            label,
            str(len(rows)),
            f"{statistics.fmean(row.experts_per_token for row in rows):.2f}",
            show_mean(mean(row.loss for row in rows), 4),
            show_mean(mean(math.exp(row.loss) for row in rows), 2),
            "–" if same else show_mean(other, 4, "+"),
            show_mean(mean(row.load_cv for row in rows), 3),
            f"{min(row.min_load for row in rows):.2f}",
            out_of(sum(row.collapsed for row in rows), len(rows)),
            f"{sum(paper)}/{len(paper)}" if paper else "–",
            f"{statistics.fmean(entropies):.2f}" if entropies else "–",
        )
    return table
