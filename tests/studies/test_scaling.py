"""More experts: which differences decide, and that a part of the baselines decides nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from test_models_store import a_run

from grmoe.studies import scaling
from grmoe.studies.models import Run, Store, Trained
from grmoe.studies.page import Verdict


def an_even_run(seed: int, loss: float) -> Run:
    run = a_run(seed, loss)
    return replace(run, rows=[replace(run.rows[0], load_cv=0.05)])


def put(results: Path, method: str, losses: list[float]) -> None:
    """The same three models at every N."""
    for count in scaling.COUNTS:
        name = scaling.recipe_of(method, count).name
        runs = [an_even_run(seed, loss) for seed, loss in enumerate(losses)]
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


def test_the_defaults_are_judged_by_means_at_every_count(tmp_path: Path) -> None:
    def verdict() -> Verdict:
        claims = scaling.STUDY.page(tmp_path).claims
        return next(claim.verdict for claim in claims if claim.text.startswith("With its defaults"))

    put(tmp_path, scaling.DEFAULT, [3.0, 3.1, 3.2])
    assert verdict() is Verdict.OPEN
    for method in scaling.BASELINES:
        put(tmp_path, method, [3.0, 3.2, 3.11])  # a higher mean, not in every seed
    assert verdict() is Verdict.HOLDS
    put(tmp_path, "softmax", [3.0, 3.1, 3.19])
    assert verdict() is Verdict.FAILS


def test_collapse_worsens_if_no_step_is_down_and_the_last_is_above_the_first() -> None:
    assert scaling._worsens({8: (0, 3), 16: (1, 3), 32: (1, 3)}) is Verdict.HOLDS
    assert scaling._worsens({8: (1, 3), 16: (0, 3), 32: (2, 3)}) is Verdict.FAILS
    assert scaling._worsens({8: (0, 3), 16: (0, 3), 32: (0, 3)}) is Verdict.FAILS
    assert scaling._worsens({8: (0, 3), 16: (1, 2), 32: (1, 3)}) is Verdict.OPEN
