"""Common parts of the warp-specialised kernels for Hopper.

In Triton's pipeline the same warps fetch, multiply and finish a tile, one after the other. These kernels are written in
Gluon, the layer below Triton's tiles: one group of warps fetches and two multiply. With a lead (`await_lead`), one of
the two keeps the tensor cores busy while the other finishes its half of a tile. Gluon makes explicit which group waits
for which, and lets one tile of shared memory feed tensor cores and registers. Results equal those of the Triton kernels
bit for bit.

Gluon is experimental in Triton. Where it is missing or has changed, the Triton kernels run instead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Tiles of a grouped GEMM: 64 rows for each of the two groups that multiply; four of 48 KB in flight.
ROWS, COLUMNS, INNER, STAGES = 128, 256, 64, 4
# Steps by which the first of the two groups goes ahead of the second (`await_lead`). At most STAGES: with more, each
# group waits for the other. Not measured yet.
LEAD = 0


def lead(inner: int) -> int:
    """LEAD, for products over `inner` columns. With fewer steps than stages, groups could be two tiles apart."""
    return LEAD if inner > (STAGES - 1) * INNER else 0


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


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def tiles_of_experts(offset_ptr, num_experts: gl.constexpr, BM: gl.constexpr, NP: gl.constexpr):
    """(expert, end, running sum of row tiles) of each expert, and the total. Each warp holds the whole list."""
    expert = gl.arange(0, NP, gl.BlockedLayout([NP // 32], [32], [4], [0]))
    end_N = gl.load(offset_ptr + expert, mask=expert < num_experts, other=0)
    start_N = gl.load(offset_ptr + expert - 1, mask=(expert > 0) & (expert < num_experts), other=0)
    tiles_N = gl.where(expert < num_experts, (end_N - start_N + BM - 1) // BM, 0)
    return (expert, end_N, gl.associative_scan(tiles_N, 0, _add)), gl.sum(tiles_N, axis=0)


@gluon.jit
def make_barriers(FETCHERS: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr):
    """(full, empty, turns). FETCHERS: how many arrive at a full tile, the copy engine among them.

    Without a lead nobody uses `turns`, so there are none: the compiler would give their memory to others.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = full
    if LEAD > 0:
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=FETCHERS)
        mbarrier.init(empty.index(i), count=2)  # both halves must be done with a tile
    fence_async_shared()
    return full, empty, turns


@gluon.jit
def await_lead(turns, turn, leads, HALF: gl.constexpr, LEAD: gl.constexpr):
    """The second group waits here until the first has begun LEAD steps of this tile (0: it does not wait).

    Otherwise both reach the end of a tile at once, and the tensor cores wait while both finish it. The groups are less
    than a tile and LEAD steps apart, because they share the tiles in flight. So two barriers in turns are enough.

    turn: counts the tiles in which there is a lead. leads: whether this is one. It must have as many steps as there
    are tiles in flight.
    """
    if HALF == 1 and LEAD > 0:
        mbarrier.wait(turns.index(turn & 1), (turn >> 1) & 1, pred=leads)


@gluon.jit
def give_lead(turns, turn, step, leads, HALF: gl.constexpr, LEAD: gl.constexpr):
    """The first group has begun this step."""
    if HALF == 0 and LEAD > 0:
        mbarrier.arrive(turns.index(turn & 1), count=1, pred=(step == LEAD - 1) & leads)


@gluon.jit
def sum_products(
    HALF: gl.constexpr, tiles, i, turn, leads, steps, COPIED: gl.constexpr,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """Σ over `steps` of this group's half of A times B, 64 × 256, from tiles as they become full.

    i: steps before. COPIED: threads have copied to a tile too. A_TURNED, B_TURNED: rows of the operand's tile are steps
    of the sum (A), or columns of the result (B). turn, leads: see `await_lead`.
    """
    a_tiles, b_tiles, full, empty, turns = tiles
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]
    )
    await_lead(turns, turn, leads, HALF, LEAD)
    acc = gl.zeros([64, 256], gl.float32, PRODUCTS)
    for step in range(steps):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        if COPIED:
            fence_async_shared()  # makes them visible to the tensor cores
        if A_TURNED:
            a = a_tiles.index(stage).slice(HALF * 64, 64, 1).permute((1, 0))
        else:
            a = a_tiles.index(stage).slice(HALF * 64, 64)
        if B_TURNED:
            acc = warpgroup_mma(a, b_tiles.index(stage).permute((1, 0)), acc, is_async=True)
        else:
            acc = warpgroup_mma(a, b_tiles.index(stage), acc, is_async=True)
        give_lead(turns, turn, step, leads, HALF, LEAD)
        # The previous product is done, so its tiles may be refilled.
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=step > 0)
        i += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    return acc, i


@gluon.jit
def copy_rows(tile, ptr, row, inside, column, WIDTH: gl.constexpr):
    """Copy columns of given rows of a matrix into shared memory, asynchronously. Zeros where not `inside`.

    A tile has 128 columns; those past WIDTH get zeros too.
    """
    LAYOUT: gl.constexpr = row.type.layout.parent
    here = column + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    place = row[:, None].to(gl.int64) * WIDTH + here[None, :]
    async_copy.async_copy_global_to_shared(tile, ptr + place, mask=inside[:, None] & (here < WIDTH)[None, :])


@gluon.jit
def store_wide(ptr, tile, first, column, end, O: gl.constexpr, STRIDE: gl.constexpr):
    """A tile of 64 × 128, through shared memory: from the tensor cores' layout a row would go in 16-byte pieces."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    tile = gl.convert_layout(tile.to(ptr.dtype.element_ty), WIDE)
    row = first + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    here = column + gl.arange(0, 128, gl.SliceLayout(0, WIDE))
    place = row[:, None].to(gl.int64) * STRIDE + here[None, :]
    gl.store(ptr + place, tile, mask=(row < end)[:, None] & (here < O)[None, :])
