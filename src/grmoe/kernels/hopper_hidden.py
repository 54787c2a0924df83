"""The gradient of the experts' hidden values for Hopper, warp-specialised: gathered on load, finished before the store.

The same arithmetic as `fused_backward.hidden_gradient_kernel`. As in `hopper_gemm`, four warps fetch: rows of the
output's gradient by ordinary asynchronous copies, weights by the copy engine. Two groups of four warps multiply 64 rows
each, of the same tile: both read the same weights from shared memory. With a tile for each group (ping-pong) one
group's epilogue would always hide behind the other's products. But the tiles would have to be smaller, because a
group's sums fill its registers, and a multiprocessor would fetch a third more bytes per product.

Legend: A rows, N experts (padded to a power of two), D model width, I expert width, C column tiles; B… tile sizes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from grmoe.kernels.early import await_inputs
from grmoe.kernels.grouped_gemm import locate
from grmoe.kernels.hopper import copy_rows, make_barriers, sum_products, tiles_of_experts
from grmoe.kernels.rows import differentiate


@gluon.jit
def _fetch(
    grad_ptr, down_ptr, down_desc, tiles, token_ptr, offset_ptr,
    num_experts: gl.constexpr, D: gl.constexpr, I: gl.constexpr,
    BM: gl.constexpr, BI: gl.constexpr, BD: gl.constexpr, GROUP: gl.constexpr, NP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Four warps: fetch the rows and weights of every tile of this program, as buffers become empty."""
    a_tiles, b_tiles, full, empty, _turns = tiles
    lists, row_tiles = tiles_of_experts(offset_ptr, num_experts, BM, NP)
    column_tiles: gl.constexpr = (I + BI - 1) // BI
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    i = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        expert, first, end, column_tile = locate(tile, lists, row_tiles, column_tiles, GROUP, BM)
        row = first + gl.arange(0, BM, gl.SliceLayout(1, ROWS))
        token = gl.load(token_ptr + row, mask=row < end, other=0).to(gl.int64)
        here = gl.arange(0, BD, gl.SliceLayout(0, ROWS))
        a_rows = grad_ptr + token[:, None] * D + here[None, :]
        column = column_tile * BI
        for d in range(0, D // BD * BD, BD):
            stage = i % STAGES
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)  # all are empty at first
            ready = full.index(stage)
            mbarrier.expect(ready, down_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(down_desc, [expert * D + d, column], ready, b_tiles.index(stage))
            async_copy.async_copy_global_to_shared(a_tiles.index(stage), a_rows + d)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            i += 1
        if D % BD != 0:  # the next expert's weights follow, and their NaN must stay out
            d = D // BD * BD
            stage = i % STAGES
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
            ready, b_tile = full.index(stage), b_tiles.index(stage)
            mbarrier.arrive(ready, count=1)
            b_row = d + gl.arange(0, BD, gl.SliceLayout(1, WIDE))
            copy_rows(b_tile.slice(0, 128, 1), down_ptr, expert * D + b_row, b_row < D, column, I)
            copy_rows(b_tile.slice(128, 128, 1), down_ptr, expert * D + b_row, b_row < D, column + 128, I)
            async_copy.async_copy_global_to_shared(
                a_tiles.index(stage), a_rows + d, mask=(d + here < D)[None, :]
            )
            async_copy.mbarrier_arrive(ready, increment_count=False)
            i += 1


@gluon.jit
def _halves(tile, COLUMNS: gl.constexpr):
    return tile.reshape([64, 2, COLUMNS // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _read(inner_ptr, place, inside, I: gl.constexpr, GLU: gl.constexpr):
    """Pre-activations at a piece's places: (first, up) with GLU, else twice the same."""
    first = gl.load(inner_ptr + place, mask=inside, other=0.0)
    if GLU:
        return first, gl.load(inner_ptr + I + place, mask=inside, other=0.0)
    return first, first


@gluon.jit
def _multiply(
    HALF: gl.constexpr, tiles, inner_ptr, pair_ptr, weight_ptr, offset_ptr, results,
    num_experts: gl.constexpr, D: gl.constexpr, I: gl.constexpr, GLU: gl.constexpr,
    BM: gl.constexpr, BI: gl.constexpr, BD: gl.constexpr, GROUP: gl.constexpr, NP: gl.constexpr, STAGES: gl.constexpr,
    LEAD: gl.constexpr,
):  # fmt: skip
    """Four warps: one half of the rows of every tile of this program."""
    grad_inner_ptr, hidden_ptr, partial_ptr = results
    lists, row_tiles = tiles_of_experts(offset_ptr, num_experts, BM, NP)
    column_tiles: gl.constexpr = (I + BI - 1) // BI
    # A row of 32 values in 4 threads of 16 bytes: reads and writes are whole sectors, and no two threads share a value.
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    row = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    here = gl.arange(0, 32, gl.SliceLayout(0, WIDE))
    width: gl.constexpr = 2 * I if GLU else I
    steps: gl.constexpr = (D + BD - 1) // BD
    i = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        _, first, end, column_tile = locate(tile, lists, row_tiles, column_tiles, GROUP, BM)
        column = column_tile * BI
        mine = row < end - first
        pair = gl.load(pair_ptr + first + row, mask=mine, other=0)
        weight = gl.load(weight_ptr + pair, mask=mine, other=0.0).to(gl.float32)[:, None]
        # Places inside the tile take 32 bits.
        inner_tile = first.to(gl.int64) * width + column
        hidden_tile = hidden_ptr + (first.to(gl.int64) * I + column)
        inner_place = row[:, None] * width + here[None, :]
        hidden_place = row[:, None] * I + here[None, :]
        # Pre-activations are read a piece ahead: the first arrives while the tensor cores work.
        read = _read(
            inner_ptr + inner_tile, inner_place, mine[:, None] & (column + here < I)[None, :], I, GLU
        )
        acc, i = sum_products(HALF, tiles, i, i // steps, True, steps, True, False, False, STAGES, LEAD)
        left, right = _halves(acc, 256)
        q_0, q_1 = _halves(left, 128)
        q_2, q_3 = _halves(right, 128)
        pieces = _halves(q_0, 64) + _halves(q_1, 64) + _halves(q_2, 64) + _halves(q_3, 64)
        dots = gl.zeros([64, 32], gl.float32, WIDE)
        for p in gl.static_range(8):
            # A block of its own: otherwise the compiler puts off the sums of all pieces and runs out of registers.
            if column + p * 32 < I:
                a, up = read
                if p < 7:
                    ahead = inner_ptr + (inner_tile + (p + 1) * 32)
                    inside = mine[:, None] & (column + (p + 1) * 32 + here < I)[None, :]
                    read = _read(ahead, inner_place, inside, I, GLU)
                q = gl.convert_layout(pieces[p], WIDE)
                h, slope, slope_up = differentiate(a.to(gl.float32), up.to(gl.float32), GLU)
                inside = mine[:, None] & (column + p * 32 + here < I)[None, :]
                out = grad_inner_ptr + (inner_tile + p * 32)
                if GLU:
                    gl.store(
                        out + I + inner_place,
                        (weight * q * slope_up).to(grad_inner_ptr.dtype.element_ty),
                        mask=inside,
                    )
                gl.store(
                    out + inner_place, (weight * q * slope).to(grad_inner_ptr.dtype.element_ty), mask=inside
                )
                gl.store(
                    hidden_tile + p * 32 + hidden_place,
                    (weight * h).to(hidden_ptr.dtype.element_ty),
                    mask=inside,
                )
                dots += q * h
        place = (first + row).to(gl.int64) * column_tiles + column_tile
        gl.store(partial_ptr + place, gl.sum(dots, axis=1), mask=mine)


@gluon.jit
def hidden_gradient_kernel(
    grad_ptr, down_ptr, down_desc, inner_ptr, token_ptr, pair_ptr, weight_ptr, offset_ptr,
    grad_inner_ptr, hidden_ptr, partial_ptr,
    num_experts: gl.constexpr, D: gl.constexpr, I: gl.constexpr, GLU: gl.constexpr,
    BM: gl.constexpr, BI: gl.constexpr, BD: gl.constexpr, GROUP: gl.constexpr, NP: gl.constexpr, STAGES: gl.constexpr,
    LEAD: gl.constexpr,
):  # fmt: skip
    """Persistent; BM = 128 rows by BI = 256 hidden values."""
    await_inputs()
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BD], grad_ptr.dtype.element_ty)
    a_tiles = gl.allocate_shared_memory(grad_ptr.dtype.element_ty, [STAGES, BM, BD], SHARED)
    b_tiles = gl.allocate_shared_memory(down_desc.dtype, [STAGES, BD, BI], down_desc.layout)
    # Rows are copied by each thread.
    full, empty, turns = make_barriers(129, STAGES, LEAD)
    tiles = (a_tiles, b_tiles, full, empty, turns)
    results = (grad_inner_ptr, hidden_ptr, partial_ptr)
    gl.warp_specialize(
        [
            (_multiply, (
                0, tiles, inner_ptr, pair_ptr, weight_ptr, offset_ptr, results,
                num_experts, D, I, GLU, BM, BI, BD, GROUP, NP, STAGES, LEAD,
            )),
            (_multiply, (
                1, tiles, inner_ptr, pair_ptr, weight_ptr, offset_ptr, results,
                num_experts, D, I, GLU, BM, BI, BD, GROUP, NP, STAGES, LEAD,
            )),
            (_fetch, (
                grad_ptr, down_ptr, down_desc, tiles, token_ptr, offset_ptr,
                num_experts, D, I, BM, BI, BD, GROUP, NP, STAGES,
            )),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip
