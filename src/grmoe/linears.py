"""Linear maps of few tokens with what stands around them: norm, activation, residual sum. For decoding.

Legend: D model width, O outputs, I width of a feed-forward; leading dimensions are tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, rms_norm, silu

from grmoe.kernels import runtime

# The most tokens that go through the kernel, in place of several of PyTorch's. It is made for up to 64. None do until
# that is measured.
MOST_TOKENS = 0
_CAPTURES = "transformers.utils.output_capturing"


def takes_few(x: Tensor, whole: nn.Module, norm: nn.Module, *linears: nn.Module) -> bool:
    """Whether the maps below may stand in for the module `whole`, the norm before it, and the layers in it.

    x must be few tokens on a GPU, without a gradient. Layers must be as they were built: nobody listens to them, wraps
    them, or keeps their weights in another form.
    """
    if MOST_TOKENS == 0 or whole.training or torch.is_grad_enabled():
        return False
    if runtime.INTERPRETED or not runtime.runs_on(x) or not 0 < x.shape[:-1].numel() <= MOST_TOKENS:
        return False
    plain = all(type(each) is nn.Linear and each.bias is None for each in linears)
    return (
        plain
        and not any(map(_is_heard, (whole, norm, *linears)))
        and all(_has(e, x) for e in (norm, *linears))
    )


def _is_heard(module: nn.Module) -> bool:
    """Someone sees or replaces what its forward returns.

    transformers leaves a hook on every attention once a caller asked for hidden states. It looks for attention weights,
    which there are none of here.
    """
    hooks = [hook for hook in module._forward_hooks.values() if hook.__module__ != _CAPTURES]
    every = nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks
    return bool(hooks or module._forward_pre_hooks or every or "forward" in module.__dict__)


def _has(layer: nn.Module, x: Tensor) -> bool:
    """The layer's weight is beside x, in one piece and in x's precision."""
    weight = layer.weight
    return type(weight) is nn.Parameter and (weight.dtype, weight.device) == (x.dtype, x.device)


def project_few(x: Tensor, weights: Sequence[Tensor], gain: Tensor | None, eps: float) -> list[Tensor]:
    """W·norm(x) for up to three matrices. gain, eps: of the norm; None: there is none."""
    found = runtime.attempt(
        "linear maps of few tokens",
        lambda: _thin(x, weights, gain, eps),
        lambda: torch.cat(project_few_reference(x, weights, gain, eps), dim=-1),
    )
    return list(found.split([len(w) for w in weights], dim=-1))


def project_few_reference(
    x: Tensor, weights: Sequence[Tensor], gain: Tensor | None, eps: float
) -> list[Tensor]:
    normed = _norm(x, gain, eps)
    return [linear(normed, w) for w in weights]


def feed_forward_few(x: Tensor, gate: Tensor | None, up: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """silu(W_gate n)·(W_up n), or gelu(W_up n) without a gate; n = norm(x)."""
    from grmoe.kernels.thin_linear import GELU, SWIGLU

    weights, activation = ([up], GELU) if gate is None else ([gate, up], SWIGLU)
    return runtime.attempt(
        "linear maps of few tokens",
        lambda: _thin(x, weights, gain, eps, activation=activation),
        lambda: feed_forward_few_reference(x, gate, up, gain, eps),
    )


def feed_forward_few_reference(
    x: Tensor, gate: Tensor | None, up: Tensor, gain: Tensor | None, eps: float
) -> Tensor:
    normed = _norm(x, gain, eps)
    if gate is None:
        return gelu(linear(normed, up))
    return silu(linear(normed, gate)) * linear(normed, up)


def add_product(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """residual + W·x."""
    return runtime.attempt(
        "linear maps of few tokens",
        lambda: _thin(x, [weight], None, 0.0, residual=residual),
        lambda: residual + linear(x, weight),
    )


def _norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    return x if gain is None else rms_norm(x, gain.shape, gain, eps)


def _thin(
    x: Tensor,
    weights: Sequence[Tensor],
    gain: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    activation: int = 0,
) -> Tensor:
    from grmoe.kernels.thin_linear import apply

    flat = None if residual is None else residual.reshape(-1, residual.shape[-1])
    out = apply(x.reshape(-1, x.shape[-1]), weights, gain=gain, eps=eps, residual=flat, activation=activation)
    return out.view(*x.shape[:-1], -1)
