"""Whether experts specialise: information and correlation, each beside what chance would give.

Legend: N experts (rows), K types (columns), V distinct token ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlogy
from scipy.stats import norm, random_table

Array = NDArray[np.float64]


def divide(sums: Array, counts: Any) -> Array:
    """sums / counts; NaN where the count is zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.asarray(counts) > 0, np.asarray(sums) / counts, np.nan)


def shares(counts: Array) -> Array:
    """Each row over its sum; NaN in a row without counts."""
    return divide(counts, counts.sum(-1, keepdims=True))


def entropy(counts: Array) -> Array:
    """−Σ p log p over the last axis, nats; NaN where nothing was counted."""
    p = shares(counts)
    return -xlogy(p, p).sum(-1)


def mutual_information(counts: Array) -> Array:
    """I(expert; type) = H(expert) + H(type) − H(expert, type), nats, of tables (..., N, K)."""
    joint = counts.reshape(*counts.shape[:-2], -1)
    return np.maximum(entropy(counts.sum(-1)) + entropy(counts.sum(-2)) - entropy(joint), 0.0)


@dataclass(frozen=True, kw_only=True)
class Information:
    """Mutual information between the leading expert and the type of a token, nats, and two baselines.

    shuffled: types are dealt out to tokens at random, both margins kept (the permutation test). An estimate from n
        tokens shows this much where there is nothing.
    by_token: every distinct token id gets one expert at random, with the layer's loads. A router that
        separates tokens without regard to types, such as a hash, shows this much. Frequent tokens make it large.

    Specialisation on types is the part above `by_token`.
    """

    value: float
    relative: float
    """value / H(type): 1 where the expert determines the type."""
    n: int
    """Tokens."""
    shuffled_mean: float
    shuffled_95: float
    """95th percentile of the draws."""
    shuffled_p: float
    """(1 + draws at or above the value) / (1 + draws)."""
    by_token_mean: float
    by_token_95: float
    by_token_p: float
    draws: int


def information(
    table_NK: Array, ids_VK: Array, generator: np.random.Generator, draws: int = 200
) -> Information | None:
    """`Information` of a table of leading experts and types. ids_VK: how often each token id has each type.

    None if no token has an expert, or if all tokens have the same type.
    """
    n, kinds = int(table_NK.sum()), (table_NK.sum(0) > 0).sum()
    if n == 0 or kinds < 2:
        return None
    value = float(mutual_information(table_NK))
    # A random permutation gives a random table with the same margins.
    rows, columns = table_NK.sum(1).astype(int), table_NK.sum(0).astype(int)
    shuffled = random_table(rows, columns).rvs(draws, random_state=generator).astype(float)
    load_N = table_NK.sum(1) / n
    by_token = np.stack([_hashed(load_N, ids_VK, generator) for _ in range(draws)])
    relative = value / float(entropy(table_NK.sum(0)))
    chance = [_against(value, mutual_information(tables)) for tables in (shuffled, by_token)]
    names = [
        f"{baseline}_{figure}" for baseline in ("shuffled", "by_token") for figure in ("mean", "95", "p")
    ]
    figures = dict(zip(names, (*chance[0], *chance[1]), strict=True))
    return Information(value=value, relative=relative, n=n, draws=draws, **figures)


def _hashed(load_N: Array, ids_VK: Array, generator: np.random.Generator) -> Array:
    """The table (N, K) if every token id has one expert, drawn with probability load_N."""
    N = len(load_N)
    expert_V = generator.choice(N, size=len(ids_VK), p=load_N)
    return np.stack([np.bincount(expert_V, weights=column_V, minlength=N) for column_V in ids_VK.T], -1)


def _against(value: float, draws: Array) -> tuple[float, float, float]:
    """(mean, 95th percentile, p) of a baseline. A draw that equals the value up to rounding counts as reaching it."""
    p = (1 + int((draws >= value - 1e-12).sum())) / (1 + len(draws))
    return float(draws.mean()), float(np.quantile(draws, 0.95)), p


@dataclass(frozen=True)
class Correlation:
    """Pearson's r with a 95 % interval by Fisher's z: tanh(artanh r ± 1.96/√(n − 3)).

    Within groups, each mean after the first takes one more degree of freedom from the root. None where it is not
    defined: r needs three points and two variables that vary, the interval needs four points.
    """

    r: float | None
    lower: float | None
    upper: float | None
    n: int


def pearson(x: Array, y: Array, groups: NDArray[np.int64] | None = None) -> Correlation:
    """r of x and y. With groups: of the differences from the means of each group (within layers)."""
    n = len(x)
    if groups is None:
        groups = np.zeros(n, dtype=np.int64)
    names = np.unique(groups)
    centred = [np.array(v, dtype=float) for v in (x, y)]
    for v, raw in zip(centred, (x, y), strict=True):
        for name in names:
            v[groups == name] -= np.mean(raw[groups == name])
    squares = [float(np.square(v).sum()) for v in centred]
    freedom = n - len(names) + 1  # one less for each group but the first
    constant = any(
        s <= 1e-24 * max(1.0, float(np.square(v).sum())) for s, v in zip(squares, (x, y), strict=True)
    )
    if freedom < 3 or constant:
        return Correlation(None, None, None, n)
    r = float(np.clip(np.dot(*centred) / math.sqrt(squares[0] * squares[1]), -1, 1))
    if freedom < 4 or abs(r) == 1:
        return Correlation(r, None, None, n)
    z, width = math.atanh(r), float(norm.ppf(0.975)) / math.sqrt(freedom - 3)
    return Correlation(r, math.tanh(z - width), math.tanh(z + width), n)
