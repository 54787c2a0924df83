"""Attention heads chosen by the Grassmann gate: against loops, plain attention as its limit, trained and loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grmoe.model import GrmoeConfig, GrmoeForCausalLM, count
from grmoe.model.attention_grmoe import GrmoeAttention
from grmoe.model.count import parameters
from grmoe.optim import ModelOptimizer
from grmoe.routing import HeadRouter, all_routers, grassmann_logits_reference, routers
from grmoe.serve.batching import why_not_batch
from grmoe.train.log import heads_line

H, HD, D, S = 4, 8, 32, 7


def head_routers(model: GrmoeForCausalLM) -> list[HeadRouter]:
    return [router for router in all_routers(model) if isinstance(router, HeadRouter)]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_attention_is_the_loop_over_chosen_heads(build: Any, implementation: str) -> None:
    """Causal attention head by head and token by token, with rotary positions off (cos 1, sin 0)."""
    model = build(attention_heads_per_token=2, attn_implementation=implementation)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, GrmoeAttention)
    x_SD = torch.randn(S, D, generator=torch.Generator().manual_seed(3))
    flat = (torch.ones(1, S, HD), torch.zeros(1, S, HD))
    mask = None if implementation == "sdpa" else torch.full((S, S), -1e9).triu(1)[None, None]
    got, _ = attention(x_SD[None], position_embeddings=flat, attention_mask=mask)

    router = attention.router
    unit_SD = x_SD / x_SD.norm(dim=-1, keepdim=True)
    scores = grassmann_logits_reference(unit_SD, router.frames, router.kappa, scale=D / router.rank)
    gate_SH = (scores + router.log_prior).softmax(-1)
    q, k, v = (getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj"))
    want = torch.zeros(S, D, dtype=torch.float64)
    for t in range(S):
        for h in gate_SH[t].topk(2).indices.tolist():
            rows, shared = (
                slice(h * HD, (h + 1) * HD),
                slice(h // 2 * HD, (h // 2 + 1) * HD),
            )  # two heads per key
            keys, values = x_SD[: t + 1] @ k[shared].T, x_SD[: t + 1] @ v[shared].T
            seen = torch.softmax(keys @ (q[rows] @ x_SD[t]) / math.sqrt(HD), 0) @ values
            want[t] += H * gate_SH[t, h] * (attention.o_proj.weight[:, rows] @ seen)
    torch.testing.assert_close(got[0].double(), want, rtol=1e-4, atol=1e-5)
    metrics = router.read_metrics()
    assert metrics.experts_per_token == 2.0
    assert len(metrics.load) == H


@torch.no_grad()
def test_a_uniform_gate_over_all_heads_is_plain_attention(build: Any, ids: Tensor) -> None:
    chosen, plain = build(attention_heads_per_token=H), build()
    plain.load_state_dict({k: v for k, v in chosen.state_dict().items() if ".self_attn.router." not in k})
    assert not torch.allclose(chosen(ids).logits, plain(ids).logits, atol=1e-3)
    for router in head_routers(chosen):
        router.alpha = 0.0
    torch.testing.assert_close(chosen(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


def test_generation_with_a_cache_equals_reading_at_once(build: Any, ids: Tensor) -> None:
    model = build(attention_heads_per_token=2)
    text = model.generate(ids, max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        assert torch.equal(model(text[:, :-1]).logits[:, -5:].argmax(-1), text[:, -5:])


def test_routers_of_heads_are_apart_from_those_of_experts(build: Any, ids: Tensor, tmp_path: Path) -> None:
    model = build(attention_heads_per_token=2, alpha=[0.5, 2.0])
    assert (len(routers(model)), len(all_routers(model))) == (2, 6)
    model.set_alpha(3.0)
    assert [r.alpha for r in head_routers(model)] == [1.0] * 4
    assert parameters(model.config) == count(model.config).total == sum(p.numel() for p in model.parameters())
    assert "heads that nearly tie" in why_not_batch(model)
    model.save_pretrained(tmp_path)
    again = GrmoeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for router, before in zip(head_routers(again), head_routers(model), strict=True):
        assert torch.equal(router.frames, before.frames)  # fp32 in a model of 16 bits
        assert (router.cap, router.alpha) == (2, 1.0)
    again = GrmoeForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_training_moves_the_gates_of_heads_and_evens_out_their_load(build: Any, ids: Tensor) -> None:
    model = build(attention_heads_per_token=2).train()
    optimizer = ModelOptimizer(model, lr=1e-2)
    before = [(r.frames.detach().clone(), r.log_prior.clone()) for r in head_routers(model)]
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.update_priors(0.05)
    for router, (frames, prior) in zip(head_routers(model), before, strict=True):
        assert not torch.equal(router.frames, frames)
        assert not torch.equal(router.log_prior, prior)
        assert float(router.prior_sums.sum()) == 0.0
    line = heads_line(model.head_metrics())["heads"]
    assert set(line) == {"entropy", "load_cv", "min_load"}
    assert 0 < line["entropy"] <= math.log(H)
    model.reset_routing_metrics()
    assert model.head_metrics()[0].tokens == 0


def test_old_configurations_have_no_choice(config: Callable[..., GrmoeConfig]) -> None:
    old = config().to_dict()
    old.pop("attention_heads_per_token")
    assert GrmoeForCausalLM(GrmoeConfig(**old)).model.layers[0].self_attn.router is None
    assert heads_line([]) == {}


@pytest.mark.parametrize("value", [0, 5, True, "2"])
def test_wrong_numbers_are_refused(config: Callable[..., GrmoeConfig], value: Any) -> None:
    with pytest.raises(ValueError, match=r"attention_heads_per_token"):
        config(attention_heads_per_token=value)
