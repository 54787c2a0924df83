"""Experts with our own kernels: gather and activation inside the first grouped GEMM, sums without atomics."""

from __future__ import annotations

from torch import Tensor

from grmoe.experts.dispatch import Dispatch
from grmoe.experts.grouped import grouped_experts
from grmoe.experts.weights import Weights
from grmoe.kernels.runtime import attempt


def triton_experts(x_TD: Tensor, dispatch: Dispatch, weights: Weights) -> Tensor:
    """As `reference_experts`. Runtime and memory traffic scale with the rows actually used."""
    from grmoe.kernels.experts import experts

    d, glu = dispatch, weights.activation == "swiglu"
    up, down = weights.up.to(x_TD.dtype), weights.down_proj.to(x_TD.dtype)
    return attempt(
        "experts",
        lambda: experts(x_TD, d.weight_TM, up, down, d.token_A, d.pair_A, d.offset_N, d.slot_TM, glu=glu),
        lambda: grouped_experts(x_TD, dispatch, weights),
    )
