"""Grouped GEMM over the dispatch list, with gather and activation inside.

    out[a] = epilogue(A[a] · B_e(a)),   rows of expert e between its offsets

The A operand is a row of the list, or its token, gathered on load. The epilogue applies the activation; SwiGLU's two
halves are computed side by side, so gate and up meet in registers. In training it also writes the pre-activations. Each
program finds a tile's expert from the offsets. Tiles past the last used row do not exist, so runtime scales with the
experts actually computed.

Legend: A rows, N experts (padded to a power of two), K inner dimension, O output columns; B… tile sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from grmoe.kernels.early import await_inputs
from grmoe.kernels.launch import ceil_div, launch, power_of_2, tiled
from grmoe.kernels.rows import gelu, sigmoid
from grmoe.kernels.runtime import INTERPRETED, attempt, num_programs, specialises

# Whether GEMMs without gather and activation are warp-specialised too. Triton's pipeline was as fast while both groups
# reached the end of a tile together (`hopper.LEAD`). Not measured since.
ALL_SPECIALISED = False
WHOLE = 64  # columns of a step of the warp-specialised kernel


class Tiles(NamedTuple):
    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    group: int = 16  # row tiles that share the columns of B while they are in the cache
    flatten: bool = False  # one pipeline over all tiles of a program
    programs: int = 1  # per multiprocessor

    @property
    def thin(self) -> bool:
        """For experts with few rows: the time is that of reading their weights."""
        return self.programs > 1


def listed(num_experts: int) -> int:
    """Length of a kernel's list of experts: a whole warp's lanes at least.

    Sums over fewer lanes leave the compiler in doubt whether all threads agree on a tile. It then computes the tensor
    cores' addresses in each thread, between the products.
    """
    return max(32, power_of_2(num_experts))


@triton.jit
def locate(tile, lists, row_tiles, column_tiles: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr):
    """(expert, first row, end row, column tile) of a tile; groups of row tiles share the columns.

    lists: the experts' indices, ends, and running sums of row tiles.
    """
    experts_N, end_N, last_N = lists
    width = GROUP * column_tiles
    group = tile // width
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    index = group * GROUP + (tile % width) % size
    column = (tile % width) // size
    expert = tl.sum((last_N <= index).to(tl.int32), axis=0)
    previous_N = experts_N == expert - 1
    before = tl.sum(tl.where(previous_N, last_N, 0), axis=0)
    start = tl.sum(tl.where(previous_N, end_N, 0), axis=0) + (index - before) * BM
    return expert, start, tl.sum(tl.where(experts_N == expert, end_N, 0), axis=0), column


@triton.jit
def grouped_gemm_kernel(
    a_ptr, a_desc, b_desc, out_ptr, inner_ptr, token_ptr, offset_ptr,
    num_experts: tl.constexpr, K: tl.constexpr, O: tl.constexpr, B_ROWS: tl.constexpr,
    GATHER: tl.constexpr, TRANSPOSED: tl.constexpr, ACTIVATION: tl.constexpr, SAVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, NP: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """ACTIVATION: 0 none, 1 SwiGLU (B holds 2·O rows per expert, gate first), 2 GELU.

    TRANSPOSED: B is (N·O, K), rows are output columns; otherwise (N·K, O).
    """
    await_inputs()
    experts = tl.arange(0, NP)
    end_N = tl.load(offset_ptr + experts, mask=experts < num_experts, other=0)
    start_N = tl.load(offset_ptr + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    tiles_N = tl.where(experts < num_experts, (end_N - start_N + BM - 1) // BM, 0)
    lists = (experts, end_N, tl.cumsum(tiles_N, axis=0))
    row_tiles = tl.sum(tiles_N, axis=0)
    column_tiles: tl.constexpr = (O + BO - 1) // BO
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        expert, first, end, column_tile = locate(tile, lists, row_tiles, column_tiles, GROUP, BM)
        row = first + tl.arange(0, BM)
        column = column_tile * BO
        if GATHER:
            token = tl.load(token_ptr + row, mask=row < end, other=0).to(tl.int64)
            a_rows = a_ptr + token[:, None] * K
        acc = tl.zeros((BM, BO), tl.float32)
        if ACTIVATION == 1:
            acc_up = tl.zeros((BM, BO), tl.float32)
        for k in range(0, K, BK):
            if GATHER:
                here = k + tl.arange(0, BK)
                if BM <= 64:  # of a thin tile most rows may be unused: they are not read
                    a = tl.load(
                        a_rows + here[None, :], mask=(row < end)[:, None] & (here < K)[None, :], other=0.0
                    )
                elif K % BK == 0:
                    a = tl.load(a_rows + here[None, :])
                else:
                    a = tl.load(a_rows + here[None, :], mask=(here < K)[None, :], other=0.0)
            else:
                a = a_desc.load([first, k])
            if TRANSPOSED:
                b = b_desc.load([expert * B_ROWS + column, k]).T
            else:
                b = b_desc.load([expert * B_ROWS + k, column])
                if K % BK != 0:  # the next expert follows, and its NaN must stay out
                    b = tl.where((k + tl.arange(0, BK) < K)[:, None], b, 0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            if ACTIVATION == 1:
                b_up = b_desc.load([expert * B_ROWS + O + column, k]).T
                acc_up = tl.dot(a, b_up, acc_up, input_precision=PRECISION)
        here = column + tl.arange(0, BO)
        inside = (row < end)[:, None] & (here < O)[None, :]
        if SAVE:
            width: tl.constexpr = 2 * O if ACTIVATION == 1 else O
            place = inner_ptr + row[:, None].to(tl.int64) * width + here[None, :]
            tl.store(place, acc.to(inner_ptr.dtype.element_ty), mask=inside)
            if ACTIVATION == 1:
                tl.store(place + O, acc_up.to(inner_ptr.dtype.element_ty), mask=inside)
        if ACTIVATION == 1:
            acc = acc * sigmoid(acc) * acc_up
        if ACTIVATION == 2:
            acc = gelu(acc)
        place = out_ptr + row[:, None].to(tl.int64) * O + here[None, :]
        tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offset: Tensor,
    tiles: Tiles,
    *,
    token: Tensor | None = None,
    transposed: bool,
    activation: int = 0,
    inner: Tensor | None = None,
) -> Tensor:
    """a (A, K), or (T, K) gathered by `token`; b (N, O, K) when transposed, else (N, K, O); `inner` receives the
    pre-activations."""
    N = len(b)
    O, K = (
        (b.shape[1] // (2 if activation == 1 else 1), b.shape[2]) if transposed else (b.shape[2], b.shape[1])
    )
    A = len(a) if token is None else len(token)
    out = torch.empty(A, O, dtype=a.dtype, device=a.device)
    flat = b.view(-1, b.shape[2])
    pointers = (out, out if inner is None else inner, offset if token is None else token, offset)
    programs = num_programs(a.device) * tiles.programs

    def plain() -> None:
        shape = (tiles.columns, tiles.inner) if transposed else (tiles.inner, tiles.columns)
        args = (a, tiled(a, tiles.rows, tiles.inner), tiled(flat, *shape), *pointers)
        precision = "ieee" if INTERPRETED or a.dtype != torch.float32 else "tf32x3"
        constants = (
            *(N, K, O, b.shape[1]),
            *(token is not None, transposed, activation, inner is not None, precision),
            *(tiles.rows, tiles.columns, tiles.inner, tiles.group, listed(N), tiles.flatten),
        )
        tile_count = (ceil_div(A, tiles.rows) + N) * ceil_div(O, tiles.columns)
        launch(grouped_gemm_kernel, (min(programs, tile_count),), args, constants, tiles.warps, tiles.stages)

    def specialised() -> None:
        from grmoe.kernels import hopper, hopper_gemm

        columns = hopper.COLUMNS // (2 if activation == 1 else 1)
        shape = (columns, hopper.INNER) if transposed else (hopper.INNER, columns)
        # Tokens are copied by their addresses, and describing them to the copy engine takes the host time.
        rows = a if token is not None else hopper.swizzled(a, hopper.ROWS, hopper.INNER)
        args = (a, rows, hopper.swizzled(flat, *shape), *pointers)
        constants = (
            *(N, K, O, b.shape[1], token is not None, transposed, activation, inner is not None),
            *(hopper.ROWS, columns, hopper.INNER, tiles.group, listed(N), hopper.STAGES, hopper.lead(K)),
        )
        tile_count = (ceil_div(A, hopper.ROWS) + N) * ceil_div(O, columns)
        launch(hopper_gemm.grouped_kernel, (min(programs, tile_count),), args, constants)

    first = token is not None and transposed and activation != 0
    # The next expert's rows follow B's last ones, and only Triton's kernel keeps their NaN out.
    other = ALL_SPECIALISED and token is None and activation == 0 and (transposed or K % WHOLE == 0)
    if (first or other) and not tiles.thin and a.dtype != torch.float32 and specialises(a.device):
        attempt("first GEMM for Hopper" if first else "second GEMM for Hopper", specialised, plain)
    else:
        plain()
    return out


@triton.jit
def weight_gradient_kernel(
    p_desc, q_desc, out_ptr, offset_ptr,
    num_experts: tl.constexpr, M: tl.constexpr, O: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BO: tl.constexpr, BA: tl.constexpr,
):  # fmt: skip
    """out[e] = Σ over the rows of expert e of p_aᵀ·q_a, (M, O). One tile per program; an idle expert gets zeros."""
    await_inputs()
    row_tiles: tl.constexpr = (M + BM - 1) // BM
    column_tiles: tl.constexpr = (O + BO - 1) // BO
    tile = tl.program_id(0)
    expert = tile // (row_tiles * column_tiles)
    m = (tile % row_tiles) * BM
    o = (tile // row_tiles % column_tiles) * BO
    end = tl.load(offset_ptr + expert)
    start = tl.load(offset_ptr + expert - 1, mask=expert > 0, other=0)
    whole = start + (end - start) // BA * BA
    acc = tl.zeros((BM, BO), tl.float32)
    for row in range(start, whole, BA):
        acc = tl.dot(p_desc.load([row, m]).T, q_desc.load([row, o]), acc, input_precision=PRECISION)
    if whole < end:
        # Later rows belong to the next expert, or are unused and may be NaN.
        mine = (whole + tl.arange(0, BA) < end)[:, None]
        p = tl.where(mine, p_desc.load([whole, m]), 0.0)
        q = tl.where(mine, q_desc.load([whole, o]), 0.0)
        acc = tl.dot(p.T, q, acc, input_precision=PRECISION)
    here_m, here_o = m + tl.arange(0, BM), o + tl.arange(0, BO)
    place = out_ptr + expert.to(tl.int64) * M * O + here_m[:, None].to(tl.int64) * O + here_o[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(here_m < M)[:, None] & (here_o < O)[None, :])


def weight_gradient(p: Tensor, q: Tensor, offset: Tensor, tiles: Tiles) -> Tensor:
    """pᵀq over each expert's rows, (N, M, O)."""
    N, M, O = len(offset), p.shape[1], q.shape[1]
    out = torch.empty(N, M, O, dtype=p.dtype, device=p.device)
    args = (tiled(p, tiles.inner, tiles.rows), tiled(q, tiles.inner, tiles.columns), out, offset)
    precision = "ieee" if INTERPRETED or p.dtype != torch.float32 else "tf32x3"
    grid = (N * ceil_div(M, tiles.rows) * ceil_div(O, tiles.columns),)
    constants = (N, M, O, precision, tiles.rows, tiles.columns, tiles.inner)
    launch(weight_gradient_kernel, grid, args, constants, tiles.warps, tiles.stages)
    return out
