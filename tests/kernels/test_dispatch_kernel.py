"""The dispatch list by kernels equals the one by torch, field by field."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from grmoe.experts.dispatch import Dispatch
from grmoe.kernels import dispatch as module
from grmoe.kernels.dispatch import dispatch

FIELDS = ("token_A", "pair_A", "offset_N", "slot_TM", "weight_TM")


def draw(T: int, N: int, most: int, seed: int, full: bool = False) -> tuple[Tensor, Tensor]:
    """Weights and selection: none to `most` experts per token (`full`: exactly), uneven, some experts without any."""
    g = torch.Generator().manual_seed(seed)
    score = torch.rand(T, N, generator=g) * torch.rand(N, generator=g) ** 3
    count = torch.full((T, 1), most) if full else torch.randint(most + 1, (T, 1), generator=g)
    selected = score.argsort(1, descending=True).argsort(1) < count
    return torch.where(selected, torch.rand(T, N, generator=g), 0.0), selected


def assert_same_list(weights: Tensor, selected: Tensor, most: int) -> None:
    ours = Dispatch.build(weights, selected, most, kernels=True)
    plain = Dispatch.build(weights, selected, most)
    for name in FIELDS:
        a, b = getattr(ours, name), getattr(plain, name)
        assert a.shape == b.shape, name
        assert torch.equal(a.to(b.dtype), b), name
        assert a.is_contiguous()


@settings(max_examples=25)
@given(st.integers(0, 150), st.integers(1, 9), st.integers(0, 10**6), st.booleans(), st.data())
def test_every_field(T: int, N: int, seed: int, full: bool, data: st.DataObject) -> None:
    """By one program alone, and by several after a kernel that counts."""
    most = data.draw(st.integers(1, N))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ALONE", data.draw(st.sampled_from((0, module.ALONE))))
        assert_same_list(*draw(T, N, most, seed, full), most)


@pytest.mark.parametrize("T", [0, 1, 63, 64, 65])
def test_everything_and_nothing(T: int) -> None:
    weights = torch.rand(T, 3, generator=torch.Generator().manual_seed(0))
    for selected in (torch.ones(T, 3, dtype=torch.bool), torch.zeros(T, 3, dtype=torch.bool)):
        assert_same_list(torch.where(selected, weights, 0.0), selected, 3)


def test_chunks_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What long inputs do: a program loops over tiles, and starts behind the programs before it."""
    monkeypatch.setattr(module, "CHUNKS", 2)
    assert_same_list(*draw(300, 5, 3, seed=1), 3)


def test_more_chunks_than_are_read_at_once() -> None:
    """Many experts: 33 chunks of 8 tokens, and the counts of 16 chunks at a time."""
    assert_same_list(*draw(260, 200, 4, seed=3), 4)


def test_strided_inputs() -> None:
    weights, selected = draw(40, 6, 2, seed=2)
    assert_same_list(weights.T.contiguous().T, selected.T.contiguous().T, 2)


@settings(max_examples=10)
@given(st.integers(0, 90), st.integers(1, 7), st.integers(0, 10**6), st.data())
def test_gradient_of_the_weights(T: int, N: int, seed: int, data: st.DataObject) -> None:
    most = data.draw(st.integers(1, N))
    weights, selected = draw(T, N, most, seed)
    upstream = torch.randn(most, T, generator=torch.Generator().manual_seed(seed)).T  # a view
    grads = []
    for kernels in (True, False):
        leaf = weights.clone().requires_grad_()
        Dispatch.build(leaf, selected, most, kernels=kernels).weight_TM.backward(upstream)
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_indices_carry_no_gradient() -> None:
    weights, selected = draw(9, 4, 2, seed=0)
    *indices, weight = dispatch(weights.requires_grad_(), selected, 2)
    assert weight.requires_grad
    assert not any(i.requires_grad for i in indices)
    assert all(i.dtype == torch.int32 for i in indices)
