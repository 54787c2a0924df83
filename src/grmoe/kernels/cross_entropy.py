"""Output matrix and cross-entropy together: logits exist in 16 bits, for a part of the tokens at a time.

The kernel reads a token's logits twice, for log Σ exp and for the gradient, and overwrites them with the gradient. Both
products with the gradient follow immediately, so nothing of the size of the logits is kept for the backward.
Vocabularies are padded to a multiple of 64, because GEMMs need rows of whole 16 bytes and 50257 is odd.

Legend: T tokens, D model width, V vocabulary, P the same padded, B columns of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from grmoe.kernels.early import await_inputs
from grmoe.kernels.launch import ceil_div, dense, launch

PADDING = 64
TILE = 4096


@triton.jit(do_not_specialize=["vocabulary", "blocks"])
def loss_kernel(
    logits_ptr, target_ptr, scale_ptr, loss_ptr, vocabulary, blocks,
    IGNORED: tl.constexpr, GRADIENT: tl.constexpr, PADDING: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """For one token: −log softmax(logits)[target] · scale; the gradient overwrites the logits."""
    await_inputs()
    row = tl.program_id(0)
    # A product, and loads masked here rather than at the vocabulary, so that the compiler knows they are aligned.
    padded = blocks * PADDING
    logits_ptr += row.to(tl.int64) * padded
    target = tl.load(target_ptr + row)
    scale = tl.load(scale_ptr)
    column_B = tl.arange(0, B)
    most = float("-inf")
    total = 0.0
    for start in range(0, padded, B):
        inside = start + column_B < padded
        value_B = tl.load(logits_ptr + start + column_B, mask=inside, other=0.0).to(tl.float32)
        value_B = tl.where(start + column_B < vocabulary, value_B, float("-inf"))
        higher = tl.maximum(most, tl.max(value_B, axis=0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(value_B - higher), axis=0)
        most = higher
    log_total = most + tl.log(total)
    counts = target != IGNORED
    chosen = tl.load(logits_ptr + tl.where(counts, target, 0)).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(counts, (log_total - chosen) * scale, 0.0))
    if GRADIENT:
        scale = tl.where(counts, scale, 0.0)
        # Another thread's store may overwrite what this thread reads above.
        tl.debug_barrier()
        for start in range(0, padded, B):
            inside = start + column_B < padded
            value_B = tl.load(logits_ptr + start + column_B, mask=inside, other=0.0).to(tl.float32)
            probability_B = tl.exp(value_B - log_total)
            hit_B = (start + column_B == target).to(tl.float32)
            grad_B = tl.where(start + column_B < vocabulary, (probability_B - hit_B) * scale, 0.0)
            tl.store(logits_ptr + start + column_B, grad_B.to(logits_ptr.dtype.element_ty), mask=inside)


def _forward(
    x: Tensor, weight: Tensor, target: Tensor, scale: Tensor, ignored: int, at_once: int, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(Σ loss·scale, and its gradients by x and by weight, empty unless requested)."""
    loss_T, grad_x, grad_weight = _losses(x, weight, target, scale, ignored, at_once, gradient)
    return loss_T.sum(), grad_x, grad_weight


def _losses(
    x: Tensor, weight: Tensor, target: Tensor, scale: Tensor, ignored: int, at_once: int, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss·scale of each token, and the gradients of their sum, as `_forward` gives them)."""
    (T, D), V = x.shape, len(weight)
    P = ceil_div(V, PADDING) * PADDING
    x, target = dense(x), target.contiguous()
    weight_PD = F.pad(weight.to(x.dtype), (0, 0, 0, P - V))
    loss_T = torch.empty(T, dtype=torch.float32, device=x.device)
    grad_x = x.new_empty(x.shape if gradient else (0, D))
    grad_weight = torch.zeros(P if gradient else 0, D, dtype=torch.float32, device=x.device)
    for start in range(0, T, at_once):
        part = slice(start, min(T, start + at_once))
        logits_TP = x[part] @ weight_PD.T
        args = (logits_TP, target[part], scale, loss_T[part], V, P // PADDING)
        launch(loss_kernel, (len(logits_TP),), args, (ignored, gradient, PADDING, TILE), warps=8)
        if gradient:
            torch.mm(logits_TP, weight_PD, out=grad_x[part])
            grad_weight += _product(logits_TP.T, x[part])
        del logits_TP
    return loss_T, grad_x, grad_weight[:V].to(weight.dtype) if gradient else grad_weight


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a·b in fp32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


# An opaque operator for the compiler.
_forward_op = torch.library.custom_op("grmoe::linear_cross_entropy", _forward, mutates_args=())


@_forward_op.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    loss = torch.empty((), dtype=torch.float32, device=x.device)
    if rest[-1]:
        return loss, x.new_empty(x.shape), weight.new_empty(weight.shape)
    return loss, x.new_empty(0, x.shape[1]), loss.new_empty(0, x.shape[1])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        run = _forward_op if torch.compiler.is_compiling() else _forward
        loss, grad_x, grad_weight = run(*inputs)
        ctx.save_for_backward(grad_x, grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad.to(grad_x.dtype), grad_weight * grad.to(grad_weight.dtype), *(None,) * 5


def linear_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, count: Tensor, ignored: int, at_once: int
) -> Tensor:
    """As `grmoe.head.next_token_loss_reference`; differentiable once, by x and W. W may be wider than x.

    ignored: the target that does not count. at_once: the number of tokens with logits in memory.
    """
    gradient = torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad)
    scale = 1.0 / count.to(torch.float32)
    return _LinearCrossEntropy.apply(x_TD, weight_VD, target_T, scale, ignored, at_once, gradient)


def linear_token_losses(
    x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, ignored: int, at_once: int
) -> Tensor:
    """As `grmoe.head.token_losses_reference`, in fp32 and without a gradient."""
    one = torch.ones((), device=x_TD.device)
    return _losses(x_TD, weight_VD, target_T, one, ignored, at_once, gradient=False)[0]
