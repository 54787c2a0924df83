"""Linear maps of few tokens: one kernel against the plain operations in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe import linears
from grmoe.kernels import thin_linear

EPS = 1e-5
# Tokens and inner width: one token and many, widths of whole tiles, of parts of one, of more than one.
SIZES = [(1, 40), (1, 1024), (1, 2056), (2, 40), (17, 256), (33, 520)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, exact: Tensor) -> None:
    # Sums of up to 2056 products in fp32, of order one.
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("outputs", [(24,), (5, 8), (40, 8, 19)], ids=str)
@pytest.mark.parametrize("normed", [True, False])
def test_matrices_that_read_the_same_tokens(
    size: tuple[int, int], outputs: tuple[int, ...], normed: bool
) -> None:
    T, D = size
    x, weights = 3 * random(T, D), [random(O, D, seed=O) / D**0.5 for O in outputs]
    gain = random(D, seed=1) if normed else None
    found = thin_linear.apply(x, weights, gain=gain, eps=EPS)
    wide = None if gain is None else gain.double()
    exact = linears.project_few_reference(x.double(), [w.double() for w in weights], wide, EPS)
    close(found, torch.cat(exact, -1))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_feed_forward(size: tuple[int, int], gated: bool, normed: bool) -> None:
    T, D = size
    x, up = random(T, D), 2 * random(29, D, seed=2) / D**0.5
    gate = 2 * random(29, D, seed=3) / D**0.5 if gated else None
    gain = random(D, seed=1) if normed else None
    weights, activation = ([up], thin_linear.GELU) if gate is None else ([gate, up], thin_linear.SWIGLU)
    found = thin_linear.apply(x, weights, gain=gain, eps=EPS, activation=activation)
    wide = [None if t is None else t.double() for t in (gate, up, gain)]
    assert wide[1] is not None
    close(found, linears.feed_forward_few_reference(x.double(), wide[0], wide[1], wide[2], EPS))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_residual_sum(size: tuple[int, int]) -> None:
    T, D = size
    x, weight, residual = random(T, D), random(24, D, seed=4) / D**0.5, random(T, 24, seed=5)
    found = thin_linear.apply(x, [weight], residual=residual)
    close(found, residual.double() + x.double() @ weight.double().T)


def test_tokens_do_not_mix_and_nothing_beside_them_is_read() -> None:
    T, D = 20, 40
    x, weight, gain = random(T, D), random(24, D, seed=4), random(D, seed=1)
    plain = thin_linear.apply(x, [weight], gain=gain, eps=EPS)
    x[3] = float("nan")
    found = thin_linear.apply(x, [weight], gain=gain, eps=EPS)
    others = torch.arange(T) != 3
    assert found[3].isnan().all()
    assert torch.equal(found[others], plain[others])
    spoiled = torch.full((T + 5, D), float("nan"))
    spoiled[:T] = x
    assert torch.equal(thin_linear.apply(spoiled[:T], [weight], gain=gain, eps=EPS)[others], plain[others])


def test_no_tokens() -> None:
    assert thin_linear.apply(random(0, 40), [random(24, 40)]).shape == (0, 24)


def test_a_token_of_zeros_stays_zero_behind_a_norm() -> None:
    for T in (1, 3):
        assert not thin_linear.apply(torch.zeros(T, 40), [random(8, 40)], gain=random(40), eps=EPS).any()


@pytest.mark.parametrize("T", [1, 5])
def test_a_norm_keeps_large_and_small_tokens_within_16_bits(T: int) -> None:
    """g·x would leave the range of fp16 before the norm's scale brings it back."""
    weight, gain = random(8, 40, seed=4) / 40**0.5, 30 * random(40, seed=1).abs()
    for size in (3000.0, 1e-5):
        x = size * random(T, 40)
        x[:, 3] = size
        half = [t.half() for t in (x, weight, gain)]
        found = thin_linear.apply(half[0], [half[1]], gain=half[2], eps=1e-12)
        wide = [t.double() for t in half]
        (exact,) = linears.project_few_reference(wide[0], [wide[1]], wide[2], 1e-12)
        assert (found.double() - exact).norm() < 1e-3 * exact.norm()
