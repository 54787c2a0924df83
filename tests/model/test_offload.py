"""Models that accelerate or transformers build in their own way: offloaded, on the meta device, in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import grmoe
from grmoe.model import GrmoeForCausalLM

Build = Callable[..., GrmoeForCausalLM]


@pytest.mark.parametrize(
    "fields", [{}, {"shared_experts": 1}, {"router": "soft_moe", "allow_noncausal_router": True}]
)
def test_offloaded_experts_are_loaded_before_they_compute(
    build: Build, ids: torch.Tensor, tmp_path: Path, fields: dict[str, Any]
) -> None:
    model = build(**fields)
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    last = len(model.model.layers) - 1
    places |= {f"model.layers.{i}": "disk" if i == last else "cpu" for i in range(last + 1)}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
    ).eval()
    assert any(p.is_meta for p in offloaded.parameters())
    torch.testing.assert_close(offloaded(ids).logits, model(ids).logits)
    torch.testing.assert_close(
        offloaded(ids).logits, model(ids).logits
    )  # they were put away again, and return
    assert len(offloaded.routing_metrics()) == len(model.routing_metrics())


class LlamaOfExperts(LlamaForCausalLM):
    """A user's own class. Its layers are made on the meta device by `from_pretrained`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = grmoe.MoE(config.hidden_size, 16, 4)
        self.post_init()


def own_model() -> LlamaOfExperts:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaOfExperts(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).eval()


def numbers(model: torch.nn.Module) -> list[tuple[float, int, float, float]]:
    found = grmoe.routers(model)
    return [(r.tau, r.cap, float(r.prior_sums.abs().sum()), float(r.counter.sums.abs().sum())) for r in found]


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory that is never zero by chance."""

    def filled(like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full(
            like.shape, 77, dtype=kwargs.get("dtype") or like.dtype, device=kwargs.get("device")
        )

    monkeypatch.setattr(torch, "empty_like", filled)


def test_budget_and_counters_start_anew_in_a_users_own_class(tmp_path: Path, garbage: None) -> None:
    model = own_model()
    model.save_pretrained(tmp_path)
    loaded = LlamaOfExperts.from_pretrained(tmp_path).eval()
    assert numbers(loaded) == numbers(own_model())
    ids = torch.randint(0, 50, (2, 7))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_budget_and_counters_start_anew_after_to_empty(garbage: None) -> None:
    model = own_model()
    with torch.device("meta"):
        other = own_model()
    other.to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    assert numbers(other) == numbers(own_model())


@pytest.fixture
def sixteen_bits() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_routers_count_in_fp32_whatever_the_default_is(sixteen_bits: None) -> None:
    layer = grmoe.MoE(16, 8, 4)
    assert layer.experts.down_proj.dtype == torch.bfloat16
    tensors = [*layer.router.parameters(), *layer.router.buffers()]
    assert min(torch.finfo(t.dtype).bits for t in tensors if t.is_floating_point()) == 32
    assert torch.get_default_dtype() == torch.bfloat16
    torch.set_default_dtype(torch.float32)  # as transformers does when the model is made
    layer.train()
    for _ in range(3):
        layer(torch.randn(257, 16).bfloat16())
    assert float(layer.router.prior_sums[-1]) == 3 * 257  # bf16 has no 771


def test_a_router_that_cannot_be_made_leaves_the_default_alone(sixteen_bits: None) -> None:
    with pytest.raises(ValueError, match="rank"):
        grmoe.GrassmannRouter(8, 4, 9)
    assert torch.get_default_dtype() == torch.bfloat16


def test_hash_routing_needs_ids(build: Build, ids: torch.Tensor) -> None:
    model = build(router="hash")
    with pytest.raises(ValueError, match="needs input_ids"):
        model(inputs_embeds=model.get_input_embeddings()(ids))
