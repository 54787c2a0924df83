"""Grouped GEMMs of the experts for Hopper, warp-specialised: tokens gathered on load, activation before the store.

The same arithmetic as `grouped_gemm.grouped_gemm_kernel`. Four warps fetch: weights and rows of the list by the copy
engine. It cannot load scattered rows, so tokens come by ordinary asynchronous copies. Both arrive at one barrier.

Legend: A rows, N experts (padded to a power of two), K inner dimension, O output columns; B… tile sizes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from grmoe.kernels.early import await_inputs
from grmoe.kernels.grouped_gemm import locate
from grmoe.kernels.hopper import make_barriers, store_wide, sum_products, tiles_of_experts
from grmoe.kernels.rows import gelu, sigmoid


@gluon.jit
def _fetch(
    a_ptr, a_desc, b_desc, tiles, token_ptr, offset_ptr,
    num_experts: gl.constexpr, K: gl.constexpr, O: gl.constexpr, B_ROWS: gl.constexpr,
    GATHER: gl.constexpr, TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr,
    BM: gl.constexpr, BO: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, NP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Four warps: fetch the rows and weights of every tile of this program, as buffers become empty."""
    a_tiles, b_tiles, full, empty, _turns = tiles
    lists, row_tiles = tiles_of_experts(offset_ptr, num_experts, BM, NP)
    column_tiles: gl.constexpr = (O + BO - 1) // BO
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    here = gl.arange(0, BK, gl.SliceLayout(0, ROWS))
    i = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        expert, first, end, column_tile = locate(tile, lists, row_tiles, column_tiles, GROUP, BM)
        if GATHER:
            row = first + gl.arange(0, BM, gl.SliceLayout(1, ROWS))
            token = gl.load(token_ptr + row, mask=row < end, other=0).to(gl.int64)
            a_rows = a_ptr + token[:, None] * K + here[None, :]
        b_row, column = expert * B_ROWS, column_tile * BO
        for k in range(0, K, BK):
            stage = i % STAGES
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)  # all are empty at first
            ready, b_tile = full.index(stage), b_tiles.index(stage)
            mbarrier.expect(
                ready,
                b_desc.block_type.nbytes * (2 if ACTIVATION == 1 else 1)
                + (0 if GATHER else a_desc.block_type.nbytes),
            )
            if ACTIVATION == 1:  # stack the two halves, so that one product computes both
                tma.async_copy_global_to_shared(b_desc, [b_row + column, k], ready, b_tile.slice(0, BO))
                tma.async_copy_global_to_shared(b_desc, [b_row + O + column, k], ready, b_tile.slice(BO, BO))
            elif TRANSPOSED:
                tma.async_copy_global_to_shared(b_desc, [b_row + column, k], ready, b_tile)
            else:
                tma.async_copy_global_to_shared(b_desc, [b_row + k, column], ready, b_tile)
            if not GATHER:
                tma.async_copy_global_to_shared(a_desc, [first, k], ready, a_tiles.index(stage))
            else:
                if K % BK == 0:
                    async_copy.async_copy_global_to_shared(a_tiles.index(stage), a_rows + k)
                else:  # zeros past the end
                    async_copy.async_copy_global_to_shared(
                        a_tiles.index(stage), a_rows + k, mask=(k + here < K)[None, :]
                    )
                async_copy.mbarrier_arrive(ready, increment_count=False)
            i += 1


@gluon.jit
def _multiply(
    HALF: gl.constexpr, tiles, out_ptr, inner_ptr, offset_ptr,
    num_experts: gl.constexpr, K: gl.constexpr, O: gl.constexpr,
    GATHER: gl.constexpr, TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr, SAVE: gl.constexpr,
    BM: gl.constexpr, BO: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, NP: gl.constexpr, STAGES: gl.constexpr,
    LEAD: gl.constexpr,
):  # fmt: skip
    """Four warps: one half of the rows of every tile of this program."""
    lists, row_tiles = tiles_of_experts(offset_ptr, num_experts, BM, NP)
    column_tiles: gl.constexpr = (O + BO - 1) // BO
    steps: gl.constexpr = (K + BK - 1) // BK
    i = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        _, first, end, column_tile = locate(tile, lists, row_tiles, column_tiles, GROUP, BM)
        acc, i = sum_products(
            HALF, tiles, i, i // steps, True, steps, GATHER, False, TRANSPOSED, STAGES, LEAD
        )
        first += HALF * 64
        column = column_tile * BO
        left, right = acc.reshape([64, 2, 128]).permute((0, 2, 1)).split()
        if ACTIVATION == 1:
            if SAVE:
                store_wide(inner_ptr, left, first, column, end, O, 2 * O)
                store_wide(inner_ptr + O, right, first, column, end, O, 2 * O)
            store_wide(out_ptr, left * sigmoid(left) * right, first, column, end, O, O)
        else:
            if SAVE:
                store_wide(inner_ptr, left, first, column, end, O, O)
                store_wide(inner_ptr, right, first, column + 128, end, O, O)
            if ACTIVATION == 2:
                left, right = gelu(left), gelu(right)
            store_wide(out_ptr, left, first, column, end, O, O)
            store_wide(out_ptr, right, first, column + 128, end, O, O)


@gluon.jit
def grouped_kernel(
    a_ptr, a_desc, b_desc, out_ptr, inner_ptr, token_ptr, offset_ptr,
    num_experts: gl.constexpr, K: gl.constexpr, O: gl.constexpr, B_ROWS: gl.constexpr,
    GATHER: gl.constexpr, TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr, SAVE: gl.constexpr,
    BM: gl.constexpr, BO: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, NP: gl.constexpr, STAGES: gl.constexpr,
    LEAD: gl.constexpr,
):  # fmt: skip
    """Persistent; BM = 128 rows, and 256 columns: BO = 128 of either half with SwiGLU, else BO = 256.

    Arguments as in `grouped_gemm_kernel`. B that is not TRANSPOSED needs K of whole steps. With GATHER `a_desc` is not
    read.
    """
    await_inputs()
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], a_ptr.dtype.element_ty)
    a_tiles = gl.allocate_shared_memory(a_ptr.dtype.element_ty, [STAGES, BM, BK], SHARED)
    b_shape: gl.constexpr = [STAGES, 256, BK] if TRANSPOSED else [STAGES, BK, 256]
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, b_shape, b_desc.layout)
    # Rows of tokens are copied by each thread.
    full, empty, turns = make_barriers(129 if GATHER else 1, STAGES, LEAD)
    tiles = (a_tiles, b_tiles, full, empty, turns)
    gl.warp_specialize(
        [
            (_multiply, (
                0, tiles, out_ptr, inner_ptr, offset_ptr,
                num_experts, K, O, GATHER, TRANSPOSED, ACTIVATION, SAVE, BM, BO, BK, GROUP, NP, STAGES, LEAD,
            )),
            (_multiply, (
                1, tiles, out_ptr, inner_ptr, offset_ptr,
                num_experts, K, O, GATHER, TRANSPOSED, ACTIVATION, SAVE, BM, BO, BK, GROUP, NP, STAGES, LEAD,
            )),
            (_fetch, (
                a_ptr, a_desc, b_desc, tiles, token_ptr, offset_ptr,
                num_experts, K, O, B_ROWS, GATHER, TRANSPOSED, ACTIVATION, BM, BO, BK, GROUP, NP, STAGES,
            )),
        ],
        [4, 4],
        [216, 64],
    )  # fmt: skip
