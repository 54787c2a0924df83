"""Expert computation: a dispatch list, and backends that run the experts over it.

`reference` is the specification, a plain loop. `grouped` uses `torch.nn.functional.grouped_mm`, on CPU and GPU.
`triton` uses our own CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grmoe import checks
from grmoe.experts.dispatch import Dispatch
from grmoe.experts.grouped import grouped_experts
from grmoe.experts.reference import reference_experts
from grmoe.experts.triton import triton_experts
from grmoe.experts.weights import ExpertWeights, Weights
from grmoe.kernels import runtime

Backend = Callable[[Tensor, Dispatch, Weights], Tensor]

BACKENDS: dict[str, Backend] = {
    "reference": reference_experts,
    "grouped": grouped_experts,
    "triton": triton_experts,
}


def pick_backend(name: str, x: Tensor, hidden: int) -> str:
    """The backend for tokens x and experts of width `hidden`: "auto" is the fastest one that can run them."""
    checks.one_of("backend", name, ("auto", *BACKENDS))
    kernels = runtime.runs_on(x) and hidden * x.element_size() % 16 == 0
    if name == "triton" and not kernels:
        checks.require(runtime.HAS_TRITON, "backend 'triton' needs Triton; install with: pip install triton")
        rows = f"rows of {x.shape[-1]} and {hidden} {x.dtype} on {x.device}"
        need = "CUDA (compute capability 8.0 or later), 16 or 32 bit floats and rows of whole 16 bytes"
        raise ValueError(f"backend 'triton' needs {need}, got {rows}")
    if name == "auto":
        if kernels and not runtime.INTERPRETED and not runtime.has_failed("experts"):
            return "triton"
        # grouped_mm has no fp64 kernel and needs rows of whole 16 bytes.
        aligned = x.shape[-1] * x.element_size() % 16 == 0 and hidden * x.element_size() % 16 == 0
        return "grouped" if aligned and x.dtype != torch.float64 else "reference"
    return name


__all__ = ["BACKENDS", "Backend", "Dispatch", "ExpertWeights", "Weights", "pick_backend"]
