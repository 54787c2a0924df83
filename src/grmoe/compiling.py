"""What the compiler has to be told."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op("grmoe::realize", mutates_args=())
def _realize(x: Tensor) -> Tensor:
    return x.clone()


_realize.register_fake(lambda x: torch.empty_like(x))


def realize(x: Tensor) -> Tensor:
    """x, computed once and kept. Small things that many kernels read are otherwise computed again in each of them.

    No gradient passes. In eager mode nothing happens.
    """
    return _realize(x) if torch.compiler.is_compiling() else x


def gelu(x: Tensor) -> Tensor:
    """x·Φ(x). Compiled for a GPU it is made of one exponential: an erf there takes longer than reading x."""
    return _Gelu.apply(x) if torch.compiler.is_compiling() and x.is_cuda else F.gelu(x)


def normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Φ(x) to 8e-8, and exp(−x²/2), of which it is made (Abramowitz and Stegun, 7.1.26)."""
    bell = torch.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.23164188838536214 * x.abs())
    poly = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    tail = t * poly * bell
    return torch.where(x < 0, tail, 1.0 - tail), bell


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.float() * normal(x.float())[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        cdf, bell = normal(x.float())
        return (grad.float() * (cdf + x.float() * (0.3989422804014327 * bell))).to(x.dtype)
