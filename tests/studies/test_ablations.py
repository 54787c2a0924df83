"""Ablations: what decides whether the penalty prevents collapse, where its hinge should lie, and which rank is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_models_store import a_run

from grmoe.studies.ablations import STUDY
from grmoe.studies.ablations.measures import unchanged
from grmoe.studies.ablations.recipes import ALL, FREE_16, GROUPS
from grmoe.studies.models import Store, Trained
from grmoe.studies.models.summary import Mean
from grmoe.studies.page import Claim, Verdict
from grmoe.studies.scaling import BASE

HOLDS, CHANGED, FAILS, UNDECIDED, OPEN = (
    Verdict.HOLDS,
    Verdict.CHANGED,
    Verdict.FAILS,
    Verdict.UNDECIDED,
    Verdict.OPEN,
)


def put(
    results: Path,
    *names: str,
    loss: float = 3.0,
    cv: float | Sequence[float] = 0.1,
    collapsed: bool = False,
    overlap: float | None = None,
    kappa: float | None = None,
) -> None:
    """Three seeds, with losses apart. cv: of all of them, or of each."""
    cvs = [cv] * 3 if isinstance(cv, float) else cv
    runs = []
    for seed in range(3):
        kappas = None if kappa is None else [[1.0, 2.0], [1.5, kappa + seed / 10]]
        run = a_run(seed, loss + seed / 10, max_overlap=overlap, kappa=kappas)
        rows = [replace(run.rows[0], collapsed_paper=collapsed, load_cv=cvs[seed])]
        runs.append(replace(run, rows=rows))
    for name in names:
        about = Trained(
            recipe=name, label=name, settings=(), config={}, data={"tokens": 1, "vocabulary": 8}, runs=runs
        )
        Store(results).add(BASE, about)


def claim(results: Path, start: str) -> Claim:
    (found,) = (c for c in STUDY.page(results).claims if c.text.startswith(start))
    return found


def verdict(results: Path, start: str) -> Verdict:
    return claim(results, start).verdict


@pytest.mark.parametrize(
    ("cv", "collapsed", "found"),
    [
        ((0.2, 0.21, 0.19), False, HOLDS),  # whether or not a seed collapses without it
        ((0.2, 0.21, 0.19), True, FAILS),  # a seed collapses with it
        ((0.3, 0.05, 0.1), False, UNDECIDED),
        ((0.05, 0.06, 0.05), False, FAILS),
    ],
)
def test_the_penalty_prevents_collapse_if_the_load_is_less_even_without_it(
    tmp_path: Path, cv: Sequence[float], collapsed: bool, found: Verdict
) -> None:
    text = "Without the overlap penalty"
    put(tmp_path, "grmoe", "overlap-none")  # our gate does not care
    put(tmp_path, "grmoe-paper", collapsed=collapsed)
    assert verdict(tmp_path, text) is OPEN
    put(tmp_path, "paper-gate-free", cv=cv)
    assert verdict(tmp_path, text) is (UNDECIDED if found is FAILS else found)
    put(tmp_path, "overlap-none", cv=0.05)
    assert verdict(tmp_path, text) is found
    put(tmp_path, "overlap-none", cv=0.2)
    assert verdict(tmp_path, text) is (HOLDS if found is HOLDS else CHANGED)


def test_the_penalty_is_tried_with_16_experts_too(tmp_path: Path) -> None:
    assert "routing.overlap_weight=0" in FREE_16.settings
    assert "model.num_experts=16" in FREE_16.settings
    put(tmp_path, "grmoe-n16")
    assert verdict(tmp_path, "The same at 1.3B") is OPEN
    put(tmp_path, FREE_16.name, cv=0.2)
    assert verdict(tmp_path, "The same at 1.3B") is CHANGED


def test_the_penalty_keeps_kappa_low_if_the_largest_is_higher_without_it(tmp_path: Path) -> None:
    start = "κ > 10 is never reached"
    put(tmp_path, "grmoe", kappa=5.0)
    put(tmp_path, "overlap-none", kappa=7.0)
    assert verdict(tmp_path, start) is OPEN  # it may hold for the paper's gate
    put(tmp_path, "grmoe-paper", "paper-gate-free", kappa=2.5)
    assert verdict(tmp_path, start) is CHANGED
    assert "ours: 7.10 ± 0.25 without, 5.10 ± 0.25 with it, difference +2.00" in claim(tmp_path, start).ours
    put(tmp_path, "overlap-none", kappa=4.0)
    assert verdict(tmp_path, start) is UNDECIDED
    put(tmp_path, "paper-gate-free", kappa=2.1)
    assert verdict(tmp_path, start) is FAILS
    put(tmp_path, "paper-gate-free", kappa=3.0)
    assert verdict(tmp_path, start) is HOLDS


def test_the_papers_hinge_is_compared_with_the_papers_others(tmp_path: Path) -> None:
    """In loss and load: it fails only if another is better in both."""
    put(tmp_path, *(f"overlap-paper-{rho}" for rho in ("0.1", "0.5", "0.8")), loss=3.05)
    put(tmp_path, "overlap-paper-0.3")
    assert verdict(tmp_path, "ρ₀ = 0.3 is the best") is CHANGED
    put(tmp_path, "overlap-paper-0.8")  # a hinge that never acts
    assert verdict(tmp_path, "ρ₀ = 0.3 is the best") is UNDECIDED
    put(tmp_path, "overlap-paper-0.8", loss=2.9, cv=0.2)  # better in loss alone
    assert verdict(tmp_path, "ρ₀ = 0.3 is the best") is UNDECIDED
    put(tmp_path, "overlap-paper-0.8", loss=2.9, cv=0.05)
    assert verdict(tmp_path, "ρ₀ = 0.3 is the best") is FAILS


def test_load_and_overlap_follow_the_hinge(tmp_path: Path) -> None:
    overlaps = {"paper-0.1": 0.1, "paper-0.3": 0.25, "paper-0.5": 0.5, "paper-0.8": 0.7, "none": 0.75}
    for name, overlap in overlaps.items():
        put(tmp_path, f"overlap-{name}", cv=overlap / 4, overlap=overlap)
    assert verdict(tmp_path, "A looser hinge") is CHANGED
    assert verdict(tmp_path, "The largest overlap") is CHANGED
    put(tmp_path, "overlap-none", cv=0.02, overlap=0.66)  # 0.06 from the paper's
    assert verdict(tmp_path, "A looser hinge") is FAILS
    assert verdict(tmp_path, "The largest overlap") is FAILS


def test_ten_percent_of_random_is_arithmetic(tmp_path: Path) -> None:
    found = claim(tmp_path, "ρ₀ = 0.3 corresponds")
    assert found.verdict is FAILS
    assert found.ours == "ρ₀ k_r = 14.4, 4.8 times 3.0"


@pytest.mark.parametrize(
    ("value", "half", "found"),
    [
        (0.004, 0.001, HOLDS),
        (0.004, 0.006, HOLDS),  # the mean is small, and so is the interval
        (0.004, 0.008, UNDECIDED),
        (0.001, 0.05, UNDECIDED),
        (0.007, 0.003, UNDECIDED),
        (-0.01, 0.003, FAILS),
    ],
)
def test_a_small_change_has_a_small_interval(value: float, half: float, found: Verdict) -> None:
    assert unchanged(Mean(value, half, 3), 0.0055) is found
    assert unchanged(Mean(value, half, 2), 0.0055) is unchanged(None, 0.0055) is OPEN


@pytest.mark.parametrize(
    ("start", "names"),
    [("β = .005", ("beta-0.005", "beta-0.02")), ("Haar, PCA", ("init-pca", "init-identity"))],
)
def test_robust_settings_keep_loss_and_experts(tmp_path: Path, start: str, names: tuple[str, ...]) -> None:
    put(tmp_path, "grmoe", *names)
    assert verdict(tmp_path, start) is CHANGED
    put(tmp_path, names[-1], collapsed=True)
    assert verdict(tmp_path, start) is FAILS
    put(tmp_path, names[-1], loss=3.01)
    assert verdict(tmp_path, start) is FAILS


def test_frames_and_pairs_keep_the_load(tmp_path: Path) -> None:
    many = [f"grmoe-n{n}{end}" for n in (16, 32) for end in ("", "-all-pairs")]
    put(tmp_path, "grmoe", "init-pca", "init-identity", "pairs-8", "pairs-16", *many)
    for start, name in (("Haar, PCA", "init-pca"), ("A sample of pairs", "grmoe-n32")):
        assert verdict(tmp_path, start) is CHANGED
        put(tmp_path, name, cv=0.109)
        assert verdict(tmp_path, start) is CHANGED
        put(tmp_path, name, cv=0.111)
        assert verdict(tmp_path, start) is FAILS


def test_the_best_rank_is_in_the_middle_if_both_ends_are_worse(tmp_path: Path) -> None:
    start = "The best rank"
    put(tmp_path, "grmoe", "rank-8", "rank-16", "rank-128", loss=3.05)
    assert verdict(tmp_path, start) is OPEN
    put(tmp_path, "rank-32")
    assert verdict(tmp_path, start) is CHANGED
    assert "; minus rank 32: rank 8 +0.0500 ± 0.0000, rank 128 +0.05" in claim(tmp_path, start).ours
    put(tmp_path, "rank-128")  # as good as the best between the ends
    assert verdict(tmp_path, start) is UNDECIDED
    put(tmp_path, "rank-128", loss=2.9)
    assert verdict(tmp_path, start) is FAILS
    put(tmp_path, "rank-1", loss=2.0)  # not one of the paper's
    assert verdict(tmp_path, start) is FAILS


def test_ranks_of_one_and_of_d_over_n(tmp_path: Path) -> None:
    put(tmp_path, "grmoe", loss=3.005)
    put(tmp_path, "rank-8", "rank-16", "rank-32", "rank-128")
    assert verdict(tmp_path, "The heuristic") is CHANGED  # 0.005 nats
    assert verdict(tmp_path, "Subspaces of higher rank") is OPEN
    put(tmp_path, "rank-1", loss=3.1)
    assert verdict(tmp_path, "Subspaces of higher rank") is CHANGED
    assert claim(tmp_path, "0 % collapse").ours.startswith("0/18 in all")
    put(tmp_path, "grmoe", loss=3.006)
    assert verdict(tmp_path, "The heuristic") is FAILS
    put(tmp_path, "rank-1", loss=2.9, collapsed=True)
    assert verdict(tmp_path, "Subspaces of higher rank") is FAILS
    assert verdict(tmp_path, "0 % collapse") is FAILS


def test_a_matrix_does_not_improve_if_it_is_not_better(tmp_path: Path) -> None:
    start = "A full N × N matrix"
    put(tmp_path, "grmoe-amortised")
    put(tmp_path, "amortiser-matrix", loss=3.1)
    assert verdict(tmp_path, start) is CHANGED
    put(tmp_path, "amortiser-matrix", loss=2.995)  # lower by .005 nats in every seed: .0055 are allowed
    assert verdict(tmp_path, start) is CHANGED
    put(tmp_path, "amortiser-matrix", loss=2.99)
    assert verdict(tmp_path, start) is FAILS


def test_the_manifold_matters_if_both_projections_are_worse(tmp_path: Path) -> None:
    """Before, a QR decomposition after each step decided alone."""
    start = "Training on the manifold"
    put(tmp_path, "grmoe")
    put(tmp_path, "optimiser-projected", loss=3.1)
    assert verdict(tmp_path, start) is OPEN
    put(tmp_path, "optimiser-qr", loss=3.05)
    assert verdict(tmp_path, start) is CHANGED
    assert "QR frame: +0.0500" in claim(tmp_path, start).ours
    put(tmp_path, "optimiser-qr")
    assert verdict(tmp_path, start) is UNDECIDED
    put(tmp_path, "optimiser-qr", loss=2.9)
    assert verdict(tmp_path, start) is FAILS


def test_random_budgets_are_shown_against_full_ones(tmp_path: Path) -> None:
    """Every row is the loss without a choice minus that with it."""
    put(tmp_path, "grmoe")
    put(tmp_path, "token-mass", "overlap-none", loss=3.1)
    rows = {row[0]: row for row in STUDY.page(tmp_path).tables[0].rows}
    assert rows["an overlap penalty"][2] == "+0.1000 ± 0.0000"
    assert rows["random budgets in training, the default of `grmoe train`"][2] == "-0.1000 ± 0.0000"


def test_rows_have_names_and_headings_no_greek_capitals(tmp_path: Path) -> None:
    tables = STUDY.page(tmp_path).tables
    titles = [table.title for table in tables]
    assert "Start of κ; difference to the default by seed" in titles
    assert not any(title.startswith("Κ") for title in titles)
    labels = [label for group in GROUPS for label, _ in group.rows]
    assert "ρ₀ = 0.1 of the rank (the paper's unit)" in labels
    assert not any(label.startswith(("paper-", "random-")) for label in labels)
    assert len({recipe.name for recipe in ALL}) == len(ALL)
