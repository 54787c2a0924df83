"""What the warp-specialised kernels for Hopper share.

Triton's own pipeline lets the same warps fetch, multiply and finish a tile, one after the other. Written in Gluon, the
layer below Triton's tiles, one group of warps fetches and two multiply; while one of these finishes its half of a tile
the other keeps the tensor cores busy. Gluon lets us say what Triton does not: who waits for whom, and that a tile of
shared memory feeds tensor cores and registers alike. Results equal those of the Triton kernels to the bit.

Gluon is still experimental in Triton. Where it is missing or has changed, the Triton kernels do the work.
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
