"""The fused gate as one differentiable operator: tokens in; logits, probabilities, weights and selection out.

    ℓ_e = α(c·Σ_j λ_ej (u_ejᵀx)²/‖x‖² + prior_e)   (square),      ℓ_e = α(w_eᵀx + prior_e)   (linear)

Products use x's own precision and add in fp32 (fp32 tokens: three tf32 products, as exact as fp32). Everything after
the products is fp32. The dial, the prior and the budget are read on the device: changing them recompiles nothing.

Legend: T tokens, D model width, N experts, K rank, C packed columns (see `gate_kernels`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grmoe.kernels import gate_backward_kernels as backward
from grmoe.kernels import gate_kernels as kernels
from grmoe.kernels import thin_gate
from grmoe.kernels.gate_reference import backward_plain
from grmoe.kernels.gate_tiles import WIDE, plan
from grmoe.kernels.launch import ceil_div, dense, launch, tiled
from grmoe.kernels.runtime import (
    DENSE,
    FIXED,
    PER_TOKEN,
    attempt,
    is_hopper,
    specialises,
)

# Experts (padded) of the warp-specialised gate. Its layout of sums needs eight. With more than 64, choosing takes more
# registers than there are. That is behind the loops, where it may not matter: it is not measured.
FEWEST, MOST = 8, 64

# From that many columns on the forward keeps x·U for the backward, in the tokens' precision: T·C numbers more memory,
# and one GEMM of the gate's four less. Of fewer columns, to write and read it takes longer than to compute it again.
KEPT_COLUMNS = 1024


def _rank(matrix: Tensor) -> int:
    return matrix.shape[2] if matrix.ndim == 3 else 1


def pack(matrix: Tensor, dtype: torch.dtype, square: bool) -> Tensor:
    """Frames (N, D, K), or linear weights (N, D) as K = 1, in packed order and the tokens' precision, (C, D)."""
    (N, D), K = matrix.shape[:2], _rank(matrix)
    p = plan(dtype, N, K, square, is_hopper(matrix.device))
    packed = torch.empty(p.columns, D, dtype=dtype, device=matrix.device)
    BD, BK = (64, 64) if square else (1024, 1)
    grid = (p.experts, ceil_div(D, BD), ceil_div(p.columns // p.experts, BK))
    launch(kernels.pack_kernel, grid, (dense(matrix), packed), (N, D, K, p.columns, p.experts, BD, BK))
    return packed


def _forward(
    x: Tensor,
    matrix: Tensor,
    log_kappa: Tensor | None,
    prior: Tensor,
    alpha: Tensor,
    weight_alpha: Tensor | None,
    tau: Tensor,
    cap: Tensor,
    bias: Tensor | None,
    key: Tensor | None,
    first_row: Tensor | None,
    energy_scale: float,
    posterior: bool,
    mode: int,
    max_experts: int,
    renormalize: bool,
    length: int,
    layer: int,
    elastic: int,
    unit: int,
    thin: bool,
    save: bool,
    packed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(logits, probs, weights, selected, 0, ‖x‖², packed, projection); without log_kappa the gate is linear.

    thin: few tokens may take the kernels of `thin_gate`, which round differently.
    save: a backward follows. Only then is `packed` returned, and the projection if it is kept. Otherwise they are
        empty.
    """
    square = log_kappa is not None
    (T, D), N, K = x.shape, len(matrix), _rank(matrix)
    p = plan(x.dtype, N, K, square, is_hopper(x.device))
    logits, probs, weights, selected, zero, norm = outputs = _outputs(x, N, square)
    thin = thin and not save and T <= thin_gate.MOST_TOKENS
    if packed is None and not thin:
        packed = pack(matrix, x.dtype, square)
    keep = _keeps(square, save, p.columns)
    projection = x.new_empty(T if keep else 0, p.columns)
    kept = x.new_empty(0, D) if packed is None or not save else packed, projection
    if T == 0:
        zero.zero_()
        return *outputs, *kept
    x, t = dense(x), p.forward
    pointers = (
        *(prior if log_kappa is None else log_kappa.contiguous(), prior.contiguous()),
        *(alpha, alpha if weight_alpha is None else weight_alpha, tau, cap),
        *(cap if given is None else given for given in (bias, key, first_row)),
        *(logits, probs, weights, selected.view(torch.uint8), norm, zero),
        *(T, energy_scale, length, layer),
    )
    diagonal = log_kappa is not None and log_kappa.ndim == 2
    shape = (D, K, p.columns, N)
    choice = (
        *(diagonal, posterior, mode, max_experts, renormalize),
        *(alpha.ndim > 0, weight_alpha is not None, bias is not None, elastic, unit),
    )

    if thin:
        sums = thin_gate.sum_parts(x, matrix.contiguous(), log_kappa, norm)
        thin_gate.choose(sums, pointers, square, choice)
        return *outputs, *kept
    assert packed is not None

    def plain() -> None:
        tiles = tiled(x, t.tokens, t.width)
        args = (tiles, tiles, tiled(packed, t.columns, t.width), projection if keep else packed, *pointers)
        sizes = (keep, p.precision, p.experts, t.tokens, t.columns, t.width, t.at_once)
        constants = (*shape, square, *choice, *sizes)
        launch(kernels.gate_kernel, (ceil_div(T, t.tokens),), args, constants, t.warps, t.stages)

    def specialised() -> None:
        from grmoe.kernels import hopper, hopper_gate

        tiles = hopper.swizzled(x, t.tokens, t.width), hopper.swizzled(packed, t.columns, t.width)
        args = (*tiles, projection if keep else packed, *pointers)
        sizes = (t.tokens, t.columns, t.width, t.stages, hopper.lead(D))
        constants = (*shape, *choice, keep, p.experts, *sizes)
        launch(hopper_gate.gate_kernel, (ceil_div(T, t.tokens),), args, constants)

    if square and t == WIDE and FEWEST <= p.experts <= MOST and specialises(x.device):
        attempt("gate for Hopper", specialised, plain)
    else:
        plain()
    return *outputs, *kept


def _keeps(square: bool, save: bool, columns: int) -> bool:
    return square and save and columns >= KEPT_COLUMNS


def _outputs(x: Tensor, N: int, square: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    T = len(x)
    selected = torch.empty(T, N, dtype=torch.bool, device=x.device)
    # A linear gate needs no lengths.
    return wide(T, N), wide(T, N), wide(T, N), selected, wide(), wide(T if square else 1)


def _backward(
    grad_logits: Tensor | None,
    grad_probs: Tensor | None,
    grad_weights: Tensor | None,
    grad_norm: Tensor | None,
    x: Tensor,
    matrix: Tensor,
    log_kappa: Tensor | None,
    alpha: Tensor,
    probs: Tensor,
    weights: Tensor | None,
    selected: Tensor,
    norm: Tensor,
    packed: Tensor,
    projection: Tensor,
    energy_scale: float,
    posterior: bool,
    renormalize: bool,
    scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(∂x, ∂matrix, ∂log_kappa, ∂prior); ∂log_kappa is empty for a linear gate.

    weights: read if `renormalize`.
    projection: x·U if the forward kept it, else empty.
    scores: the forward's mode was SCORES. Then probs and selected hold nothing, and ∂prior means nothing.
    """
    (T, D), N, K = x.shape, len(matrix), _rank(matrix)
    if T == 0:
        kappa = alpha.new_zeros(0 if log_kappa is None else log_kappa.shape)
        return x.new_zeros(x.shape), matrix.new_zeros(matrix.shape), kappa, probs.new_zeros(N)
    x = dense(x)
    if log_kappa is None and scores:
        assert grad_logits is not None
        grad = grad_logits.to(x.dtype)
        return grad @ packed[:N], _wide_mm(grad.T, x), alpha.new_zeros(0), probs.new_zeros(N)
    given = [g.contiguous() if g is not None else None for g in (grad_logits, grad_probs, grad_weights)]
    marks = selected.view(torch.uint8)
    gates = (probs, probs if weights is None else weights, marks, *(probs if g is None else g for g in given))
    flags = tuple(g is not None for g in given)
    p = plan(x.dtype, N, K, log_kappa is not None, is_hopper(x.device))
    if log_kappa is None:
        grad = torch.empty(T, N, dtype=x.dtype, device=x.device)
        tile = max(2, 2048 // p.experts)  # it holds several such tiles, which must stay in registers
        constants: tuple[Any, ...] = (N, renormalize, *flags, tile, p.experts)
        launch(backward.linear_backward_kernel, (ceil_div(T, tile),), (*gates, alpha, grad, T), constants)
        total = grad.sum(0, dtype=torch.float32)  # with α, because it multiplies the prior too
        grad_prior = total if posterior else total / alpha
        return grad @ packed[:N], _wide_mm(grad.T, x), alpha.new_zeros(0), grad_prior
    kept = len(projection) > 0
    log_kappa, C, t = log_kappa.contiguous(), p.columns, p.rescale if kept else p.backward
    programs = ceil_div(T, t.tokens)
    scaled = torch.empty(T, C, dtype=x.dtype, device=x.device)
    along = torch.empty(T, dtype=torch.float32, device=x.device)
    column_sums = torch.empty(programs, C, dtype=torch.float32, device=x.device)
    prior_sums = torch.empty(programs, N, dtype=torch.float32, device=x.device)
    halves = t.columns >= max(WIDE.columns, 2 * p.experts)  # of whole rounds of experts
    args = (
        tiled(x, t.tokens, t.width),
        tiled(packed, t.columns, t.width),
        projection if kept else packed,
        tiled(scaled, t.tokens, t.columns // (1 + halves)),
        *(log_kappa, alpha, norm, *gates, norm if grad_norm is None else grad_norm.contiguous()),
        *(along, column_sums, prior_sums, T, energy_scale),
    )
    diagonal = log_kappa.ndim == 2
    constants = (
        *(D, K, C, N, diagonal, posterior, renormalize, *flags, grad_norm is not None, scores),
        *(p.precision, p.experts, t.tokens, t.columns, t.width, halves, kept),
    )
    launch(backward.gate_backward_kernel, (programs,), args, constants, t.warps, t.stages)
    grad_x, t = torch.empty_like(x), p.input_gradient
    args = (
        tiled(scaled, t.tokens, t.columns),
        tiled(packed, t.columns, t.width),
        tiled(x, t.tokens, t.width),
        tiled(grad_x, t.tokens, t.width),
        *(along, T),
    )
    grid: tuple[int, ...] = (ceil_div(D, t.width), ceil_div(T, t.tokens))
    constants = (C, p.precision, t.tokens, t.width, t.columns)
    launch(backward.gate_input_gradient_kernel, grid, args, constants, t.warps, t.stages)
    grad_packed, grad_frames = _wide_mm(scaled.T, x), matrix.new_empty(matrix.shape)
    grid = (N, ceil_div(D, 32), ceil_div(K, 64))
    launch(kernels.unpack_kernel, grid, (grad_packed, grad_frames), (D, K, p.experts, 32, 64))
    grad_log_kappa, grad_prior = torch.empty_like(log_kappa), probs.new_empty(N)
    args = (column_sums, prior_sums, log_kappa, grad_log_kappa, grad_prior, programs)
    launch(backward.parameter_gradients_kernel, (N,), args, (K, C, N, diagonal, p.experts, 64, 64))
    return grad_x, grad_frames, grad_log_kappa, grad_prior


def _wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """a·b with an fp32 result."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


# Two opaque operators for the compiler. Eager mode calls the functions directly, which costs the host less.
_forward_op = torch.library.custom_op("grmoe::gate", _forward, mutates_args=())
_backward_op = torch.library.custom_op("grmoe::gate_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(x: Tensor, matrix: Tensor, log_kappa: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    N, square = len(matrix), log_kappa is not None
    save, columns = rest[-1], plan(x.dtype, N, _rank(matrix), square, is_hopper(x.device)).columns
    tokens = x.shape[0] if _keeps(square, save, columns) else 0
    return (
        *_outputs(x, N, square),
        x.new_empty(columns if save else 0, x.shape[1]),
        x.new_empty(tokens, columns),
    )


@_backward_op.register_fake
def _(
    _a: Any, _b: Any, _c: Any, _d: Any, x: Tensor, matrix: Tensor, log_kappa: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    kappa = x.new_empty(0 if log_kappa is None else log_kappa.shape, dtype=torch.float32)
    return x.new_empty(x.shape), matrix.new_empty(matrix.shape), kappa, matrix.new_empty(len(matrix))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, log_kappa: Tensor | None, prior: Tensor,
                packed: Tensor | None, *numbers: Any) -> tuple[Tensor, ...]:  # fmt: skip
        # numbers: alpha, weight_alpha, tau, cap, bias, key, first_row, energy_scale, posterior, mode, max_experts,
        # renormalize, length, layer, elastic, unit, thin, save
        # An operator must not return its input, so it packs again, which takes a few microseconds.
        run: Any = _forward_op if torch.compiler.is_compiling() else partial(_forward, packed=packed)
        results = run(x, matrix, log_kappa, prior, *numbers)
        logits, probs, weights, selected, zero, norm, packed, projection = results
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(selected, zero)
        # The choice has no gradient, so only the α of the weights matters.
        alpha = numbers[0] if numbers[1] is None else numbers[1]
        ctx.options = (numbers[7], numbers[8], numbers[11])
        kept = weights if numbers[11] else None
        saved = x, matrix, log_kappa, alpha, probs, kept, selected, norm, packed, projection
        ctx.save_for_backward(*saved, prior)
        return logits, probs, weights, selected, zero

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Any, grad_probs: Any, grad_weights: Any, *_: Any) -> tuple[Any, ...]:
        nothing = (None,) * 23
        if grad_logits is None and grad_probs is None and grad_weights is None:
            return nothing
        run: Any = _backward_op if torch.compiler.is_compiling() else _backward
        # Read once: checkpointing recomputes at the first access and allows no second.
        *saved, prior = ctx.saved_tensors
        x, matrix, log_kappa, alpha, _, _, selected, *_ = saved
        given = (grad_logits, grad_probs, grad_weights)
        grads = attempt(
            "gate backward",
            lambda: run(*given, None, *saved, *ctx.options, False),
            lambda: backward_plain(given, x, matrix, log_kappa, prior, alpha, selected, ctx.options),
        )
        return (grads[0], grads[1], None if log_kappa is None else grads[2], grads[3], *nothing[4:])


def gate(
    x_TD: Tensor,
    matrix: Tensor,
    log_kappa: Tensor | None,
    prior_N: Tensor,
    alpha: Tensor,
    *,
    weight_alpha: Tensor | None = None,
    tau: Tensor,
    cap: Tensor,
    bias: Tensor | None = None,
    key: Tensor | None = None,
    first_row: Tensor | None = None,
    energy_scale: float = 1.0,
    posterior: bool = True,
    mode: int = DENSE,
    max_experts: int,
    renormalize: bool,
    length: int = 1,
    layer: int = 0,
    elastic: int = FIXED,
    unit: int = PER_TOKEN,
    thin: bool = False,
    packed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(logits, probs, weights, selected), each (T, N), and a 0-d zero that auxiliary losses are added to.

    Differentiable in x, matrix, log_kappa and the prior.

    matrix: frames (N, D, K) with log_kappa (N,) or (N, K), or linear weights (N, D) with None.
    alpha: the dial. weight_alpha: another α for logits, probs and weights; then `alpha` decides the choice alone.
    mode: DENSE takes all experts. LARGEST takes the most probable ones, at most `cap` (int32), while the mass before is
        below `tau`. ABOVE takes those with probability at least `tau`, and the largest.
    max_experts: the largest possible cap.
    bias: (N,), added to the logits for the choice alone: experts are ranked by softmax(ℓ + bias).
    alpha, weight_alpha, tau, cap: all 0-d. Or one number per sequence, (T / length,); bias (T / length, N). No gradient
    key, first_row, layer, elastic, unit: how budgets are drawn, as in `grmoe.routing.elastic`.
    thin: few tokens may take other kernels where no gradient is needed (`grmoe.kernels.thin_gate`). Not in training:
        activation checkpointing runs the forward with and without gradients, and both must give the same bits.
    packed: `pack(matrix, x.dtype, square)`, if the caller knows that the matrix has not changed since.
    """
    if log_kappa is None and not posterior:
        raise ValueError("posterior must be True for a linear gate: its dial multiplies all of its logits")
    numbers = (alpha, weight_alpha, tau, cap, bias, key, first_row, energy_scale, posterior, mode)
    learned = (x_TD, matrix, log_kappa, prior_N)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learned)
    more = (max_experts, renormalize, length, layer, elastic, unit, thin, save)
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _Gate.apply(
        x_TD, matrix, log_kappa, prior_N, packed, *numbers, *more
    )
    return results
