"""A model that decodes by kernels gives the answers that it gives without."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from grmoe import attention
from grmoe.kernels import decode_attention, rotary, runtime
from grmoe.model import GrmoeConfig, GrmoeForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets models use the kernels here, and lists the calls."""
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: calls.append(name) or function(*args)

    here = SimpleNamespace(INTERPRETED=False, available=runtime.available, attempt=runtime.attempt)
    monkeypatch.setattr(attention, "runtime", here)
    monkeypatch.setattr(decode_attention, "attend", counted("attend", decode_attention.attend))
    monkeypatch.setattr(rotary, "rotate", counted("rotate", rotary.rotate))
    return calls


def make() -> GrmoeForCausalLM:
    torch.manual_seed(0)
    config = GrmoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, router_rank=4, initializer_range=0.3,
        max_position_embeddings=64,
    )  # fmt: skip
    return GrmoeForCausalLM(config).eval()


def generate(model: GrmoeForCausalLM, **options: Any) -> Any:
    """Two sequences, the second with two tokens of padding in front."""
    ids = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 11, 12, 13]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    torch.use_deterministic_algorithms(False)  # it fills what transformers' cache reserves with NaN
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("cache", [None, "static"])
def test_answers_are_the_same(cache: str | None, used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    options = {"cache_implementation": cache, "disable_compile": True}
    ours = generate(model, **options)
    assert (used.count("rotate"), used.count("attend")) == (2 * 6, 2 * 5)  # the prompt has several tokens
    monkeypatch.setattr(attention, "runtime", SimpleNamespace(INTERPRETED=True))
    plain = generate(model, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    for a, b in zip(ours.logits, plain.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(used) == 2 * 11


def test_training_never_takes_them(used: list[str]) -> None:
    """Also where checkpointing runs a block without gradients first."""
    model = make().train()
    model.gradient_checkpointing_enable()
    ids = torch.tensor([[5, 6, 7]])
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        model(input_ids=ids)
    model.eval()
    model(input_ids=ids)  # gradients could be asked for
    assert used == []


def test_other_implementations_of_attention_stay(used: list[str]) -> None:
    model = make()
    model.set_attn_implementation("eager")
    generate(model)
    assert "attend" not in used
