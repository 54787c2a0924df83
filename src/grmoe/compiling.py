"""What the compiler has to be told."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("grmoe::realize", mutates_args=())
def _realize(x: Tensor) -> Tensor:
    return x.clone()


_realize.register_fake(lambda x: torch.empty_like(x))


def realize(x: Tensor) -> Tensor:
    """x, computed once and kept. Small things that many kernels read are otherwise computed again in each of them.

    No gradient passes. In eager mode nothing happens.
    """
    return _realize(x) if torch.compiler.is_compiling() else x
