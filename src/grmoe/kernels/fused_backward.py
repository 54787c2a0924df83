"""The experts' backward with gather and activation inside its GEMMs.

With q = ∂y[token]·W_down, one grouped GEMM gives for each row of the list

    ∂inner = w·q·act'(inner),    w·h with h = act(inner) recomputed,    ⟨q, h⟩ over each tile of columns.

A small kernel adds the parts of all tiles up to ∂w, in the order of the columns: no atomics, always the same bits. The
gradients of the weights gather one operand on load:

    ∂W_down = Σ_a ∂y[token_a]ᵀ·(w·h)_a,    ∂W_up = Σ_a ∂inner_aᵀ·x[token_a].

So q stays in fp32, and neither q nor a gathered copy of ∂y or x is ever in memory.

Legend: T tokens, A rows of the list, N experts (padded to a power of two), D model width, I expert width, C tiles of
columns, O columns of an operand that lies in the list's order; B… tile sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from grmoe.kernels.early import await_inputs
from grmoe.kernels.grouped_gemm import Tiles, listed, locate
from grmoe.kernels.launch import ceil_div, launch, tiled
from grmoe.kernels.rows import differentiate
from grmoe.kernels.runtime import INTERPRETED, attempt, num_programs, specialises

Result = TypeVar("Result")


@triton.jit
def hidden_gradient_kernel(
    grad_ptr, down_desc, inner_ptr, token_ptr, pair_ptr, weight_ptr, offset_ptr,
    grad_inner_ptr, hidden_ptr, partial_ptr,
    num_experts: tl.constexpr, D: tl.constexpr, I: tl.constexpr, GLU: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """∂inner, w·h and the tile's part of ⟨q, h⟩. W_down is (N·D, I). ∂inner may overwrite inner."""
    await_inputs()
    experts = tl.arange(0, NP)
    end_N = tl.load(offset_ptr + experts, mask=experts < num_experts, other=0)
    start_N = tl.load(offset_ptr + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    tiles_N = tl.where(experts < num_experts, (end_N - start_N + BM - 1) // BM, 0)
    lists = (experts, end_N, tl.cumsum(tiles_N, axis=0))
    row_tiles = tl.sum(tiles_N, axis=0)
    column_tiles: tl.constexpr = (I + BI - 1) // BI
    width: tl.constexpr = 2 * I if GLU else I
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        expert, first, end, column_tile = locate(tile, lists, row_tiles, column_tiles, GROUP, BM)
        row = first + tl.arange(0, BM)
        mine = row < end
        column = column_tile * BI
        token = tl.load(token_ptr + row, mask=mine, other=0).to(tl.int64)
        grad_rows = grad_ptr + token[:, None] * D
        q = tl.zeros((BM, BI), tl.float32)
        for d in range(0, D, BD):
            here = d + tl.arange(0, BD)
            if D % BD == 0:
                grad = tl.load(grad_rows + here[None, :])
            else:
                grad = tl.load(grad_rows + here[None, :], mask=(here < D)[None, :], other=0.0)
            down = down_desc.load([expert * D + d, column])
            if D % BD != 0:  # the next expert follows, and its NaN must stay out
                down = tl.where((here < D)[:, None], down, 0.0)
            q = tl.dot(grad, down, q, input_precision=PRECISION)
        pair = tl.load(pair_ptr + row, mask=mine, other=0)
        weight = tl.load(weight_ptr + pair, mask=mine, other=0.0).to(tl.float32)[:, None]
        here = column + tl.arange(0, BI)
        inside = mine[:, None] & (here < I)[None, :]
        place = row[:, None].to(tl.int64) * width + here[None, :]
        a = tl.load(inner_ptr + place, mask=inside, other=0.0).to(tl.float32)
        up = a
        if GLU:
            up = tl.load(inner_ptr + place + I, mask=inside, other=0.0).to(tl.float32)
        tl.debug_barrier()  # everything is read before anything is overwritten, whichever thread writes it
        h, slope, slope_up = differentiate(a, up, GLU)
        if GLU:
            tl.store(
                grad_inner_ptr + place + I,
                (weight * q * slope_up).to(inner_ptr.dtype.element_ty),
                mask=inside,
            )
        tl.store(grad_inner_ptr + place, (weight * q * slope).to(inner_ptr.dtype.element_ty), mask=inside)
        place = row[:, None].to(tl.int64) * I + here[None, :]
        tl.store(hidden_ptr + place, (weight * h).to(hidden_ptr.dtype.element_ty), mask=inside)
        place = partial_ptr + row.to(tl.int64) * column_tiles + column_tile
        tl.store(place, tl.sum(q * h, axis=1), mask=mine)


@triton.jit(do_not_specialize=["last"])
def add_parts_kernel(
    partial_ptr, pair_ptr, offset_ptr, grad_weight_ptr, last, PARTS: tl.constexpr, BR: tl.constexpr
):
    """∂w of each used row: the sum of its parts, first to last."""
    await_inputs()
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    used = row < tl.load(offset_ptr + last)
    total = tl.zeros((BR,), tl.float32)
    for part in range(PARTS):
        total += tl.load(partial_ptr + row.to(tl.int64) * PARTS + part, mask=used, other=0.0)
    pair = tl.load(pair_ptr + row, mask=used, other=0)
    tl.store(grad_weight_ptr + pair, total.to(grad_weight_ptr.dtype.element_ty), mask=used)


def hidden_gradient(
    grad: Tensor,
    down: Tensor,
    inner: Tensor,
    token: Tensor,
    pair: Tensor,
    weight: Tensor,
    offset: Tensor,
    tiles: Tiles,
    *,
    glu: bool,
    spend: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(∂inner, w·h (A, I), ∂weight_TM) from ∂y (T, D) and W_down (N, D, I). With `spend`, ∂inner overwrites `inner`."""
    (N, D, I), A = down.shape, len(token)
    grad_inner, grad_weight = inner if spend else torch.empty_like(inner), torch.zeros_like(weight)
    hidden = torch.empty(A, I, dtype=grad.dtype, device=grad.device)
    flat = down.view(-1, I)
    lists = (inner, token, pair, weight, offset, grad_inner, hidden)

    def parts(columns: int) -> Tensor:
        return torch.empty(A, ceil_div(I, columns), dtype=torch.float32, device=grad.device)

    def programs(rows: int, columns: int) -> tuple[int]:
        return (min(num_programs(grad.device), (ceil_div(A, rows) + N) * ceil_div(I, columns)),)

    def plain() -> Tensor:
        BM, BI, BD = tiles.rows, tiles.columns, tiles.inner
        partial = parts(BI)
        precision = "ieee" if INTERPRETED or grad.dtype != torch.float32 else "tf32x3"
        constants = (N, D, I, glu, precision, BM, BI, BD, tiles.group, listed(N))
        args = (grad, tiled(flat, BD, BI), *lists, partial)
        launch(hidden_gradient_kernel, programs(BM, BI), args, constants, tiles.warps, tiles.stages)
        return partial

    def specialised() -> Tensor:
        from grmoe.kernels import hopper, hopper_hidden

        BM, BI, BD = hopper.ROWS, hopper.COLUMNS, hopper.INNER
        partial = parts(BI)
        constants = (N, D, I, glu, BM, BI, BD, tiles.group, listed(N), hopper.STAGES, hopper.lead(D))
        args = (grad, flat, hopper.swizzled(flat, BD, BI), *lists, partial)
        launch(hopper_hidden.hidden_gradient_kernel, programs(BM, BI), args, constants)
        return partial

    partial = _choose("hidden gradient for Hopper", grad, specialised, plain)
    grid = (ceil_div(A, 256),)
    launch(
        add_parts_kernel, grid, (partial, pair, offset, grad_weight, len(offset) - 1), (partial.shape[1], 256)
    )
    return grad_inner, hidden, grad_weight


@triton.jit
def gathered_gradient_kernel(
    x_ptr, rows_desc, out_ptr, token_ptr, offset_ptr,
    D: tl.constexpr, O: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr,
    BD: tl.constexpr, BO: tl.constexpr, BA: tl.constexpr,
):  # fmt: skip
    """out[e] = Σ over the rows of expert e of x[token_a]ᵀ·rows_a, (D, O), or TURNED its transpose.

    One tile per program; an idle expert gets zeros.
    """
    await_inputs()
    d_tiles: tl.constexpr = (D + BD - 1) // BD
    o_tiles: tl.constexpr = (O + BO - 1) // BO
    tile = tl.program_id(0)
    expert = tile // (d_tiles * o_tiles)
    d = tile % d_tiles * BD
    o = tile // d_tiles % o_tiles * BO
    end = tl.load(offset_ptr + expert)
    start = tl.load(offset_ptr + expert - 1, mask=expert > 0, other=0)
    whole = start + (end - start) // BA * BA
    here_d, here_o, here_a = d + tl.arange(0, BD), o + tl.arange(0, BO), tl.arange(0, BA)
    inside = (here_d < D)[None, :]
    acc = tl.zeros((BO, BD) if TURNED else (BD, BO), tl.float32)
    for row in range(start, whole, BA):
        token = tl.load(token_ptr + row + here_a).to(tl.int64)
        x = tl.load(x_ptr + token[:, None] * D + here_d[None, :], mask=inside, other=0.0)
        if TURNED:
            acc = tl.dot(rows_desc.load([row, o]).T, x, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x.T, rows_desc.load([row, o]), acc, input_precision=PRECISION)
    if whole < end:
        # Later rows belong to the next expert, or are unused and may be NaN.
        mine = whole + here_a < end
        token = tl.load(token_ptr + whole + here_a, mask=mine, other=0).to(tl.int64)
        x = tl.load(x_ptr + token[:, None] * D + here_d[None, :], mask=mine[:, None] & inside, other=0.0)
        rows = tl.where(mine[:, None], rows_desc.load([whole, o]), 0.0)
        if TURNED:
            acc = tl.dot(rows.T, x, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x.T, rows, acc, input_precision=PRECISION)
    out = out_ptr + expert.to(tl.int64) * D * O
    if TURNED:
        place = here_o[:, None].to(tl.int64) * D + here_d[None, :]
        inside = (here_o < O)[:, None] & (here_d < D)[None, :]
    else:
        place = here_d[:, None].to(tl.int64) * O + here_o[None, :]
        inside = (here_d < D)[:, None] & (here_o < O)[None, :]
    tl.store(out + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


def gathered_gradient(
    x: Tensor, rows: Tensor, token: Tensor, offset: Tensor, tiles: Tiles, *, turned: bool
) -> Tensor:
    """x[token]ᵀ·rows over each expert's rows, (N, D, O), or `turned` its transpose; x (T, D), rows (A, O)."""
    N, D, O = len(offset), x.shape[1], rows.shape[1]
    out = torch.empty(N, *((O, D) if turned else (D, O)), dtype=x.dtype, device=x.device)

    def plain() -> None:
        BD, BO, BA = tiles.rows, tiles.columns, tiles.inner
        precision = "ieee" if INTERPRETED or x.dtype != torch.float32 else "tf32x3"
        args = (x, tiled(rows, BA, BO), out, token, offset)
        grid = (N * ceil_div(D, BD) * ceil_div(O, BO),)
        constants = (D, O, turned, precision, BD, BO, BA)
        launch(gathered_gradient_kernel, grid, args, constants, tiles.warps, tiles.stages)

    def specialised() -> None:
        from grmoe.kernels import hopper, hopper_weights

        BD, BO, BA = hopper.ROWS, hopper.COLUMNS, hopper.INNER
        num_tiles = N * ceil_div(D, BD) * ceil_div(O, BO)
        args = (x, rows, hopper.swizzled(rows, BA, BO), out, token, offset)
        constants = (num_tiles, D, O, turned, BD, BO, BA, hopper.STAGES, hopper.LEAD)
        grid = (min(num_programs(x.device), num_tiles),)
        launch(hopper_weights.gathered_gradient_kernel, grid, args, constants)

    _choose("weight gradient for Hopper", x, specialised, plain)
    return out


def _choose(name: str, x: Tensor, specialised: Callable[[], Result], plain: Callable[[], Result]) -> Result:
    """The warp-specialised kernel where it runs."""
    if x.dtype != torch.float32 and specialises(x.device):
        return attempt(name, specialised, plain)
    return plain()
