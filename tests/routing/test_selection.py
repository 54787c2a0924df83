"""Selection policies against a loop over the experts of one token at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grmoe.routing import AtLeast, Dense, Mass, Selection, SoftmaxRouter, Threshold, TopK
from grmoe.routing.selection import largest

UNIT = 64  # probabilities are multiples of 1/64, so that sums are exact and ties are real


@st.composite
def gates(draw: st.DrawFn) -> list[list[float]]:
    """One to four tokens over two to eight experts, with ties and zeros."""
    N = draw(st.integers(2, 8))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.lists(st.integers(0, UNIT), min_size=N - 1, max_size=N - 1)))
        rows.append([(b - a) / UNIT for a, b in zip([0, *cuts], [*cuts, UNIT], strict=True)])
    return rows


def ranking(row: list[float]) -> list[int]:
    """Experts by falling probability, the lower index first among equals."""
    return sorted(range(len(row)), key=lambda e: -row[e])


def chosen(policy: Selection, rows: list[list[float]]) -> list[set[int]]:
    mask = policy(torch.tensor(rows, dtype=torch.float64))
    assert mask.dtype == torch.bool
    assert mask.shape == (len(rows), len(rows[0]))
    return [set(row.nonzero().flatten().tolist()) for row in mask]


@given(rows=gates())
def test_dense(rows: list[list[float]]) -> None:
    assert all(experts == set(range(len(rows[0]))) for experts in chosen(Dense(), rows))


@given(rows=gates(), data=st.data())
def test_top_k(rows: list[list[float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rows[0])))
    for row, experts in zip(rows, chosen(TopK(k), rows), strict=True):
        assert len(experts) == k
        # Which of two equal experts is taken is free; their probabilities are not.
        assert sorted(row[e] for e in experts) == sorted(row[e] for e in ranking(row)[:k])


@given(rows=gates(), tau=st.integers(1, UNIT).map(lambda n: n / UNIT) | st.floats(1e-6, 1), data=st.data())
def test_mass(rows: list[list[float]], tau: float, data: st.DataObject) -> None:
    cap = data.draw(st.none() | st.integers(1, 9))
    for row, experts in zip(rows, chosen(Mass(tau, cap), rows), strict=True):
        want, mass = [], 0.0
        for e in ranking(row):
            if mass >= tau or (cap is not None and len(want) == cap):
                break
            want.append(e)
            mass += row[e]
        assert experts == set(want)
        total = sum(row[e] for e in experts)
        if cap is None or len(experts) < cap:
            assert total >= tau  # sufficient
        if len(experts) > 1:
            assert total - min(row[e] for e in experts) < tau  # minimal


@given(rows=gates(), weight=st.integers(1, UNIT).map(lambda n: n / UNIT) | st.floats(1e-6, 1), data=st.data())
def test_at_least(rows: list[list[float]], weight: float, data: st.DataObject) -> None:
    cap = data.draw(st.none() | st.integers(1, 9))
    for row, experts in zip(rows, chosen(AtLeast(weight, cap), rows), strict=True):
        first, *others = ranking(row)
        want = [first, *(e for e in others if row[e] >= weight)]
        assert experts == set(want[:cap])


def test_at_least_drops_the_least_weight_of_all_rules() -> None:
    """For as many experts, top-k and mass drop more of the gates' weight."""
    probs = torch.softmax(2 * torch.randn(4000, 8, generator=torch.Generator().manual_seed(0)), -1).double()

    def dropped(policy: Selection) -> tuple[int, float]:
        kept = policy(probs)
        return int(kept.sum()), float(torch.where(kept, 0.0, probs).sum())

    for other in (Mass(0.5, 2), Mass(0.7, 2), Mass(0.7, 4), TopK(2)):
        experts, weight = dropped(other)
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if dropped(AtLeast(max(middle, 1e-9), 4))[0] > experts else (low, middle)
            )
        count, least = dropped(AtLeast(high, 4))
        assert count <= experts
        assert least < weight, other


def test_mass_reached_exactly_in_single_precision() -> None:
    """Thirds, fifths and sevenths in fp32: a set that reaches τ up to its own rounding gets no further expert."""
    counts = torch.randint(1, 20, (5000, 6), generator=torch.Generator().manual_seed(0)).float()
    probs = counts / counts.sum(-1, keepdim=True)
    for tau in (0.5, 0.75, 0.8, 0.9):
        total = probs.sort(dim=-1, descending=True).values.cumsum(-1)
        want = 1 + (total[:, :-1] < tau).sum(-1)
        assert torch.equal(Mass(tau)(probs).sum(-1), want)


@given(rows=gates(), minimum=st.integers(1, UNIT).map(lambda n: n / UNIT))
def test_threshold(rows: list[list[float]], minimum: float) -> None:
    for row, experts in zip(rows, chosen(Threshold(minimum), rows), strict=True):
        above = {e for e, p in enumerate(row) if p >= minimum}
        if above:
            assert experts == above
        else:
            (only,) = experts
            assert row[only] == max(row)


