"""PEFT. LoRA wraps experts, and changes their weights while the wrapper's `forward` runs. `modules_to_save` keeps a
copy to train beside the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import grmoe
from grmoe.model import GrmoeForCausalLM
from grmoe.routing import routers

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


class ModulesToSaveWrapper(nn.Module):
    """As that of PEFT 0.21, which is found by this name. Earlier versions have the active adapter as a string."""

    def __init__(self, module: nn.Module, active: str | list[str]) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({name: copy.deepcopy(module) for name in ("default", "other")})
        self.active_adapter, self.disable_adapters = active, False

    @property
    def used(self) -> nn.Module:
        if self.disable_adapters or not self.active_adapter:
            return self.original_module
        [name] = [self.active_adapter] if isinstance(self.active_adapter, str) else self.active_adapter
        return self.modules_to_save[name]

    def forward(self, *args: Any) -> Any:
        return self.used(*args)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.used, name)


@pytest.mark.parametrize("active", ["other", ["default"], []], ids=["string", "list", "none"])
def test_only_routers_in_use_are_found(build: Build, ids: Tensor, active: str | list[str]) -> None:
    """Before, every copy counted: a model of two layers had the metrics of six, and took six α."""
    model = build(selection="mass").eval()
    wanted, metrics = model(ids).logits, model.routing_metrics()
    model.reset_routing_metrics()
    wrappers = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "router"):
            layer.mlp.router = ModulesToSaveWrapper(layer.mlp.router, active)
            wrappers.append(layer.mlp.router)
    assert len(wrappers) > 1
    assert torch.equal(model(ids).logits, wanted)
    assert routers(model) == [wrapper.used for wrapper in wrappers]
    assert [str(layer) for layer in model.routing_metrics()] == [str(layer) for layer in metrics]
    alphas = [float(2 + i) for i in range(len(wrappers))]
    model.set_alpha(alphas)
    assert model.alpha == alphas
    assert not torch.equal(model(ids).logits, wanted)
    for wrapper in wrappers:
        wrapper.disable_adapters = True
    assert routers(model) == [wrapper.original_module for wrapper in wrappers]


def test_feed_forwards_that_are_kept_whole(build: Build, ids: Tensor) -> None:
    """`modules_to_save=["mlp"]`, with dense blocks among them. Before, only MoE layers could be wrapped."""
    model = build(moe_every=2).train()
    wanted = model(ids, labels=ids)
    wrappers = []
    for layer in model.model.layers:
        layer.mlp = ModulesToSaveWrapper(layer.mlp, ["default"])
        wrappers.append(layer.mlp)
    assert {type(wrapper.used).__name__ for wrapper in wrappers} == {"GrmoeMLP", "GrmoeMoE"}
    found = model(ids, labels=ids)
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.loss, wanted.loss)
    found.loss.backward()
    for wrapper in wrappers:
        assert all(p.grad is not None for p in wrapper.used.parameters())
        assert all(p.grad is None for p in wrapper.original_module.parameters())


def test_a_whole_layer_that_is_kept_twice_has_one_router() -> None:
    layer = ModulesToSaveWrapper(grmoe.MoE(16, 24, 4), ["default"])
    assert routers(nn.Sequential(layer, grmoe.MoE(16, 24, 4)))[:-1] == [layer.used.router]
