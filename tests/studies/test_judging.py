"""From numbers to verdicts: an interval on one side decides, one that includes zero does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grmoe.studies.judging import (
    about_at_most,
    above,
    absent,
    all_of,
    any_of,
    at_most,
    below,
    changed,
    happen_at,
    happens,
    in_doubt,
    narrower,
    never,
    not_above,
    not_worse,
    with_change,
    within,
)
from grmoe.studies.models.summary import Mean
from grmoe.studies.page import Verdict

HOLDS, CHANGED, FAILS = Verdict.HOLDS, Verdict.CHANGED, Verdict.FAILS
UNDECIDED, OPEN = Verdict.UNDECIDED, Verdict.OPEN


@pytest.mark.parametrize(
    ("gap", "lower", "higher", "said"),
    [
        (Mean(-0.1, 0.05, 3), HOLDS, FAILS, "The interval is below zero."),
        (Mean(0.1, 0.05, 3), FAILS, HOLDS, "The interval is above zero."),
        (Mean(-0.1, 0.2, 3), UNDECIDED, UNDECIDED, "The interval includes zero."),
        (Mean(0.0, 0.0, 3), UNDECIDED, UNDECIDED, "The interval includes zero."),
        (Mean(-0.1, 0.05, 2), OPEN, OPEN, "Only 2 of at least 3 seeds."),
        (None, OPEN, OPEN, "Nothing measured yet."),
    ],
)
def test_the_sign_of_a_difference(gap: Mean | None, lower: Verdict, higher: Verdict, said: str) -> None:
    assert (below(gap), above(gap), in_doubt(gap)) == (lower, higher, said)


def test_not_above() -> None:
    assert not_above(Mean(0.1, 0.2, 3)) is FAILS
    assert not_above(Mean(-0.1, 0.2, 3)) is HOLDS
    assert not_above(Mean(0.1, 0.2, 3), 0.1) is HOLDS
    assert not_above(Mean(0.1, 0.05, 3)) is FAILS
    assert not_above(Mean(0.1, 0.05, 3), margin=0.06) is FAILS


def test_not_worse() -> None:
    assert not_worse(Mean(0.1, 0.05, 3), 1.0) is FAILS  # however small: it is worse
    assert not_worse(Mean(0.1, 0.2, 3), 0.35) is HOLDS
    assert not_worse(Mean(0.1, 0.2, 3), 0.25) is UNDECIDED
    assert not_worse(Mean(0.1, 0.05, 2), 1.0) is OPEN
    assert not_worse(None, 1.0) is OPEN


def test_at_most() -> None:
    assert at_most(Mean(0.1, 0.05, 3), 0.2) is HOLDS
    assert at_most(Mean(0.1, 0.05, 3), 0.12) is UNDECIDED
    assert at_most(Mean(0.1, 0.05, 3), 0.04) is FAILS
    assert at_most(Mean(0.1, 0.05, 2), 0.2) is at_most(None, 0.2) is OPEN


def test_within() -> None:
    assert within(Mean(0.1, 0.2, 3), 0.35) is HOLDS
    assert within(Mean(0.1, 0.2, 3), 0.2) is UNDECIDED
    assert within(Mean(-0.5, 0.2, 3), 0.2) is FAILS
    assert within(Mean(0.5, 0.2, 3), 0.2) is FAILS
    assert within(replace(Mean(0.1, 0.2, 3), seeds=2), 0.35) is OPEN


def test_never() -> None:
    assert never((0, 5)) is HOLDS
    assert never((0, 3)) is UNDECIDED  # half of all seeds might
    assert never((0, 3), (0, 3)) is HOLDS
    assert never((0, 3), (1, 3)) is FAILS
    assert never((0, 9), (0, 2)) is OPEN
    assert never((1, 1)) is FAILS
    assert never((0, 2)) is OPEN


def test_absent() -> None:
    assert [absent((0, 3)), absent((1, 1)), absent((0, 3), (0, 2))] == [HOLDS, FAILS, OPEN]


def test_happens() -> None:
    assert [happens(count) for count in ((1, 1), (0, 3), (0, 2))] == [HOLDS, FAILS, OPEN]


def test_none_refutes_a_share_only_where_that_is_a_surprise() -> None:
    assert happen_at([((0, 5), 0.4)]) is UNDECIDED  # 0.6⁵ is 8 %
    assert happen_at([((0, 6), 0.4)]) is FAILS  # and 0.6⁶ below 5 %
    assert happen_at([((0, 5), 0.4), ((0, 5), 0.2)]) is FAILS
    assert happen_at([((1, 6), 0.4), ((0, 5), 0.2)]) is UNDECIDED
    assert happen_at([((1, 6), 0.4), ((1, 5), 0.2)]) is HOLDS
    assert happen_at([((1, 6), 0.4), ((1, 2), 0.2)]) is OPEN


def test_of_several_parts() -> None:
    assert all_of([HOLDS, OPEN]) is OPEN
    assert all_of([OPEN, FAILS]) is FAILS
    assert all_of([HOLDS, UNDECIDED, CHANGED]) is UNDECIDED
    assert all_of([HOLDS, CHANGED]) is CHANGED
    assert all_of([]) is OPEN
    assert any_of([FAILS, UNDECIDED, HOLDS]) is HOLDS
    assert any_of([FAILS, UNDECIDED]) is UNDECIDED
    assert any_of([FAILS, FAILS]) is FAILS
    assert any_of([]) is OPEN


def test_a_claim_in_the_papers_form_and_in_ours() -> None:
    assert [with_change(HOLDS, v) for v in (HOLDS, FAILS, OPEN)] == [HOLDS] * 3
    assert [with_change(v, HOLDS) for v in (FAILS, UNDECIDED)] == [CHANGED] * 2
    assert with_change(OPEN, HOLDS) is OPEN  # it may hold without a change
    assert [with_change(FAILS, v) for v in (FAILS, UNDECIDED, OPEN)] == [FAILS, UNDECIDED, OPEN]
    assert with_change(UNDECIDED, FAILS) is UNDECIDED
    assert [changed(v) for v in (HOLDS, FAILS)] == [CHANGED, FAILS]


def test_a_narrower_spread_needs_its_interval_below_one() -> None:
    wide = [0.0, 10.0, 20.0, 30.0, 40.0]
    assert narrower([0.0, 1.0], wide) == ("", OPEN)
    # F(4, 4) has the 97.5 % quantile 9.605: a ratio of standard deviations must be below 1/3.1.
    assert narrower([v / 4 for v in wide], wide) == ("ratio 0.25 (0.08 to 0.77)", HOLDS)
    assert narrower([v / 3 for v in wide], wide)[1] is UNDECIDED
    assert narrower([v * 4 for v in wide], wide)[1] is FAILS


def test_a_sentence_after_a_colon_begins_small() -> None:
    """Before, "On the energies: The interval includes zero."."""
    gap = Mean(-0.1, 0.05, 3)
    assert in_doubt(gap) == "The interval is below zero."
    assert in_doubt(gap, "At N = 8") == "At N = 8: the interval is below zero."
    assert in_doubt(Mean(0.1, 0.05, 3)) == "The interval is above zero."
    assert in_doubt(Mean(0.1, 0.2, 3)) == "The interval includes zero."
    assert in_doubt(Mean(0.1, 0.2, 2), "Of ours") == "Of ours: only 2 of at least 3 seeds."
    assert in_doubt(None) == "Nothing measured yet."


@pytest.mark.parametrize(
    ("cost", "half", "found"),
    [
        (0.011, 0.008, HOLDS),  # equal to the limit
        (0.011, 0.012, UNDECIDED),
        (0.005, 0.002, HOLDS),
        (0.005, 0.02, UNDECIDED),  # a mean alone would pass
        (0.012, 0.002, UNDECIDED),
        (0.02, 0.002, FAILS),
    ],
)
def test_about_at_most(cost: float, half: float, found: Verdict) -> None:
    assert about_at_most(Mean(cost, half, 3), 0.011) is found
    assert about_at_most(Mean(cost, half, 2), 0.011) is about_at_most(None, 0.011) is OPEN
