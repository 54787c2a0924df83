"""Odd widths: rows are padded with zeros to whole 16 bytes, which copy engines and grouped GEMMs need.

Zeros change nothing: an expert's added columns read zeros, its added hidden units are act(0) = 0, and the output's
added columns are cut off. The padded copy of the weights costs one pass over them.

Legend: T tokens, D model width, N experts, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from grmoe.experts.dispatch import Dispatch
from grmoe.experts.weights import Activation, Weights
from grmoe.kernels.runtime import missing


@dataclass(frozen=True)
class Padded:
    """Weights with wider rows."""

    source: Weights
    up: Tensor
    down_proj: Tensor

    @property
    def activation(self) -> Activation:
        return self.source.activation

    def activate(self, inner: Tensor, *, in_place: bool = False) -> Tensor:
        return self.source.activate(inner, in_place=in_place)


def padded(weights: Weights, x: Tensor) -> Padded:
    """Weights in x's precision, with D and I grown to whole 16 bytes. SwiGLU's halves grow each at its own end."""
    N, D, I = weights.down_proj.shape
    more_width, more_hidden = missing(D, x), missing(I, x)
    halves = weights.up.to(x.dtype).reshape(N, -1, I, D)
    up = pad(halves, (0, more_width, 0, more_hidden)).flatten(1, 2)
    return Padded(weights, up, pad(weights.down_proj.to(x.dtype), (0, more_hidden, 0, more_width)))


def aligned(
    backend: Callable[[Tensor, Dispatch, Weights], Tensor],
) -> Callable[[Tensor, Dispatch, Weights], Tensor]:
    """`backend` for rows of any width."""

    def run(x_TD: Tensor, dispatch: Dispatch, weights: Weights) -> Tensor:
        D, I = weights.down_proj.shape[1:]
        if not missing(D, x_TD) and not missing(I, x_TD):
            return backend(x_TD, dispatch, weights)
        return backend(pad(x_TD, (0, missing(D, x_TD))), dispatch, padded(weights, x_TD))[:, :D]

    return run
