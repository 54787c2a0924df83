"""Parameter counts of the presets against formulas written by hand, and what the counts are made of."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from grmoe.model import PRESETS, GrmoeConfig, GrmoeForCausalLM, count, preset
from grmoe.model.count import describe, meta_model, short

# (vocabulary, width, dense, expert, blocks, heads, key heads, N, rank, matrices of a feed-forward, tied)
TABLE = {
    "tiny": (2048, 128, 384, 128, 4, 4, 2, 8, 16, 3, True),
    "small": (8192, 512, 2048, 1024, 8, 8, 8, 8, 64, 2, True),
    "350m": (50257, 768, 3072, 1536, 12, 12, 12, 8, 48, 2, True),
    "1.3b": (50257, 2048, 5504, 2752, 24, 16, 4, 16, 64, 3, False),
    "2.7b": (50257, 2560, 6912, 3456, 32, 20, 5, 32, 64, 3, False),
    "small-fine": (8192, 512, 2048, 256, 8, 8, 8, 32, 16, 2, True),
    "350m-fine": (50257, 768, 3072, 384, 12, 12, 12, 32, 24, 2, True),
    "1.3b-fine": (50257, 2048, 5504, 688, 24, 16, 4, 64, 32, 3, False),
}
# What the formulas give, so that a change of a preset is seen.
TOTALS = {
    "tiny": (1_574_032, 984_208),
    "small": (55_583_264, 30_417_440),
    "350m": (210_255_408, 125_320_752),
    "1.3b": (4_134_967_488, 1_294_375_104),
    "2.7b": (15_304_548_352, 2_564_349_952),
    "small-fine": (55_583_360, 30_417_536),
    "350m-fine": (212_025_024, 127_090_368),
    "1.3b-fine": (4_160_133_888, 1_319_541_504),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_of_their_formula(name: str) -> None:
    V, H, dense, expert, L, heads, groups, N, k, matrices, tied = TABLE[name]
    attention = L * (2 * H * H + 2 * H * (H // heads) * groups)
    feed_forward = L // 2 * matrices * H * dense
    experts = L // 2 * N * matrices * H * expert
    router = L // 2 * N * (H * k + 1)
    embedding = V * H * (1 if tied else 2)
    norms = (2 * L + 1) * H
    computed = 8 if name.endswith("-fine") else 2
    cost = count(preset(name))
    total = attention + feed_forward + experts + router + embedding + norms
    assert (cost.total, cost.experts, cost.router, cost.embedding) == (total, experts, router, embedding)
    assert cost.active == total - experts + experts * computed // N
    assert (cost.total, cost.active) == TOTALS[name]
    assert cost.weight_bytes == 2 * (total - router) + 4 * router
    products = attention + feed_forward + experts * computed // N + router - L // 2 * N + V * H
    assert cost.train_flops_6n == 6 * products
    context = preset(name).max_position_embeddings
    assert cost.forward_flops == 2 * products + L * 4 * H * (context + 1) / 2


def test_counts_are_those_of_a_real_model(config: Callable[..., GrmoeConfig]) -> None:
    for changes in ({}, {"tie_word_embeddings": True, "shared_experts": 2}, {"router": "hash"}):
        real = GrmoeForCausalLM(config(**changes))
        assert count(real.config).total == sum(p.numel() for p in real.parameters())


def test_flops_are_those_pytorch_counts(config: Callable[..., GrmoeConfig]) -> None:
    """Dense selection on the loop backend, where every product is a plain GEMM that the counter sees."""
    model = GrmoeForCausalLM(
        config(selection="dense", experts_implementation="reference", attn_implementation="eager")
    )
    cost = count(model.config, context=11)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 11, dtype=torch.long))
    # Eager attention multiplies all pairs, masked ones too: 11 keys a token instead of (11 + 1)/2 on average. RoPE
    # makes its angles by a product, which is the only other one: 2·positions·frequencies.
    pairs = 4 * 32 * 4 * 11
    linear = cost.forward_flops - 4 * 32 * 4 * 6
    assert counter.get_total_flops() == 11 * (linear + pairs) + 2 * 11 * 4


def test_flops_follow_the_experts_computed(config: Callable[..., GrmoeConfig]) -> None:
    one, two = (count(config(num_experts_per_tok=k), context=11) for k in (1, 2))
    assert one.train_flops_at(2) == two.train_flops > one.train_flops
    assert two.train_flops_at(1.5) == (one.train_flops + two.train_flops) / 2


def test_nothing_is_allocated() -> None:
    model = meta_model(preset("2.7b"))
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}


def test_context_only_moves_attention() -> None:
    near, far = count(preset("tiny"), 1), count(preset("tiny"), 1001)
    assert far.forward_flops - near.forward_flops == 4 * 128 * 4 * 500
    assert (near.total, near.train_flops_6n) == (far.total, far.train_flops_6n)
    assert near.train_flops == 3 * near.forward_flops


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "top-2"),
        ({"selection": "mass", "num_experts_per_tok": 4}, "mass 0.9, at most 4"),
        ({"selection": "dense"}, "all of them"),
        ({"router": "switch"}, "its own choice"),
        ({}, "2 (blocks 1, 3, counted from 0)"),  # as the dial, the report and `model.layers` count them
    ],
)
def test_description(changes: dict[str, object], text: str) -> None:
    config = preset("tiny", **changes)
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(describe("tiny", config, count(config)))
    assert text in captured.get()


def test_short_numbers() -> None:
    assert [short(v) for v in (7, 999, 1234567, 4.1e9, 3e15)] == ["7", "999", "1.235 M", "4.1 G", "3000 T"]


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="preset must be one of 'tiny', 'small'"):
        preset("huge")
    with pytest.raises(ValueError, match="unknown key 'routr'; did you mean 'router'"):
        preset("tiny", routr="softmax")
    assert preset("tiny", attn_implementation="eager")._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("changes", "experts"),
    [
        ({"router": "soft_moe"}, 1.0),
        ({"router": "soft_moe", "router_options": {"slots": 2}}, 4 * 2 / 12),
        ({"router": "grassmann_soft_moe", "router_kappa": None}, 1.0),
        ({"router": "grassmann_soft_moe", "router_options": {"slots": 2, "slot_rank": 3}}, 4 * 2 / 12),
        ({"router": "expert_choice"}, 1.0),
        ({"router": "expert_choice", "router_options": {"capacity_factor": 2.0}}, 2.0),
    ],
    ids=str,
)
def test_routers_that_choose_for_themselves_cost_what_they_compute(
    config: Callable[..., GrmoeConfig], changes: dict[str, object], experts: float
) -> None:
    """12 tokens, 4 experts: against PyTorch's own count of the products, and the metric of a real pass."""
    options: dict[str, object] = {"experts_implementation": "reference", "attn_implementation": "eager"}
    model = GrmoeForCausalLM(config(allow_noncausal_router=True, **options, **changes))
    cost = count(model.config, context=12)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 12, dtype=torch.long))
    pairs = 4 * 32 * 4 * 12  # eager attention multiplies masked pairs too
    linear = cost.forward_flops - 4 * 32 * 4 * 6.5
    assert counter.get_total_flops() == 12 * (linear + pairs) + 2 * 12 * 4
    assert cost.experts_per_token == pytest.approx(experts)
    for metrics in model.routing_metrics():
        assert metrics.experts_per_token == pytest.approx(experts)


def test_soft_moe_has_a_slot_for_every_expert_and_token_by_default(
    config: Callable[..., GrmoeConfig],
) -> None:
    """One expert row per token, whatever the length of the sequence; info, FLOPs and metrics agree."""
    model = GrmoeForCausalLM(config(router="soft_moe", allow_noncausal_router=True)).eval()
    for length in (8, 16, 64):
        model.reset_routing_metrics()
        model(torch.zeros(2, length, dtype=torch.long))
        assert [m.experts_per_token for m in model.routing_metrics()] == [1.0, 1.0]
        assert count(model.config, length).experts_per_token == 1.0
    two = count(config(router="softmax"), 64)  # top-2
    one = count(model.config, 64)
    half = one.experts / 8  # of the experts' weights: two of four, and one of four
    assert two.active - two.router - (one.active - one.router) == pytest.approx(2 * half)
