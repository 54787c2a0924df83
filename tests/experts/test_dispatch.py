"""The dispatch list is the selection, sorted by expert, and its two maps are each other's transpose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grmoe.experts.dispatch import Dispatch, combine, gather
from grmoe.kernels import runtime

# Our kernels run on the CPU through Triton's interpreter alone (see conftest).
KERNELS = pytest.param(
    True, marks=pytest.mark.skipif(not runtime.INTERPRETED, reason="no Triton, or kernels are compiled here")
)


def random_selection(T: int, N: int, most: int, seed: int) -> tuple[Tensor, Tensor]:
    """Between zero and `most` experts per token, uneven over experts."""
    g = torch.Generator().manual_seed(seed)
    skew = torch.rand(N, generator=g) ** 3
    score = torch.rand(T, N, generator=g) * skew
    count = torch.randint(most + 1, (T, 1), generator=g)
    selected = score.argsort(1, descending=True).argsort(1) < count
    weights = torch.rand(T, N, generator=g, dtype=torch.float64)
    return torch.where(selected, weights, 0.0), selected


sizes = st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(0, 10**6))


@pytest.mark.parametrize("kernels", [False, KERNELS])
@given(sizes, st.data())
def test_list_holds_exactly_the_selection(
    kernels: bool, size: tuple[int, int, int], data: st.DataObject
) -> None:
    T, N, seed = size
    most = data.draw(st.integers(1, N))
    weights, selected = random_selection(T, N, most, seed)
    d = Dispatch.build(weights, selected, most, kernels=kernels)
    assert d.num_rows == T * most
    ends = d.offset_N.tolist()
    starts = [0, *ends[:-1]]
    for e in range(N):
        tokens = d.token_A[starts[e] : ends[e]].tolist()
        assert tokens == selected[:, e].nonzero().flatten().tolist()  # in token order
    for t in range(T):
        slots = [s for s in d.slot_TM[t].tolist() if s < d.num_rows]
        experts = [next(e for e in range(N) if starts[e] <= s < ends[e]) for s in slots]
        assert experts == selected[t].nonzero().flatten().tolist()
        assert all(int(d.token_A[s]) == t for s in slots)
        assert d.weight_TM[t, : len(slots)].tolist() == [float(weights[t, e]) for e in experts]
        assert d.weight_TM[t, len(slots) :].abs().sum() == 0


@pytest.mark.parametrize("kernels", [False, KERNELS])
@given(sizes)
def test_gather_and_combine_match_plain_indexing(kernels: bool, size: tuple[int, int, int]) -> None:
    T, N, seed = size
    weights, selected = random_selection(T, N, N, seed)
    d = Dispatch.build(weights, selected, N, kernels=kernels)
    g = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(T, 3, generator=g, dtype=torch.float64)
    used = int(d.offset_N[-1])
    assert torch.equal(gather(x, d)[:used], x[d.token_A[:used]])
    y = torch.randn(d.num_rows, 3, generator=g, dtype=torch.float64)
    y[used:] = float("nan")  # unused rows may hold anything
    expected = torch.zeros(T, 3, dtype=torch.float64)
    for t in range(T):
        for k, s in enumerate(d.slot_TM[t].tolist()):
            if s < d.num_rows:
                expected[t] += d.weight_TM[t, k] * y[s]
    torch.testing.assert_close(combine(y, d), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", [False, KERNELS])
def test_gradients(kernels: bool) -> None:
    weights, selected = random_selection(7, 4, 3, seed=3)
    weights.requires_grad_()
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def through(x: Tensor, weights: Tensor) -> Tensor:
        d = Dispatch.build(weights, selected, 3, kernels=kernels)
        rows = gather(x, d)
        return combine(rows * rows, d)

    assert torch.autograd.gradcheck(through, (x, weights))


def test_bound_is_checked() -> None:
    weights, selected = random_selection(3, 4, 2, seed=0)
    with pytest.raises(ValueError, match="max_experts must be between 1 and 4, got 5"):
        Dispatch.build(weights, selected, 5)
