"""LoRA on experts. PEFT wraps the module, and changes the weights while the wrapper's `forward` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import grmoe
from grmoe.model import GrmoeForCausalLM

Build = Callable[..., GrmoeForCausalLM]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Wrapper(nn.Module):
    """As `ParamWrapper` of PEFT 0.21, with twice the weight in place of a low-rank change."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        parametrize.register_parametrization(self.base_layer, "down_proj", Doubled())
        try:
            y: Tensor = self.base_layer(x, *args)
        finally:
            parametrize.remove_parametrizations(self.base_layer, "down_proj", leave_parametrized=False)
        return y


@pytest.mark.parametrize("backend", ["auto", "reference", "grouped", "eager", "grouped_mm"])
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_a_language_model_with_wrapped_experts(build: Build, ids: Tensor, act: str, backend: str) -> None:
    model = build(hidden_act=act, selection="mass").eval()
    model.set_experts_implementation(backend)
    layers = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    with torch.no_grad():
        for moe in layers:
            moe.experts.down_proj *= 2
        wanted = model(ids).logits
        for moe in layers:
            moe.experts.down_proj /= 2
            moe.experts = Wrapper(moe.experts)
    torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-5)


def test_a_layer_with_wrapped_experts() -> None:
    moe, x = grmoe.MoE(16, 24, 4), torch.randn(5, 16)
    wanted = 2 * moe(x)
    moe.experts = Wrapper(moe.experts)  # type: ignore[assignment]
    torch.testing.assert_close(moe(x), wanted)
