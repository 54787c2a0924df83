"""Rotary positions and attention of one token: the references, and when kernels stand in for them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from grmoe import attention
from grmoe.attention import (
    attend_causally,
    attend_one_reference,
    can_attend_causally,
    can_attend_one,
    rotate,
    rotate_reference,
)
from grmoe.bench.models import ModelShape, ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_positions_are_those_of_transformers_to_the_bit(dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 6, 5, 8, dtype=dtype), torch.randn(2, 3, 5, 8, dtype=dtype)
    angles = torch.randn(1, 5, 8, dtype=dtype)
    want = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    for turn in (rotate, rotate_reference):
        found = turn(q, k, angles.cos(), angles.sin())
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_one_token_attends_as_the_formula_says() -> None:
    q, k, v = torch.randn(2, 6, 1, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    mask = torch.rand(2, 1, 1, 7) < 0.7
    mask[..., 0] = True
    found = attend_one_reference(q, k, v, mask, 0.4)
    for b in range(2):
        for h in range(6):
            scores = 0.4 * (k[b, h // 2] @ q[b, h, 0])
            share = torch.where(mask[b, 0, 0], scores, -torch.inf).softmax(0)
            torch.testing.assert_close(found[b, h, 0], share @ v[b, h // 2], rtol=1e-5, atol=1e-5)
    assert not can_attend_one(q, k, v, mask)  # no kernel on a CPU


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What cuDNN's stand-in was asked for: the operator's arguments by name, as its schema has them."""
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    names = [argument.name for argument in schema.arguments]
    seen: dict[str, object] = {}

    def operator(*args: object, **options: object) -> tuple[torch.Tensor]:
        seen.update(dict(zip(names, args, strict=False)) | options)
        q, k, v = args[:3]
        return (
            scaled_dot_product_attention(q, k, v, is_causal=bool(seen["is_causal"]), scale=seen["scale"]),
        )

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", operator)
    return seen


def test_cudnn_is_asked_for_what_the_formula_says(asked: dict[str, object]) -> None:
    q = torch.randn(2, 6, 5, 8)
    k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    found = attend_causally(q, k, v, 0.4)
    assert asked["compute_log_sumexp"] is True
    before = torch.ones(5, 5, dtype=torch.bool).tril()
    for b in range(2):
        for h in range(6):
            scores = torch.where(before, 0.4 * (q[b, h] @ k[b, h // 2].T), -torch.inf)
            torch.testing.assert_close(found[b, h], scores.softmax(-1) @ v[b, h // 2], rtol=1e-5, atol=1e-5)


def test_cudnn_gets_16_bits_under_autocast(asked: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model with fp32 weights, whose queries and keys are fp32 behind rotary positions of fp32."""
    monkeypatch.setattr("grmoe.model.attention_grmoe.can_attend_causally", lambda *_: True)
    config = ModelShape("tiny", 2, 16, "gelu").config("grassmann")
    model = ours(config).train()
    ids = torch.randint(config.vocab_size, (2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    for name in ("query", "key", "value"):
        assert asked[name].dtype == torch.bfloat16, name  # type: ignore[attr-defined]
    loss.backward()
    assert all(p.grad is not None for p in model.model.layers[0].self_attn.parameters())


def test_cudnn_takes_plain_causal_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CUDNN", True)
    monkeypatch.setattr(attention.runtime, "is_hopper", lambda device: True)

    def takes(B: int = 2, S: int = 5, L: int = 5, W: int = 64, dtype: torch.dtype = torch.bfloat16) -> bool:
        q, k = (OnGpu(torch.empty(B, 2, n, W, dtype=dtype)) for n in (S, L))
        return can_attend_causally(q, k, None)  # type: ignore[arg-type]

    assert takes()
    assert takes(W=128, dtype=torch.float16)
    assert not takes(S=1, L=1)  # decoding
    assert not takes(S=5, L=9)  # behind a cache
    assert not takes(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):  # as in training with fp32 weights
        assert takes(dtype=torch.float32)
        assert not takes(dtype=torch.float64)
    assert not takes(W=60)
    assert not takes(W=256)
    x = OnGpu(torch.empty(2, 2, 5, 64, dtype=torch.bfloat16))
    assert not can_attend_causally(x, x, torch.ones(5, 5))  # type: ignore[arg-type]
    monkeypatch.setattr(attention, "CUDNN", False)
    assert not takes()


class OnGpu:
    """A tensor's shape and precision, said to be on a GPU. Its device is the one of the test's autocast."""

    is_cuda, device = True, torch.device("cpu")

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.dtype = x.shape, x.dtype
