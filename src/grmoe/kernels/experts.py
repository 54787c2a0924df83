"""The experts as one differentiable operator over the dispatch list: gather, two grouped GEMMs, combine.

The forward keeps only x and the pre-activations. The backward recomputes the activation h and gets the gradient of a
combine weight as ⟨∂y·W_down, h⟩, so neither outputs nor activations are stored. Unless the graph is kept for another
backward, the gradient of the pre-activations overwrites them.

Legend: T tokens, D model width, N experts, A rows of the list, M most experts per token, I expert width.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu, grouped_mm, silu

from grmoe.kernels import rows
from grmoe.kernels.fused_backward import gathered_gradient, hidden_gradient
from grmoe.kernels.grouped_gemm import Tiles, grouped_gemm, weight_gradient
from grmoe.kernels.launch import ceil_div, dense, power_of_2
from grmoe.kernels.runtime import attempt, is_hopper, specialises


class Engines(NamedTuple):
    """Tiles of each kind of GEMM."""

    up: Tiles  # with gather and activation: two accumulators
    plain: Tiles
    grad_weight: Tiles | None  # None: torch's grouped_mm


class Fused(NamedTuple):
    """Parts of the backward that `fused_backward` computes, in place of separate passes around plain GEMMs."""

    hidden: bool  # q with gather, activation and ∂w in one kernel
    down: bool  # ∂W_down with the output's gradient gathered on load
    up: bool  # ∂W_up with the tokens gathered on load


# The backward is fused on Hopper in 16 bits, for tokens at least that wide. With few steps of the GEMM for each tile,
# what is done behind a tile takes longer than a pass of its own. `grmoe bench layer --contender backward` times both.
FUSED_WIDTH = 2048

GRADIENT = Tiles(128, 256, 64, 8, 3)  # of weights, in 16 bits on Hopper


def fused_parts(x: Tensor) -> Fused:
    every = x.shape[1] >= FUSED_WIDTH and x.dtype != torch.float32 and specialises(x.device)
    return Fused(every, every, every)


def engines(dtype: torch.dtype, hopper: bool) -> Engines:
    """Measured on Hopper, see docs/results/performance.md; elsewhere small enough for any multiprocessor."""
    if dtype == torch.float32:  # three tf32 products need the registers
        small = Tiles(64, 64, 32, 4, 3 if hopper else 2)
        return Engines(small, small, small)
    if not hopper:
        small = Tiles(128, 128, 32, 8, 2)
        return Engines(Tiles(128, 64, 32, 8, 2), small, small)
    # torch's grouped_mm has bf16 kernels only; otherwise it loops over experts and the host waits.
    grad_weight = None if dtype == torch.bfloat16 else GRADIENT
    return Engines(Tiles(128, 128, 64, 8, 4), Tiles(128, 256, 64, 8, 3, flatten=True), grad_weight)


# Rows per expert on average up to which tiles are thin, and the most rows of such a tile.
THIN_MEAN, THIN_ROWS = 48, 64


def thin_engines(tiles: Engines, rows: int, num_experts: int, tokens: int) -> Engines:
    """Tiles of few rows, in many programs, where experts have few rows: `rows` in all, at most `tokens` each.

    A tile has room for twice the mean, because its unused rows take room and time. An expert with more rows takes
    several tiles, one after the other, so that its weights are still in the cache.
    """
    if rows > THIN_MEAN * num_experts:
        return tiles
    height = max(16, min(THIN_ROWS, power_of_2(2 * ceil_div(rows, num_experts)), power_of_2(tokens)))
    if tiles.up.inner < 64:  # fp32, or little shared memory
        up, plain = (Tiles(16, 32, 32, 4, t.stages, programs=2) for t in (tiles.up, tiles.plain))
    else:
        # As much on its way as two programs have room for: one token's experts may give few of them work.
        inner, stages = 128 if height < 64 else 64, 6 if height == 16 else 4
        up, plain = (Tiles(height, columns, inner, 4, stages, programs=2) for columns in (32, 64))
    return tiles._replace(up=up, plain=plain)


def _forward(
    x: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    token: Tensor,
    pair: Tensor,
    offset: Tensor,
    slot: Tensor,
    glu: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """(y, pre-activations); the latter are empty unless `save`."""
    x, up, down = dense(x), dense(up), dense(down)
    inner = torch.empty(len(token) if save else 0, up.shape[1], dtype=x.dtype, device=x.device)
    if len(token) == 0:
        return x.new_zeros(x.shape), inner
    tiles = thin_engines(engines(x.dtype, is_hopper(x.device)), len(token), len(up), len(x))
    kind, keep = 1 if glu else 2, inner if save else None
    hidden = grouped_gemm(x, up, offset, tiles.up, token=token, transposed=True, activation=kind, inner=keep)
    out = grouped_gemm(hidden, down, offset, tiles.plain, transposed=True)
    del hidden  # the layer's peak of memory is here
    return rows.combine(out, slot, weight), inner


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    token: Tensor,
    pair: Tensor,
    offset: Tensor,
    slot: Tensor,
    inner: Tensor,
    glu: bool,
    spend: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(∂x, ∂weight, ∂up, ∂down). With `spend`, `inner` is overwritten by its gradient; the operator never does that."""
    if len(token) == 0:
        x_grad, weight_grad, up_grad, down_grad = (t.new_zeros(t.shape) for t in (x, weight, up, down))
        return x_grad, weight_grad, up_grad, down_grad
    x, grad, up, down = dense(x), dense(grad), dense(up), dense(down)
    tiles = engines(x.dtype, is_hopper(x.device))
    fused = fused_parts(x)
    # Fused kernels gather by themselves.
    grad_rows = grad if fused.hidden and fused.down else rows.gather(grad, token, offset)
    if fused.hidden:
        grad_inner, hidden, grad_weight = hidden_gradient(
            grad, down, inner, token, pair, weight, offset, tiles.up, glu=glu, spend=spend
        )
    else:
        hidden = grouped_gemm(grad_rows, down, offset, tiles.plain, transposed=False)
        grad_inner, grad_weight = rows.activation_backward(inner, hidden, pair, weight, offset, glu, spend)
    gradient = tiles.grad_weight or GRADIENT
    if fused.down:
        grad_down = gathered_gradient(grad, hidden, token, offset, gradient, turned=False)
    else:
        grad_down = _weight_gradient(grad_rows, hidden, offset, tiles.grad_weight)
    del grad_rows, hidden

    def input_gradient() -> Tensor:
        return rows.combine(grouped_gemm(grad_inner, up, offset, tiles.plain, transposed=False), slot, None)

    # The order that needs less memory: either of the two holds a copy of all rows until it is done.
    if fused.up:
        grad_x = input_gradient()
        grad_up = gathered_gradient(x, grad_inner, token, offset, gradient, turned=True)
    else:
        grad_up = _weight_gradient(grad_inner, rows.gather(x, token, offset), offset, tiles.grad_weight)
        grad_x = input_gradient()
    return grad_x, grad_weight, grad_up, grad_down


