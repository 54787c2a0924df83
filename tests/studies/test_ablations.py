"""Ablations: what decides whether the penalty prevents collapse, and which hinge is the best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_models_store import a_run

from grmoe.studies import ablations
from grmoe.studies.models import Store, Trained
from grmoe.studies.page import Verdict


def put(results: Path, name: str, loss: float = 3.0, collapsed: bool = False) -> None:
    """Three seeds."""
    runs = []
    for seed in range(3):
        run = a_run(seed, loss + seed / 10)
        runs.append(replace(run, rows=[replace(run.rows[0], collapsed_paper=collapsed)]))
    about = Trained(
        recipe=name, label=name, settings=(), config={}, data={"tokens": 1, "vocabulary": 8}, runs=runs
    )
    Store(results).add(ablations.BASE, about)


def verdict(results: Path, start: str) -> Verdict:
    return next(c.verdict for c in ablations.STUDY.page(results).claims if c.text.startswith(start))


@pytest.mark.parametrize(
    ("with_it", "without", "found"),
    [(False, True, Verdict.HOLDS), (True, True, Verdict.FAILS), (False, False, Verdict.FAILS)],
)
def test_the_penalty_prevents_collapse_if_none_is_left_with_it(
    tmp_path: Path, with_it: bool, without: bool, found: Verdict
) -> None:
    """Before, it was enough that a model without it collapses."""
    text = "Without the overlap penalty"
    put(tmp_path, "grmoe-paper", collapsed=with_it)
    assert verdict(tmp_path, text) is Verdict.OPEN
    put(tmp_path, "paper-gate-free", collapsed=without)
    put(tmp_path, "grmoe")
    put(tmp_path, "overlap-none")
    assert verdict(tmp_path, text) is found
    put(tmp_path, "overlap-none", collapsed=True)  # with our gate it prevents collapse
    assert verdict(tmp_path, text) is (found if found is Verdict.HOLDS else Verdict.CHANGED)


def test_the_papers_hinge_is_compared_with_the_papers_others(tmp_path: Path) -> None:
    for rho, loss in (("0.1", 3.05), ("0.3", 3.0), ("0.5", 3.05), ("0.8", 3.05)):
        put(tmp_path, f"overlap-paper-{rho}", loss)
    assert verdict(tmp_path, "ρ₀ = 0.3") is Verdict.HOLDS
    put(tmp_path, "overlap-paper-0.8", 3.0)  # a hinge that never acts
    assert verdict(tmp_path, "ρ₀ = 0.3") is Verdict.FAILS
