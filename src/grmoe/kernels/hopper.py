"""Common parts of the warp-specialised kernels for Hopper.

In Triton's pipeline the same warps fetch, multiply and finish a tile, one after the other. These kernels are written in
Gluon, the layer below Triton's tiles: one group of warps fetches and two multiply. While one of the two finishes its
half of a tile, the other keeps the tensor cores busy. Gluon makes explicit which group waits for which, and lets one
tile of shared memory feed tensor cores and registers. Results equal those of the Triton kernels bit for bit.

Gluon is experimental in Triton. Where it is missing or has changed, the Triton kernels run instead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Tiles of a grouped GEMM: 64 rows for each of the two groups that multiply; four of 48 KB in flight.
ROWS, COLUMNS, INNER, STAGES = 128, 256, 64, 4


class Swizzled(TensorDescriptor):
    """A contiguous matrix read in tiles by the copy engine, laid out for the tensor cores; unchecked."""

    def __post_init__(self) -> None:
        pass


def swizzled(matrix: Tensor, rows: int, columns: int) -> Swizzled:
    """`matrix`, `dense` and with rows of whole 16 bytes, in tiles of rows × columns."""
    shape = matrix.shape
    return Swizzled(matrix, list(shape), [shape[1], 1], [rows, columns], layout(rows, columns, matrix.dtype))


@cache
def layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(
        [rows, columns], gl.float16 if dtype == torch.float16 else gl.bfloat16
    )
