"""Correlations and information, against other implementations and against planted truths."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from grmoe.analyze.statistics import entropy, information, mutual_information, pearson, shares


@pytest.mark.parametrize("n", [4, 9, 60])
def test_pearson_and_its_interval_are_scipys(n: int) -> None:
    draw = np.random.default_rng(n)
    x = draw.normal(size=n)
    y = 0.5 * x + draw.normal(size=n)
    want = stats.pearsonr(x, y)
    low, high = want.confidence_interval(0.95)
    found = pearson(x, y)
    assert found.n == n
    assert (found.r, found.lower, found.upper) == pytest.approx((want.statistic, low, high), abs=1e-12)


def test_within_groups_is_the_partial_correlation() -> None:
    """Groups that differ in both variables correlate them; within groups nothing is left but what is there."""
    draw = np.random.default_rng(0)
    groups = np.repeat(np.arange(5), 12)
    x, y = draw.normal(size=60), draw.normal(size=60)
    apart = pearson(x + 10 * groups, y + 10 * groups)
    assert apart.r is not None
    assert apart.r > 0.95
    found = pearson(x + 10 * groups, y + 10 * groups, groups)
    dummies = np.eye(5)[groups]
    residuals = [v - dummies @ np.linalg.lstsq(dummies, v, rcond=None)[0] for v in (x, y)]
    assert found.r == pytest.approx(stats.pearsonr(*residuals).statistic, abs=1e-12)
    assert found.upper is not None
    # Fisher's z with four means more taken off than one sample has.
    assert math.atanh(found.upper) - math.atanh(found.r) == pytest.approx(
        stats.norm.ppf(0.975) / math.sqrt(60 - 3 - 4)
    )


def test_what_is_not_defined_is_none() -> None:
    assert pearson(np.array([1.0, 2.0]), np.array([2.0, 1.0])).r is None
    assert pearson(np.full(9, 1.5), np.arange(9.0)).r is None
    three = pearson(np.array([1.0, 2.0, 3.0]), np.array([1.0, 0.0, 4.0]))
    assert three.r is not None
    assert three.lower is None
    exact = pearson(np.arange(5.0), -np.arange(5.0))
    assert exact.r == pytest.approx(-1)
    assert np.isnan(entropy(np.zeros((2, 3)))).all()
    assert np.isnan(shares(np.zeros((1, 3)))).all()


def test_information_is_the_double_sum() -> None:
    table = np.random.default_rng(1).integers(1, 40, size=(4, 7)).astype(float)
    p = table / table.sum()
    want = sum(p[e, k] * math.log(p[e, k] / (p[e].sum() * p[:, k].sum())) for e in range(4) for k in range(7))
    assert float(mutual_information(table)) == pytest.approx(want, abs=1e-12)
    assert float(mutual_information(np.eye(4) * 10)) == pytest.approx(math.log(4))


def test_the_shuffled_baseline_is_that_of_permutations() -> None:
    draw = np.random.default_rng(2)
    experts, types = draw.integers(0, 4, 400), draw.integers(0, 5, 400)
    table = np.zeros((4, 5))
    np.add.at(table, (experts, types), 1)
    permuted = []
    for _ in range(2000):
        one = np.zeros((4, 5))
        np.add.at(one, (experts, draw.permutation(types)), 1)
        permuted.append(float(mutual_information(one)))
    found = information(table, np.ones((1, 5)), np.random.default_rng(3), draws=2000)
    assert found is not None
    # The means of 2000 draws each, with a standard error of 2 % of the spread.
    assert found.shuffled_mean == pytest.approx(np.mean(permuted), abs=5 * np.std(permuted) / math.sqrt(1000))
    assert found.shuffled_95 == pytest.approx(np.quantile(permuted, 0.95), rel=0.06)


def _table(experts: np.ndarray, types: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    table, by_id = np.zeros((8, 6)), np.zeros((ids.max() + 1, 6))
    np.add.at(table, (experts, types), 1)
    np.add.at(by_id, (ids, types), 1)
    return table, by_id


def test_chance_a_hash_and_a_specialist_are_told_apart() -> None:
    draw = np.random.default_rng(4)
    ids = np.minimum(draw.zipf(1.5, size=20_000), 300) - 1  # few tokens are most of a text
    type_of = draw.integers(0, 6, 300)
    types = type_of[ids]
    random = information(*_table(draw.integers(0, 8, len(ids)), types, ids), np.random.default_rng(0))
    hashed = information(*_table(draw.integers(0, 8, 300)[ids], types, ids), np.random.default_rng(0))
    special = information(*_table(types, types, ids), np.random.default_rng(0))
    assert random is not None
    assert hashed is not None
    assert special is not None
    assert random.value < 1.5 * random.shuffled_95
    assert hashed.shuffled_p < 0.01  # the permutation test alone would call a hash a specialist
    assert hashed.by_token_p > 0.01
    assert special.relative == pytest.approx(1)
    assert special.by_token_p < 0.01


def test_one_type_has_no_information() -> None:
    table = np.zeros((3, 4))
    assert information(table, np.ones((1, 4)), np.random.default_rng(0)) is None
    table[:, 1] = 5
    assert information(table, np.ones((1, 4)), np.random.default_rng(0)) is None