def _weight_gradient(p: Tensor, q: Tensor, offset: Tensor, tiles: Tiles | None) -> Tensor:
    return grouped_mm(p.T, q, offs=offset) if tiles is None else weight_gradient(p, q, offset, tiles)


def _backward_plain(
    grad: Tensor, x: Tensor, weight: Tensor, up: Tensor, down: Tensor, token: Tensor, pair: Tensor, offset: Tensor,
    slot: Tensor, glu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `_backward`, in PyTorch, in case a kernel does not compile. Not deterministic.

    Pre-activations are recomputed, because an earlier kernel may have overwritten them.
    """
    used = (torch.arange(len(token), device=x.device) < offset[-1]).unsqueeze(-1)
    x_rows, grad_rows = x.index_select(0, token), grad.index_select(0, token)
    inner = torch.where(used, grouped_mm(x_rows, up.mT, offs=offset), 0.0)
    q = torch.where(used, grouped_mm(grad_rows, down, offs=offset), 0.0).float()
    w = torch.where(used, weight.flatten().index_select(0, pair).unsqueeze(-1), 0.0).float()
    with torch.enable_grad():
        leaf = inner.detach().float().requires_grad_()
        first, *rest = leaf.chunk(2, dim=-1) if glu else (leaf,)
        hidden = silu(first) * rest[0] if glu else gelu(first)
    (grad_inner,) = torch.autograd.grad(hidden, leaf, w * q)
    hidden, grad_inner = hidden.detach(), grad_inner.to(x.dtype)
    grad_weight = torch.zeros_like(weight).flatten().index_add(0, pair, (q * hidden).sum(-1).to(weight.dtype))
    grad_down = grouped_mm(grad_rows.T, (w * hidden).to(x.dtype), offs=offset)
    grad_up = grouped_mm(grad_inner.T, x_rows, offs=offset)
    per_row = torch.where(used, grouped_mm(grad_inner, up, offs=offset), 0.0)
    grad_x = torch.zeros_like(x, dtype=torch.float32).index_add(0, token, per_row.float())
    return grad_x.to(x.dtype), grad_weight.view_as(weight), grad_up, grad_down


# Opaque operators for the compiler. Eager mode calls the functions directly, which costs the host less.
_forward_op = torch.library.custom_op("grmoe::experts", _forward, mutates_args=())
_backward_op = torch.library.custom_op("grmoe::experts_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(
    x: Tensor, weight: Tensor, up: Tensor, down: Tensor, token: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(len(token) if rest[-1] else 0, up.shape[1])


@_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, up: Tensor, down: Tensor, *_: Any) -> tuple[Tensor, ...]:
    x_grad, weight_grad, up_grad, down_grad = (t.new_empty(t.shape) for t in (x, weight, up, down))
    return x_grad, weight_grad, up_grad, down_grad


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, up: Tensor, down: Tensor, token: Tensor, pair: Tensor,
        offset: Tensor, slot: Tensor, glu: bool, save: bool,
    ) -> Tensor:  # fmt: skip
        run = _forward_op if torch.compiler.is_compiling() else _forward
        y, inner = run(x, weight, up, down, token, pair, offset, slot, glu, save)
        ctx.save_for_backward(x, weight, up, down, token, pair, offset, slot, inner)
        ctx.glu = glu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Read once: checkpointing recomputes at the first access and allows no second.
        *inputs, inner = ctx.saved_tensors
        run: Any = _backward_op
        if not torch.compiler.is_compiling():
            run = partial(_backward, spend=not torch._C._autograd._get_current_graph_task_keep_graph())
        args, plain = (grad, *inputs, inner, ctx.glu), (grad, *inputs, ctx.glu)
        grads = attempt("experts backward", lambda: run(*args), lambda: _backward_plain(*plain))
        return (*grads, *(None,) * 6)


def experts(
    x_TD: Tensor,
    weight_TM: Tensor,
    up: Tensor,
    down: Tensor,
    token_A: Tensor,
    pair_A: Tensor,
    offset_N: Tensor,
    slot_TM: Tensor,
    *,
    glu: bool,
) -> Tensor:
    """Σ over a token's assignments of weight · W_down act(W_up x), (T, D)."""
    save = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, weight_TM, up, down))
    lists = (token_A.contiguous(), pair_A.contiguous(), offset_N.contiguous(), slot_TM.contiguous())
    return _Experts.apply(x_TD, weight_TM.contiguous(), up, down, *lists, glu, save)
