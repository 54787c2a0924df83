"""Weight gradients of the experts for Hopper, warp-specialised, with one operand gathered on load.

The same arithmetic as `fused_backward.gathered_gradient_kernel`. Four warps fetch: rows of tokens by ordinary
asynchronous copies, rows of the list by the copy engine. The gathered operand has the narrow side of a tile, because
ordinary copies cost instructions. ∂W_up has its tokens in columns, so its tiles are turned on their way out.

The two groups that multiply share a tile, as in `hopper_hidden`. There is little behind the products to hide.

Legend: A rows, N experts, D model width, O columns of the list's operand; B… tile sizes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from grmoe.kernels.early import await_inputs
from grmoe.kernels.hopper import copy_rows, make_barriers, store_wide, sum_products


@gluon.jit
def place_tile(tile, offset_ptr, D: gl.constexpr, O: gl.constexpr, BD: gl.constexpr, BO: gl.constexpr):
    """(expert, first and end row, first column of either operand) of a tile."""
    d_tiles: gl.constexpr = (D + BD - 1) // BD
    o_tiles: gl.constexpr = (O + BO - 1) // BO
    expert = tile // (d_tiles * o_tiles)
    end = gl.load(offset_ptr + expert)
    start = gl.load(offset_ptr + expert - 1, mask=expert > 0, other=0)
    return expert, start, end, tile % d_tiles * BD, tile // d_tiles % o_tiles * BO


@gluon.jit
def _fetch(
    x_ptr, rows_ptr, rows_desc, tiles, token_ptr, offset_ptr,
    num_tiles: gl.constexpr, D: gl.constexpr, O: gl.constexpr,
    BD: gl.constexpr, BO: gl.constexpr, BA: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Four warps: fetch both operands of every tile of this program, as buffers become empty."""
    x_tiles, row_tiles, full, empty, _turns = tiles
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    here = gl.arange(0, BA, gl.SliceLayout(1, WIDE))
    i = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, start, end, d, o = place_tile(tile, offset_ptr, D, O, BD, BO)
        # Tokens one step ahead, because their rows cannot be asked for before they are known.
        token = gl.load(token_ptr + start + here, mask=start + here < end, other=0)
        for first in range(start, end, BA):
            row = first + here
            later = gl.load(token_ptr + row + BA, mask=row + BA < end, other=0)
            stage = i % STAGES
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)  # all are empty at first
            ready, tile_of_rows = full.index(stage), row_tiles.index(stage)
            if first + BA <= end:
                mbarrier.expect(ready, rows_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(rows_desc, [first, o], ready, tile_of_rows)
            else:  # later rows belong to the next expert, or are unused and may be NaN
                mbarrier.arrive(ready, count=1)
                copy_rows(tile_of_rows.slice(0, 128, 1), rows_ptr, row, row < end, o, O)
                copy_rows(tile_of_rows.slice(128, 128, 1), rows_ptr, row, row < end, o + 128, O)
            copy_rows(x_tiles.index(stage), x_ptr, token, row < end, d, D)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            token = later
            i += 1


@gluon.jit
def _store_turned(ptr, tile, first, column, end, width: gl.constexpr):
    """A tile of 64 × 128, turned: columns `first`…, of rows `column`… up to `end`, of a matrix of `width` columns."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.convert_layout(tile.to(ptr.dtype.element_ty).permute((1, 0)), WIDE)
    row = column + gl.arange(0, 128, gl.SliceLayout(1, WIDE))
    here = first + gl.arange(0, 64, gl.SliceLayout(0, WIDE))
    place = row[:, None].to(gl.int64) * width + here[None, :]
    gl.store(ptr + place, tile, mask=(row < end)[:, None] & (here < width)[None, :])


@gluon.jit
def _multiply(
    HALF: gl.constexpr, tiles, out_ptr, offset_ptr,
    num_tiles: gl.constexpr, D: gl.constexpr, O: gl.constexpr, TURNED: gl.constexpr,
    BD: gl.constexpr, BO: gl.constexpr, BA: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """Four warps: one half of the gathered operand's columns of every tile of this program."""
    i, turn = 0, 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, start, end, d, o = place_tile(tile, offset_ptr, D, O, BD, BO)
        steps = (end - start + BA - 1) // BA
        leads = steps >= STAGES  # an expert may have few rows, or none
        acc, i = sum_products(HALF, tiles, i, turn, leads, steps, True, True, False, STAGES, LEAD)
        turn += leads.to(gl.int32)
        left, right = acc.reshape([64, 2, 128]).permute((0, 2, 1)).split()
        d += HALF * 64
        place = out_ptr + expert.to(gl.int64) * D * O
        if TURNED:
            _store_turned(place, left, d, o, O, D)
            _store_turned(place, right, d, o + 128, O, D)
        else:
            store_wide(place, left, d, o, D, O, O)
            store_wide(place, right, d, o + 128, D, O, O)


@gluon.jit
def gathered_gradient_kernel(
    x_ptr, rows_ptr, rows_desc, out_ptr, token_ptr, offset_ptr,
    num_tiles: gl.constexpr, D: gl.constexpr, O: gl.constexpr, TURNED: gl.constexpr,
    BD: gl.constexpr, BO: gl.constexpr, BA: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """Persistent; BD = 128 gathered columns by BO = 256 columns of the list's operand, BA = 64 rows at a time."""
    await_inputs()
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BA, BD], x_ptr.dtype.element_ty)
    x_tiles = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BA, BD], SHARED)
    row_tiles = gl.allocate_shared_memory(rows_desc.dtype, [STAGES, BA, BO], rows_desc.layout)
    # Rows of tokens, and the last rows of an expert, are copied by each thread.
    full, empty, turns = make_barriers(129, STAGES, LEAD)
    tiles = (x_tiles, row_tiles, full, empty, turns)
    gl.warp_specialize(
        [
            (_multiply, (
                0, tiles, out_ptr, offset_ptr, num_tiles, D, O, TURNED, BD, BO, BA, STAGES, LEAD,
            )),
            (_multiply, (
                1, tiles, out_ptr, offset_ptr, num_tiles, D, O, TURNED, BD, BO, BA, STAGES, LEAD,
            )),
            (_fetch, (
                x_ptr, rows_ptr, rows_desc, tiles, token_ptr, offset_ptr, num_tiles, D, O, BD, BO, BA, STAGES,
            )),
        ],
        [4, 4],
        [216, 64],
    )  # fmt: skip
