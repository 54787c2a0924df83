"""Ablations: what decides whether the penalty prevents collapse, where its hinge should lie, and which rank is best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_models_store import a_run

from grmoe.studies.ablations import STUDY, choices, penalty, ranks
from grmoe.studies.ablations.measures import unchanged
from grmoe.studies.ablations.recipes import (
    ALL,
    CHOICES,
    COPIES,
    FREE_16,
    GROUPS,
    PAPER_FORM,
    REFERENCE,
    SAME,
    SHOWN,
    UNHINGED,
)
from grmoe.studies.models import Run, Store, Trained
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


class Asked(dict[str, list[Run]]):
    """Models without any, which note the recipes that are looked at."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> list[Run]:
        self.names.add(name)
        return []


def put(
    results: Path,
    *names: str,
    seeds: int = 3,
    loss: float = 3.0,
    cv: float | Sequence[float] = 0.1,
    collapsed: bool = False,
    overlap: float | None = None,
    kappa: float | None = None,
) -> None:
    """Some seeds, with losses apart. cv: of all of them, or of each."""
    cvs = [cv] * seeds if isinstance(cv, float) else cv
    runs = []
    for seed in range(seeds):
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


@pytest.mark.parametrize("start", ["Without the overlap penalty", "κ > 10 is never reached"])
def test_a_hinge_that_never_acts_decides_without_chance(tmp_path: Path, start: str) -> None:
    """The paper's gate with and without such a penalty is one training: their difference is noise between runs."""
    with_it, without = PAPER_FORM
    put(tmp_path, "grmoe", cv=0.1, kappa=5.0)
    put(tmp_path, "overlap-none", cv=0.05, kappa=4.0)
    put(tmp_path, with_it, cv=0.8, kappa=2.0, overlap=0.131)
    put(tmp_path, without, cv=0.9, kappa=3.0, overlap=0.129)
    assert verdict(tmp_path, start) is FAILS
    assert (
        "the paper's gate: the hinge never acts: ρ_max is at most 0.131 in 6 models"
        in claim(tmp_path, start).ours
    )
    put(tmp_path, "overlap-none", cv=0.2, kappa=6.0)
    assert verdict(tmp_path, start) is CHANGED  # ours does act
    put(tmp_path, without, cv=0.9, kappa=3.0, overlap=0.31)  # so it may act where there is a penalty
    assert verdict(tmp_path, start) is HOLDS


def test_balancing_is_judged_by_collapse_and_shown_with_the_load(tmp_path: Path) -> None:
    start = "Auxiliary balancing"
    put(tmp_path, "grmoe-paper", cv=0.9, collapsed=True)
    put(tmp_path, "prior-paper", cv=0.3)
    assert verdict(tmp_path, start) is UNDECIDED  # none of three
    put(tmp_path, "prior-paper", cv=0.3, seeds=5)
    found = claim(tmp_path, start)
    assert found.verdict is CHANGED
    assert "the paper's gate: collapsed 3/3 (44–100 %), CV 0.900 ± 0.000; its prior in ours" in found.ours
    put(tmp_path, "grmoe-paper", cv=0.9, seeds=5)
    assert verdict(tmp_path, start) is HOLDS


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
    put(tmp_path, "grmoe", kappa=9.9)  # above 10 in two seeds
    put(tmp_path, "overlap-none", kappa=12.0)
    put(tmp_path, "grmoe-paper", kappa=9.9)
    put(tmp_path, "paper-gate-free", kappa=12.0)
    assert verdict(tmp_path, start) is FAILS  # before, "holds"


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


def test_the_papers_hinge_is_no_trade_off_if_it_never_acts(tmp_path: Path) -> None:
    """Then ρ₀ = 0.3, 0.5, 0.8 and none are one training, with one seed each beside those of none."""
    start = "ρ₀ = 0.3 is the best"
    put(tmp_path, "overlap-paper-0.1", loss=3.05, overlap=0.09)  # below its hinge, which acts from the start
    put(tmp_path, *UNHINGED[1:], loss=3.0, seeds=1, overlap=0.15)
    assert verdict(tmp_path, start) is OPEN
    put(tmp_path, "overlap-none", overlap=0.15, seeds=1)
    assert verdict(tmp_path, start) is OPEN  # before, four models of one seed were enough
    assert verdict(tmp_path, "The largest overlap") is OPEN
    put(tmp_path, "overlap-none", overlap=0.16)
    assert verdict(tmp_path, start) is verdict(tmp_path, "The largest overlap") is FAILS
    told = claim(tmp_path, start).ours
    assert told.startswith(
        "ρ₀ = 0.3, 0.5, 0.8 and none are one training, the hinge never acts: ρ_max is at most 0.160"
    )
    assert "in 6 models; ρ₀ = 0.1: loss +0.0500 ± 0.0000" in told
    put(tmp_path, "overlap-paper-0.8", seeds=1, overlap=0.3)
    assert verdict(tmp_path, start) is OPEN
    put(tmp_path, "overlap-paper-0.8", seeds=1)  # its overlap is not known
    assert verdict(tmp_path, start) is OPEN


