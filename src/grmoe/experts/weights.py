"""Expert parameters in Hugging Face's layout, so that a checkpoint needs no conversion.

Legend: E experts, H model width, I expert width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from grmoe import checks
from grmoe.experts.dispatch import Dispatch

Activation = Literal["swiglu", "gelu"]


class Weights(Protocol):
    """The weights a backend needs: all of them, or the part that one process holds."""

    @property
    def activation(self) -> Activation: ...

    @property
    def up(self) -> Tensor: ...

    @property
    def down_proj(self) -> Tensor: ...

    def activate(self, inner: Tensor, *, in_place: bool = False) -> Tensor: ...


class ExpertWeights(nn.Module):
    """`gate_up_proj` (E, 2I, H) for SwiGLU or `up_proj` (E, I, H) for GELU, and `down_proj` (E, H, I)."""

    def __init__(self, dim: int, hidden: int, num_experts: int, activation: Activation = "swiglu") -> None:
        super().__init__()
        checks.positive_int("dim", dim)
        checks.positive_int("hidden", hidden)
        checks.positive_int("num_experts", num_experts)
        self.activation: Activation = checks.one_of("activation", activation, ("swiglu", "gelu"))
        inner = 2 * hidden if activation == "swiglu" else hidden
        self.up_name = "gate_up_proj" if activation == "swiglu" else "up_proj"
        self.register_parameter(self.up_name, nn.Parameter(torch.empty(num_experts, inner, dim)))
        self.down_proj = nn.Parameter(torch.empty(num_experts, dim, hidden))
        for weight in (self.up, self.down_proj):
            bound = 1 / math.sqrt(weight.shape[-1])  # as nn.Linear starts
            nn.init.uniform_(weight, -bound, bound)

    @property
    def hidden(self) -> int:
        """I, the width of an expert."""
        return self.down_proj.shape[-1]

    @property
    def up(self) -> Tensor:
        """The first projection, `gate_up_proj` or `up_proj`."""
        weight: Tensor = getattr(self, self.up_name)
        return weight

    def activate(self, inner: Tensor, *, in_place: bool = False) -> Tensor:
        """(..., 2I) → (..., I) for SwiGLU, gate first; (..., I) → (..., I) for GELU.

        in_place: SwiGLU may overwrite `inner`, for callers that need neither it nor gradients.
        """
        if self.activation == "gelu":
            return nn.functional.gelu(inner)
        gate, up = inner.chunk(2, dim=-1)
        return nn.functional.silu(gate, inplace=True).mul_(up) if in_place else nn.functional.silu(gate) * up

    def run(
        self, backend: Callable[[Tensor, Dispatch, ExpertWeights], Tensor], x_TD: Tensor, dispatch: Dispatch
    ) -> Tensor:
        """Run tokens through a backend. It is a method, because FSDP must see when the module is used."""
        return backend(x_TD, dispatch, self)

    def forward(
        self, x_TD: Tensor, dispatch: Dispatch, backend: Callable[[Tensor, Dispatch, ExpertWeights], Tensor]
    ) -> Tensor:
        """`run` for an adapter that wraps this module. LoRA of PEFT changes the weights while its `forward` runs."""
        return self.run(backend, x_TD, dispatch)

    def extra_repr(self) -> str:
        return f"{self.up_name}={tuple(self.up.shape)}, down_proj={tuple(self.down_proj.shape)}"


def with_weights_at_hand(weights: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
    """compute(), with weights that accelerate has offloaded (`device_map`) on their device.

    Its hooks run around a module's `forward`, which no backend calls.
    """
    hook: Any = getattr(weights, "_hf_hook", None)
    if hook is None:
        return compute()
    hook.pre_forward(weights)
    try:
        return compute()
    finally:
        hook.post_forward(weights, None)