POLICIES: list[Selection] = [
    Dense(),
    TopK(1),
    TopK(2),
    TopK(2, renormalize=False),
    Mass(0.7),
    Mass(1.0, cap=2),
    Mass(1e-9),
    Mass(0.7, renormalize=False),
    Threshold(0.3),
    Threshold(1.0),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_leading_dimensions(policy: Selection) -> None:
    probs = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    mask = policy(probs)
    assert torch.equal(mask, policy(probs.view(6, 5)).view(2, 3, 5))
    assert torch.equal(mask[1, 2], policy(probs[1, 2]))
    assert bool(mask.any(-1).all())
    kept_best = mask.gather(-1, probs.argmax(-1, keepdim=True))
    assert bool(kept_best.all())  # without ties the most probable expert is always among them
    assert policy(probs[:0]).shape == (0, 3, 5)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_weights_of_a_router(policy: Selection) -> None:
    router = SoftmaxRouter(8, 5, selection=policy, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        routing = router(torch.randn(50, 8, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(routing.selected, policy(routing.probs))
    assert policy.dense == isinstance(policy, Dense)
    for probs, selected, weights in zip(routing.probs, routing.selected, routing.weights, strict=True):
        kept = [float(p) if s else 0.0 for p, s in zip(probs, selected, strict=True)]
        total = sum(kept) if policy.renormalize else 1.0
        torch.testing.assert_close(weights, torch.tensor([p / total for p in kept]), rtol=1e-6, atol=0)
        if policy.renormalize or policy.dense:
            assert float(weights.sum()) == pytest.approx(1.0, abs=1e-6)


def test_a_drawn_mass_of_zero_keeps_the_most_probable_expert() -> None:
    probs = torch.tensor([[0.2, 0.5, 0.3], [0.0, 0.0, 1.0]])
    assert largest(probs, 0.0, 3).tolist() == [[False, True, False], [False, False, True]]


def test_ties() -> None:
    equal = torch.full((1, 4), 0.25)
    assert TopK(3)(equal).sum() == 3
    assert Mass(0.5)(equal).tolist() == [[True, True, False, False]]
    assert Mass(0.51)(equal).tolist() == [[True, True, True, False]]
    assert Threshold(0.25)(equal).all()
    assert Threshold(0.26)(equal).sum() == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0), "k must be an integer >= 1, got 0"),
        (lambda: TopK(1.5), "k must be an integer >= 1, got 1.5"),  # type: ignore[arg-type]
        (lambda: Mass(0.0), r"tau must be in \(0, 1\], got 0.0"),
        (lambda: Mass(1.01), r"tau must be in \(0, 1\], got 1.01"),
        (lambda: Mass(math.nan), "tau must be a finite number, got nan"),
        (lambda: Mass(0.5, cap=0), "cap must be an integer >= 1, got 0"),
        (lambda: Threshold(0.0), r"minimum must be in \(0, 1\], got 0.0"),
        (lambda: Threshold(-0.5), r"minimum must be in \(0, 1\], got -0.5"),
        (lambda: TopK(5)(torch.full((2, 4), 0.25)), "k must be at most the number of experts 4, got 5"),
    ],
)
def test_bad_options(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_policies_are_values() -> None:
    assert Mass(0.5) == Mass(0.5)
    assert Mass(0.5) != Mass(0.5, cap=2)
    with pytest.raises(AttributeError):
        TopK(2).k = 3  # type: ignore[misc]


def check_is_selection(policy: Selection) -> Tensor:
    return policy(torch.full((1, 2), 0.5))


def test_any_callable_with_two_flags_is_a_policy() -> None:
    class Odd:
        renormalize = True
        dense = False

        def __call__(self, probs: Tensor) -> Tensor:
            return (torch.arange(probs.shape[-1]) % 2 == 1).expand(probs.shape)

    assert check_is_selection(Odd()).tolist() == [[False, True]]
    routing = SoftmaxRouter(4, 4, selection=Odd())(
        torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    )
    assert torch.equal(routing.selected, torch.tensor([[False, True, False, True]]).expand(3, 4))
    torch.testing.assert_close(routing.weights.sum(-1), torch.ones(3))


@pytest.mark.parametrize("half", [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5)], ids=repr)
def test_numbers_of_numpy_and_pytorch(half: Any) -> None:
    """A policy holds Python numbers, whatever it was given: it is compared, hashed and written to files."""
    assert Mass(half, cap=np.int64(2)) == Mass(0.5, cap=2)
    assert Threshold(half) == Threshold(0.5)
    assert TopK(torch.tensor(2)) == TopK(2)
    assert [type(v) for v in (Mass(half).tau, Threshold(half).minimum, TopK(np.int64(2)).k)] == [
        float,
        float,
        int,
    ]
    for wrong in (np.float32("nan"), torch.tensor(1.5), torch.tensor([0.5, 0.5]), "0.5", np.bool_(True)):
        with pytest.raises(ValueError, match="tau must be"):
            Mass(wrong)