def test_a_hinge_that_was_not_tried_is_not_idle(tmp_path: Path) -> None:
    """Before, models without a penalty said so alone."""
    put(tmp_path, "overlap-paper-0.1", loss=3.05, overlap=0.09)
    put(tmp_path, "overlap-none", overlap=0.16)
    for name in UNHINGED[1:]:
        assert verdict(tmp_path, "ρ₀ = 0.3 is the best") is OPEN
        put(tmp_path, name, seeds=1, overlap=0.15)
    assert verdict(tmp_path, "ρ₀ = 0.3 is the best") is FAILS


def test_a_choice_against_a_hinge_that_never_acts_is_one_against_no_penalty(tmp_path: Path) -> None:
    """It has three seeds with no job of its own."""
    text = "a hinge that is active, at half the random overlap, against the paper's ρ₀ = 0.3"
    put(tmp_path, "grmoe")
    put(tmp_path, *UNHINGED[1:], loss=3.2, seeds=1, overlap=0.2)
    put(tmp_path, "overlap-none", loss=3.1, overlap=0.4)
    rows = {row[0]: row for row in STUDY.page(tmp_path).tables[0].rows}
    assert rows[text][1:3] == ("1", "+0.2000")
    put(tmp_path, "overlap-none", loss=3.1, overlap=0.15)
    rows = {row[0]: row for row in STUDY.page(tmp_path).tables[0].rows}
    assert rows[f"{text}, which never acts: the models without a penalty"][1:3] == ("3", "+0.1000 ± 0.0000")


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
    """The ends are 8 and d/N = 64, as in the paper. At rank 64 the paper's models overfit."""
    start = "The best rank"
    put(tmp_path, "grmoe", "rank-8", "rank-16", loss=3.05)
    assert verdict(tmp_path, start) is OPEN
    put(tmp_path, "rank-32")
    assert verdict(tmp_path, start) is CHANGED
    assert "; minus rank 32: rank 8 +0.0500 ± 0.0000, rank 64 +0.05" in claim(tmp_path, start).ours
    put(tmp_path, "rank-1", "rank-128", loss=2.0)  # beyond the paper's range
    assert verdict(tmp_path, start) is CHANGED
    put(tmp_path, "rank-1", "rank-128", loss=4.0)
    put(tmp_path, "grmoe")  # as good as the best between the ends
    assert verdict(tmp_path, start) is UNDECIDED
    put(tmp_path, "grmoe", loss=2.9)
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
    assert verdict(tmp_path, "0 % collapse") is CHANGED  # the paper has no lines
    put(tmp_path, "rank-8", collapsed=True)
    assert verdict(tmp_path, "0 % collapse") is FAILS
    put(tmp_path, "rank-128", loss=2.0)
    assert claim(tmp_path, "The best rank").ours.count("rank 128: -1.0") == 1  # shown


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


def test_seeds_go_where_they_decide() -> None:
    """Before, every row had three: too few for "it makes no difference", and too many for rows that nobody asks for."""
    seeds = Counter(job.recipe.name for job in STUDY.jobs())
    assert len(seeds) == len(ALL)
    asked = Asked()
    for part in (penalty, ranks, choices):
        part.claims(asked)
    asked.names |= {name for choice in CHOICES for name in (choice.without, choice.has)}
    shown, copies = {r.name for r in SHOWN}, {r.name for r in COPIES}
    # rank 128 stands in a claim, and in no verdict
    assert seeds.keys() - asked.names == shown - {"rank-128"}
    assert {seeds[name] for name in shown | copies} == {1}
    assert all(seeds[name] >= 3 for name in seeds.keys() - shown - copies)
    for choice in CHOICES:  # the table has three seeds, those of no penalty if the paper's hinge never acts
        assert seeds[choice.without] >= 3 or choice.without in UNHINGED
    assert {name for name, count in seeds.items() if count == 5} == {recipe.name for recipe in SAME}
    same = {"grmoe", "beta-0.005", "beta-0.02", "init-pca", "init-identity", "pairs-8", "pairs-16"}
    assert {recipe.name for recipe in SAME} == same | {
        f"grmoe-n{n}{end}" for n in (16, 32) for end in ("", "-all-pairs")
    }


def test_rows_that_are_only_shown_wait_for_the_others() -> None:
    """They have the last seed of the default, from which they differ by seed."""
    jobs = STUDY.jobs()
    last = jobs[-len(SHOWN) :]
    assert [job.recipe for job in last] == list(SHOWN)
    assert {job.seed for job in last} == {max(job.seed for job in jobs if job.recipe == REFERENCE)}


def test_rows_have_names_and_headings_no_greek_capitals(tmp_path: Path) -> None:
    tables = STUDY.page(tmp_path).tables
    titles = [table.title for table in tables]
    assert "Start of κ; difference to the default by seed" in titles
    assert not any(title.startswith("Κ") for title in titles)
    labels = [label for group in GROUPS for label, _ in group.rows]
    assert "ρ₀ = 0.1 of the rank (the paper's unit)" in labels
    assert not any(label.startswith(("paper-", "random-")) for label in labels)
    assert len({recipe.name for recipe in ALL}) == len(ALL)
