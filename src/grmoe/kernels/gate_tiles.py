"""Tile sizes of the fused gate's kernels.

Legend: N experts, K rank.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from grmoe.kernels.launch import ceil_div, power_of_2
from grmoe.kernels.runtime import INTERPRETED


class Tiles(NamedTuple):
    """Tile sizes of one kernel: tokens, packed columns, width; warps and pipeline stages."""

    tokens: int
    columns: int
    width: int
    warps: int
    stages: int
    at_once: bool = False  # all three column tiles in one pass


class Plan(NamedTuple):
    """Sizes that follow from the shapes."""

    experts: int  # padded
    columns: int  # padded
    forward: Tiles
    backward: Tiles
    rescale: Tiles  # the backward without its GEMM, where the projection was kept
    input_gradient: Tiles
    precision: str


# For bf16 and fp16, measured on Hopper (docs/results/kernel-tuning.md): many columns, few, exactly three tiles.
WIDE = Tiles(128, 256, 64, 8, 4)
NARROW = Tiles(128, 128, 64, 8, 4)
ONE_PASS = Tiles(128, 128, 64, 8, 3, at_once=True)
LINEAR = Tiles(64, 16, 128, 4, 4)


SHARED = 200_000  # bytes that the pipeline's tiles may take of a multiprocessor's 227 KB


def _linear(columns: int, itemsize: int) -> Tiles:
    """As many stages as fit: a matrix of 256 rows in bf16 leaves room for fewer than four. In fp32, tiles are narrow,
    because the parts of three tf32 products take room too."""
    width = LINEAR.width if itemsize == 2 else 32
    stage = (LINEAR.tokens + columns) * width * itemsize
    return LINEAR._replace(columns=columns, width=width, stages=max(1, min(LINEAR.stages, SHARED // stage)))


@cache
def plan(dtype: torch.dtype, num_experts: int, rank: int, square: bool, hopper: bool) -> Plan:
    """The same for every batch of a router: nothing is tuned at run time, so equal inputs give equal bits."""
    NP = max(power_of_2(num_experts), 2 if square else 16)
    precision, gradient = "ieee", Tiles(128, 64, 256, 8, 3)
    if dtype == torch.float32:
        precision = "ieee" if INTERPRETED else "tf32x3"  # three tf32 products, as exact as fp32
        forward, gradient = Tiles(64, max(NP, 64), 32, 8, 2), Tiles(64, 32, 64, 8, 2)
    elif not hopper:  # small enough for any multiprocessor
        forward, gradient = Tiles(64, max(NP, 64), 32, 4, 2), Tiles(64, 32, 128, 4, 2)
    elif rank * NP == 3 * ONE_PASS.columns:
        forward = ONE_PASS
    elif rank * NP >= (2 if 8 <= NP <= 64 else 3) * WIDE.columns or NARROW.columns < NP:
        forward = WIDE  # Triton unrolls a loop over the second of two tiles, and registers run out
    else:
        forward = NARROW
    if not square:
        forward = _linear(NP, dtype.itemsize)
    backward = forward._replace(stages=min(forward.stages, 3))
    rescale = Tiles(64, min(forward.columns, max(128, NP)), forward.width, 8, 1)
    C = ceil_div(rank * NP, forward.columns) * forward.columns
    return Plan(NP, C, forward, backward, rescale, gradient, precision)
