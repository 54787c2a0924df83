"""Head and loss in one, against the logits in full, in fp64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from grmoe.head import IGNORED, next_token_loss_reference, token_losses_reference
from grmoe.kernels import cross_entropy


def linear_cross_entropy(*inputs: torch.Tensor) -> torch.Tensor:
    return cross_entropy.linear_cross_entropy(*inputs, IGNORED, 16)  # 37 tokens are three parts


def inputs(T: int, V: int, D: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(T, D, generator=g), torch.randn(V, D, generator=g)
    return x, weight, torch.randint(V, (T,), generator=g)


# Vocabularies: less than the padding, a multiple of it, odd, more than one tile of columns.
@pytest.mark.parametrize("V", [5, 128, 333, cross_entropy.TILE + 65])
@pytest.mark.parametrize("T", [1, 37])
def test_loss_and_gradients(T: int, V: int) -> None:
    x, weight, target = inputs(T, V)
    if T > 1:
        target[3] = -100
    count = (target != -100).sum()
    results = []
    for function, dtype in (
        (linear_cross_entropy, torch.float32),
        (next_token_loss_reference, torch.float64),
    ):
        leaves = [t.detach().clone().to(dtype).requires_grad_() for t in (x, weight)]
        loss = function(*leaves, target, count)
        (3 * loss).backward()
        results.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    for got, wanted in zip(*results, strict=True):
        assert got is not None
        assert wanted is not None
        # fp32, sums over the vocabulary and over tokens.
        assert (got.double() - wanted).norm() <= 1e-5 * wanted.norm()
    if T > 1:
        assert not results[0][1][3].any()  # an ignored token gets no gradient


def test_large_logits_do_not_overflow() -> None:
    x, weight, target = inputs(4, 70)
    loss = linear_cross_entropy(1000 * x, weight, target, torch.tensor(4))
    expected = next_token_loss_reference(1000 * x.double(), weight.double(), target, torch.tensor(4))
    assert torch.isclose(loss.double(), expected.double(), rtol=1e-5)


def test_without_gradients_none_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, target = inputs(6, 50)
    monkeypatch.setattr(cross_entropy, "_product", lambda *_: pytest.fail("a gradient was computed"))
    loss = linear_cross_entropy(x, weight, target, torch.tensor(6))
    assert torch.isclose(loss, next_token_loss_reference(x, weight, target, torch.tensor(6)), rtol=1e-5)


def test_half_precision_tokens_and_wide_weights() -> None:
    """As under autocast: the weight's gradient is in its own precision."""
    x, weight, target = inputs(8, 60)
    half, wide = x.half().requires_grad_(), weight.clone().requires_grad_()
    linear_cross_entropy(half, wide, target, torch.tensor(8)).backward()
    assert half.grad is not None
    assert wide.grad is not None
    assert (half.grad.dtype, wide.grad.dtype) == (torch.float16, torch.float32)
    exact = weight.clone().double().requires_grad_()
    next_token_loss_reference(x.half().double(), exact, target, torch.tensor(8)).backward()
    assert exact.grad is not None
    # Gradients of logits are rounded to 11 bits.
    assert (wide.grad.double() - exact.grad).norm() <= 2e-3 * exact.grad.norm()


@pytest.mark.parametrize("at_once", [1, 16, 64])
@pytest.mark.parametrize("V", [5, 333])
def test_the_loss_of_each_token(V: int, at_once: int) -> None:
    x, weight, target = inputs(37, V)
    target[3] = IGNORED
    found = cross_entropy.linear_token_losses(x, weight, target, IGNORED, at_once)
    wanted = token_losses_reference(x.double(), weight.double(), target)
    assert found.dtype == torch.float32
    assert found[3] == 0
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6)
