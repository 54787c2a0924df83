"""The gate from its scores on: prior, dial, softmax and selection as one differentiable operator.

For gates that one kernel cannot compute whole, such as an amortised one. Their products come from
`grmoe.kernels.scores`, and the rest is this.

Legend: T tokens, N experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grmoe.kernels import gate_backward_kernels as backward
from grmoe.kernels import thin_gate
from grmoe.kernels.combine import combine_weights
from grmoe.kernels.launch import ceil_div, launch, power_of_2
from grmoe.kernels.runtime import DENSE, FIXED, PER_TOKEN, attempt


def _forward(
    scores: Tensor,
    prior: Tensor,
    alpha: Tensor,
    weight_alpha: Tensor | None,
    tau: Tensor,
    cap: Tensor,
    bias: Tensor | None,
    key: Tensor | None,
    first_row: Tensor | None,
    posterior: bool,
    mode: int,
    max_experts: int,
    renormalize: bool,
    length: int,
    layer: int,
    elastic: int,
    unit: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(logits, probs, weights, selected, 0)."""
    logits, probs, weights, selected, zero = outputs = _outputs(scores)
    T = len(scores)
    if T == 0:
        zero.zero_()
        return outputs
    prior = prior.contiguous()
    pointers = (
        *(prior, prior, alpha, alpha if weight_alpha is None else weight_alpha, tau, cap),
        *(cap if given is None else given for given in (bias, key, first_row)),
        *(logits, probs, weights, selected.view(torch.uint8), zero, zero),
        *(T, 1.0, length, layer),
    )
    choice = (
        *(False, posterior, mode, max_experts, renormalize),
        *(alpha.ndim > 0, weight_alpha is not None, bias is not None, elastic, unit),
    )
    thin_gate.choose(scores.contiguous().unsqueeze(0), pointers, False, choice)
    return outputs


def _outputs(scores: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    logits, probs, weights = (torch.empty_like(scores, memory_format=torch.contiguous_format) for _ in "123")
    return logits, probs, weights, torch.empty_like(logits, dtype=torch.bool), scores.new_empty(())


def _backward(
    grad_logits: Tensor | None,
    grad_probs: Tensor | None,
    grad_weights: Tensor | None,
    alpha: Tensor,
    probs: Tensor,
    weights: Tensor | None,
    selected: Tensor,
    posterior: bool,
    renormalize: bool,
) -> tuple[Tensor, Tensor]:
    """(∂scores, ∂prior). weights: read if `renormalize`."""
    (T, N), grad = probs.shape, torch.empty_like(probs)
    if T == 0:
        return grad, probs.new_zeros(N)
    given = [g.contiguous() if g is not None else None for g in (grad_logits, grad_probs, grad_weights)]
    marks = selected.view(torch.uint8)
    gates = (probs, probs if weights is None else weights, marks, *(probs if g is None else g for g in given))
    flags, NP = tuple(g is not None for g in given), power_of_2(N)
    tile = max(2, 2048 // NP)
    constants = (N, renormalize, *flags, tile, NP)
    factor = (
        alpha if posterior else torch.ones_like(alpha)
    )  # a prior that α does not multiply has no factor α
    launch(backward.linear_backward_kernel, (ceil_div(T, tile),), (*gates, factor, grad, T), constants)
    total = grad.sum(0)
    return grad if posterior else alpha * grad, total


def choose_reference(
    scores_TN: Tensor, prior_N: Tensor, alpha: Tensor, selected_TN: Tensor, posterior: bool, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification, for a selection already made: (logits, probs, weights)."""
    logits_TN = alpha * (scores_TN + prior_N) if posterior else alpha * scores_TN + prior_N
    probs_TN = torch.softmax(logits_TN, -1)
    return logits_TN, probs_TN, combine_weights(logits_TN, probs_TN, selected_TN, renormalize)


def _backward_plain(
    grads: tuple[Any, ...], scores: Tensor, prior: Tensor, alpha: Tensor, selected: Tensor, options: Any
) -> tuple[Tensor, Tensor]:
    """As `_backward`, in PyTorch, in case the kernel does not compile."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (scores, prior)]
        values = choose_reference(leaves[0], leaves[1], alpha, selected, *options)
        given = [(value, g) for value, g in zip(values, grads, strict=True) if g is not None]
        found = torch.autograd.grad([v for v, _ in given], leaves, [g for _, g in given])
    return found[0], found[1]


# Opaque operators for the compiler. Eager mode calls the functions directly, which costs the host less.
_forward_op = torch.library.custom_op("grmoe::choose", _forward, mutates_args=())
_backward_op = torch.library.custom_op("grmoe::choose_backward", _backward, mutates_args=())
_forward_op.register_fake(_outputs)


@_backward_op.register_fake
def _(_a: Any, _b: Any, _c: Any, alpha: Tensor, probs: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(probs), probs.new_empty(probs.shape[1])


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, prior: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
        # numbers: alpha, weight_alpha, tau, cap, bias, key, first_row, posterior, mode, max_experts, renormalize, …
        run: Any = _forward_op if torch.compiler.is_compiling() else _forward
        logits, probs, weights, selected, zero = run(scores, prior, *numbers)
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(selected, zero)
        # The choice has no gradient, so only the α of the weights matters.
        alpha = numbers[0] if numbers[1] is None else numbers[1]
        kept = weights if numbers[10] else None
        ctx.save_for_backward(scores, prior, alpha, probs, kept, selected)
        ctx.options = (numbers[7], numbers[10])
        return logits, probs, weights, selected, zero

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Any, grad_probs: Any, grad_weights: Any, *_: Any) -> tuple[Any, ...]:
        nothing, given = (None,) * 15, (grad_logits, grad_probs, grad_weights)
        if all(g is None for g in given):
            return None, None, *nothing
        run: Any = _backward_op if torch.compiler.is_compiling() else _backward
        # Read once: checkpointing recomputes at the first access and allows no second.
        scores, prior, *saved = ctx.saved_tensors
        alpha, _, _, selected = saved
        grads = attempt(
            "choice backward",
            lambda: run(*given, *saved, *ctx.options),
            lambda: _backward_plain(given, scores, prior, alpha, selected, ctx.options),
        )
        return *grads, *nothing


def choose(
    scores_TN: Tensor,
    prior_N: Tensor,
    alpha: Tensor,
    *,
    weight_alpha: Tensor | None = None,
    tau: Tensor,
    cap: Tensor,
    bias: Tensor | None = None,
    key: Tensor | None = None,
    first_row: Tensor | None = None,
    posterior: bool = True,
    mode: int = DENSE,
    max_experts: int,
    renormalize: bool,
    length: int = 1,
    layer: int = 0,
    elastic: int = FIXED,
    unit: int = PER_TOKEN,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(logits, probs, weights, selected), each (T, N), and a 0-d zero. Differentiable in scores and prior.

    Arguments as in `grmoe.kernels.gate.gate`.
    """
    numbers = (alpha, weight_alpha, tau, cap, bias, key, first_row, posterior, mode)
    more = (max_experts, renormalize, length, layer, elastic, unit)
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _Choose.apply(
        scores_TN, prior_N, *numbers, *more
    )
    return results
