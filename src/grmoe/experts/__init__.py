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
from grmoe.experts.padding import aligned
from grmoe.experts.reference import reference_experts
from grmoe.experts.triton import triton_experts
from grmoe.experts.weights import ExpertWeights, Weights
from grmoe.kernels import runtime

Backend = Callable[[Tensor, Dispatch, Weights], Tensor]

BACKENDS: dict[str, Backend] = {
    "reference": reference_experts,
    "grouped": aligned(grouped_experts),
    "triton": aligned(triton_experts),
}


def pick_backend(name: str, x: Tensor) -> str:
    """The backend for tokens x: "auto" is the fastest one that can run them."""
    checks.one_of("backend", name, ("auto", *BACKENDS))
    kernels = runtime.available(x)
    if name == "triton" and not kernels:
        checks.require(runtime.HAS_TRITON, "backend 'triton' needs Triton; install with: pip install triton")
        need = "CUDA (compute capability 8.0 or later) and 16 or 32 bit floats"
        raise ValueError(f"backend 'triton' needs {need}, got {x.dtype} on {x.device}")
    # grouped_mm has no fp64 kernel.
    ok = name != "grouped" or x.dtype != torch.float64
    checks.require(
        ok, "backend 'grouped' needs 16 or 32 bit floats, got torch.float64; 'reference' takes all"
    )
    if name == "auto":
        if kernels and not runtime.INTERPRETED and not runtime.has_failed("experts"):
            return "triton"
        return "reference" if x.dtype == torch.float64 else "grouped"
    return name


__all__ = ["BACKENDS", "Backend", "Dispatch", "ExpertWeights", "Weights", "pick_backend"]
