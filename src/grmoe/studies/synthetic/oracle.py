"""The Bayes classifier by rank: the most that any router can reach. The paper does not state its rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from grmoe.files import read_json, write_file
from grmoe.runs.results import plain
from grmoe.studies.synthetic.task import EASY, HARD, Setting, Task, least_overlap
from grmoe.tables import Table

NAME = "oracle.json"
# 27 is the largest rank at which eight subspaces of R^128 can have the easy setting's mean overlap 0.1.
RANKS = (4, 8, 16, 24, 27, 32, 48)


@dataclass(frozen=True)
class OracleRow:
    """One rank: accuracy of the Bayes classifier, None where no frames have the wanted overlap."""

    rank: int
    easy: float | None
    hard: float | None


def measure(
    ranks: tuple[int, ...] = RANKS, seeds: int = 5, tokens: int = 4096, dim: int = 128
) -> list[OracleRow]:
    """Always on the CPU: a few seconds, and the same numbers everywhere."""
    return [
        OracleRow(k, _accuracy(EASY, k, seeds, tokens, dim), _accuracy(HARD, k, seeds, tokens, dim))
        for k in ranks
    ]


def _accuracy(setting: Setting, rank: int, seeds: int, tokens: int, dim: int) -> float | None:
    if least_overlap(dim, rank, 8) > setting.rho:
        return None
    right = 0.0
    for seed in range(seeds):  # one at a time: little memory
        task = Task(setting, 1, dim=dim, rank=rank, seed=seed)
        x, label = task.tokens(tokens)
        right += float((task.oracle(x) == label).double().mean())
    return right / seeds


def write(rows: list[OracleRow], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "what": "Accuracy of the Bayes classifier by rank",
        "rows": plain([asdict(r) for r in rows], 6),
    }
    write_file(folder / NAME, f"{json.dumps(content)}\n".encode())
    return folder / NAME


def read(folder: Path) -> list[OracleRow]:
    """Empty if it was not measured."""
    if not (folder / NAME).is_file():
        return []
    return [OracleRow(**row) for row in read_json(folder / NAME)["rows"]]


def table(rows: list[OracleRow]) -> Table:
    shown = Table(
        "Accuracy of the Bayes classifier by rank k, % (–: no frames have this overlap)",
        ["k", "easy", "hard"],
    )
    for row in rows:
        cells = ["–" if value is None else f"{100 * value:.1f}" for value in (row.easy, row.hard)]
        shown.add(str(row.rank), *cells)
    return shown
