"""Many comparisons at once: chances from intervals, Holm's rule, and the table of both."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy import stats
from test_gates_study import RESULTS, models, put

from grmoe.studies import gates
from grmoe.studies.intervals import chance, holm
from grmoe.studies.many import kept, table
from grmoe.studies.models.recipes import GATES, base_of
from grmoe.studies.models.summary import Mean, mean

APART = [0.010, 0.011, 0.012, 0.013]
NEARLY = [0.001, 0.012, 0.010, 0.011]


@pytest.mark.parametrize("values", [APART, NEARLY, [-1.0, 2.0, 0.5], [-3.0, -3.2, -3.1]])
def test_the_chance_of_an_interval_is_that_of_students_test(values: list[float]) -> None:
    found = mean(values)
    assert found is not None
    assert found.half is not None
    assert chance(found.value, found.half, found.seeds) == pytest.approx(
        stats.ttest_1samp(values, 0.0).pvalue
    )
    assert (chance(0.1, 0.0, 3), chance(0.0, 0.0, 3)) == (0.0, 1.0)


def test_holms_rule() -> None:
    # Holm (1979): the smallest by four, the next by three, never below the one before, at most one.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_of_many_comparisons_fewer_are_left() -> None:
    family = {
        "apart": mean(APART),
        **{f"nearly {i}": mean(NEARLY) for i in range(5)},
        "none": mean([-1.0, 1.0, 0.1]),
    }
    assert all(gap is not None and gap.low > 0 for name, gap in family.items() if name != "none")
    count, apart, left = kept(family)
    assert (count, len(apart), left) == (7, 6, ["apart"])
    assert kept({name: family[name] for name in ("apart", "nearly 0")})[2] == [
        "apart",
        "nearly 0",
    ]  # as two, both
    few = {"two seeds": Mean(1.0, 0.1, 2), "one": Mean(1.0, None, 1), "nothing": None}
    assert kept(few) == (0, [], [])
    assert table("t", {"a": family, "b": few, "c": {"x": mean(APART)}}).rows == [
        ("a", "7", "6", "1", "apart"), ("b", "0", "0", "0", "–"), ("c", "1", "1", "1", "all"),
    ]  # fmt: skip


def test_gates_are_looked_at_together(tmp_path: Path) -> None:
    base = base_of("two", gates.STEPS)
    put(tmp_path, base, GATES["two"]["grmoe"], models([3.0, 3.1, 3.2]))
    put(tmp_path, base, GATES["two"]["vmf"], models([3.1, 3.2, 3.3]))
    put(tmp_path, base, GATES["two"]["softmax-bias"], models([3.1, 3.1, 3.1]))
    (found,) = [t for t in gates.STUDY.page(tmp_path).tables if t.title.startswith("Many comparisons")]
    assert found.rows[0][1:] == ("2", "1", "1", "vMF + bias (two of eight)")


def test_every_question_of_the_better_gate_is_counted() -> None:
    """The stored models: five gates in three settings are twelve comparisons with GrMoE."""
    page = gates.STUDY.page(RESULTS)
    (found,) = [t for t in page.tables if t.title.startswith("Many comparisons")]
    asked = [
        sum(start in claim.text for claim in page.claims) for start in ("is the better gate", "Half of the")
    ]
    assert [int(row[1]) for row in found.rows[:2]] == asked == [12, 8]
