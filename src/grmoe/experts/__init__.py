"""Expert computation: a dispatch list, and backends that run the experts over it.

`reference` is the specification, a plain loop. `grouped` runs on `torch.nn.functional.grouped_mm`, CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grmoe import checks
from grmoe.experts.dispatch import Dispatch
from grmoe.experts.grouped import grouped_experts
from grmoe.experts.reference import reference_experts
from grmoe.experts.weights import ExpertWeights

Backend = Callable[[Tensor, Dispatch, ExpertWeights], Tensor]

BACKENDS: dict[str, Backend] = {"reference": reference_experts, "grouped": grouped_experts}


def pick_backend(name: str, x: Tensor) -> Backend:
    """A backend by name; "auto" takes the fastest that can run on this dtype."""
    checks.one_of("backend", name, ("auto", *BACKENDS))
    if name == "auto":
        # grouped_mm has no fp64 kernel: there the loop is the only one.
        name = "reference" if x.dtype == torch.float64 else "grouped"
    return BACKENDS[name]


__all__ = ["BACKENDS", "Backend", "Dispatch", "ExpertWeights", "pick_backend"]
