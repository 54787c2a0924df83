"""More experts: which differences decide, and that a part of the baselines decides nothing."""

from __future__ import annotations

from pathlib import Path

from test_models_store import a_run

from grmoe.studies import scaling
from grmoe.studies.models import Store, Trained
from grmoe.studies.page import Verdict


def put(results: Path, method: str, losses: list[float]) -> None:
    """The same three models at every N."""
    for count in scaling.COUNTS:
        name = scaling.recipe_of(method, count).name
        runs = [a_run(seed, loss) for seed, loss in enumerate(losses)]
        data = {"tokens": 1, "vocabulary": 8}
        about = Trained(recipe=name, label=name, settings=(), config={}, data=data, runs=runs)
        Store(results).add(scaling.BASE, about)


def verdicts(results: Path) -> tuple[Verdict, Verdict]:
    """(lowest perplexity, no retuning)."""
    claims = {claim.text: claim.verdict for claim in scaling.STUDY.page(results).claims}
    lowest, transfer = (
        next(v for text, v in claims.items() if start in text) for start in ("the lowest", "transfer")
    )
    return lowest, transfer


def test_every_baseline_counts(tmp_path: Path) -> None:
    """Before, the measured ones alone decided, and of those the one with the largest mean."""
    put(tmp_path, "grmoe", [3.0, 3.1, 3.2])
    put(tmp_path, "softmax", [3.1, 3.2, 3.31])
    assert verdicts(tmp_path) == (Verdict.OPEN, Verdict.OPEN)
    for method in scaling.BASELINES[1:]:
        put(tmp_path, method, [3.1, 3.2, 3.31])
    assert verdicts(tmp_path) == (Verdict.HOLDS, Verdict.HOLDS)
    put(tmp_path, "vmf", [3.0, 3.6, 3.3])  # a larger gap, but its interval includes zero
    assert verdicts(tmp_path) == (Verdict.FAILS, Verdict.HOLDS)
    put(tmp_path, "vmf", [2.99, 3.2, 3.1])  # a little better, within its interval
    assert verdicts(tmp_path) == (Verdict.FAILS, Verdict.HOLDS)
    put(tmp_path, "vmf", [2.9, 3.0, 3.11])
    assert verdicts(tmp_path) == (Verdict.FAILS, Verdict.FAILS)
