"""The divergence between two predictions, from their hidden states, against the plain formula in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grmoe import head
from grmoe.head import divergence


def plain(x_TD: Tensor, teacher_TD: Tensor, weight_VD: Tensor, counts_T: Tensor) -> Tensor:
    """Σ_v p_v log(p_v / q_v), token by token."""
    x_TD, teacher_TD = x_TD[counts_T], teacher_TD[counts_T]
    total = torch.zeros((), dtype=torch.float64)
    for x_D, teacher_D in zip(x_TD, teacher_TD, strict=True):
        p_V, q_V = (weight_VD.detach() @ teacher_D).softmax(0), (weight_VD @ x_D).softmax(0)
        total = total + sum(p * (p / q).log() for p, q in zip(p_V, q_V, strict=True))
    return total / len(x_TD)


@pytest.mark.parametrize("at_once", [1, 3, 7, 100])
def test_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(head, "COMPARED", at_once)
    g = torch.Generator().manual_seed(0)
    x, teacher, weight = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((7, 4), (7, 4), (5, 4)))
    counts = torch.arange(7) % 3 != 1
    results = []
    for compute in (divergence, plain):
        tensors = [t.clone().requires_grad_() for t in (x, teacher, weight)]
        value = compute(tensors[0], tensors[1].detach(), tensors[2], counts)
        grads = torch.autograd.grad(3 * value, (tensors[0], tensors[2]))
        results.append((value.detach(), *grads))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert results[0][0] > 0.1


def test_equal_predictions_do_not_diverge_and_the_teacher_gets_no_gradient() -> None:
    x, weight = torch.randn(6, 4), torch.randn(9, 4)
    every, none = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
    assert abs(float(divergence(x, x, weight, every))) < 1e-6
    teacher, x = torch.randn(6, 4, requires_grad=True), x.requires_grad_()
    divergence(x, teacher, weight, every).backward()
    assert teacher.grad is None
    assert x.grad is not None
    x.grad = None
    value = divergence(x, teacher, weight, none)  # all of it context
    value.backward()
    assert (value.item(), float(x.grad.abs().sum())) == (0.0, 0.0)


def test_16_bits_are_summed_in_32() -> None:
    x, teacher, weight = torch.randn(64, 16), torch.randn(64, 16), torch.randn(300, 16)
    counts = torch.arange(64) % 2 == 0
    value = divergence(x.bfloat16(), teacher.bfloat16(), weight, counts)
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(float(divergence(x, teacher, weight, counts)), rel=0.02)
