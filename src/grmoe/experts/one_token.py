"""Experts of a single token without a dispatch list, where no gradient is asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from grmoe.experts.dispatch import Dispatch
from grmoe.experts.padding import aligned
from grmoe.experts.triton import triton_experts
from grmoe.experts.weights import Weights
from grmoe.kernels.runtime import attempt

# Off until it is measured: `grmoe bench layer --shapes decode --contender "one token"`.
ENABLED = False


def takes_one(x_TD: Tensor) -> bool:
    return ENABLED and len(x_TD) == 1 and not torch.is_grad_enabled()


def one_token_experts(
    x_1D: Tensor, weights_1N: Tensor, selected_1N: Tensor, weights: Weights, max_experts: int
) -> Tensor:
    """As the backend "triton" over the list that `Dispatch.build` makes of the same gates."""
    from grmoe.kernels.one_token import experts

    up, down = weights.up.to(x_1D.dtype), weights.down_proj.to(x_1D.dtype)
    glu = weights.activation == "swiglu"

    def by_list() -> Tensor:
        dispatch = Dispatch.build(weights_1N, selected_1N, max_experts, kernels=True)
        return aligned(triton_experts)(x_1D, dispatch, weights)

    return attempt(
        "experts of one token",
        lambda: experts(x_1D, weights_1N, selected_1N, up, down, max_experts, glu=glu),
        by_list,
    )
