"""GELU of one exponential against PyTorch's."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from grmoe import compiling


def test_normal_distribution_to_its_stated_error() -> None:
    x = torch.linspace(-12, 12, 100_001, dtype=torch.float64)
    cdf, bell = compiling.normal(x)
    assert (cdf - torch.special.ndtr(x)).abs().max() < 8e-8
    torch.testing.assert_close(bell, torch.exp(-x.square() / 2))


def test_gelu_and_its_gradient_are_pytorchs() -> None:
    x = torch.linspace(-8, 8, 4001).requires_grad_()
    grad = torch.sin(x.detach())
    (want,) = torch.autograd.grad(F.gelu(x), x, grad)
    y = compiling._Gelu.apply(x)
    (got,) = torch.autograd.grad(y, x, grad)
    # 8e-8 of Φ times |x| ≤ 8, and fp32's rounding
    torch.testing.assert_close(y, F.gelu(x), rtol=0, atol=2e-6)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    assert compiling.gelu(x).equal(F.gelu(x))  # not compiled: PyTorch's own
