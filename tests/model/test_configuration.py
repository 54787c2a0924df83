"""The configuration says what it is given, refuses what makes no model, and survives its JSON."""

from __future__ import annotations

import re
from typing import Any

import pytest

from grmoe.model import PRESETS, GrmoeConfig, preset
from grmoe.routing import Dense, Mass, Threshold, TopK


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name: str, tmp_path: Any) -> None:
    for changes in (
        {},
        {"selection": "mass", "num_experts_per_tok": 3, "selection_tau": 0.8},
        {"alpha": 2.5, "router_options": {"amortizer": "affinity", "prior": "uniform"}},
    ):
        config = preset(name, **changes)
        config.save_pretrained(tmp_path)
        assert GrmoeConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_moe_layers_are_the_even_blocks_counted_from_one() -> None:
    assert preset("350m").moe_layers == [1, 3, 5, 7, 9, 11]
    assert GrmoeConfig(num_hidden_layers=3, moe_every=1).moe_layers == [0, 1, 2]
    assert GrmoeConfig(num_hidden_layers=7, moe_every=3).moe_layers == [2, 5]


def test_selection_policies() -> None:
    assert GrmoeConfig().selection_policy() == TopK(2)
    assert GrmoeConfig(num_experts_per_tok=1).selection_policy() == TopK(1, renormalize=False)
    assert GrmoeConfig(norm_topk_prob=True).selection_policy() == TopK(2, renormalize=True)
    assert GrmoeConfig(selection="mass", num_experts_per_tok=4).selection_policy() == Mass(0.9, cap=4)
    threshold = GrmoeConfig(selection="threshold", selection_tau=0.3)
    assert (threshold.selection_policy(), threshold.num_experts_per_tok) == (Threshold(0.3), 3)
    dense = GrmoeConfig(selection="dense")
    assert (dense.selection_policy(), dense.num_experts_per_tok) == (Dense(), 8)


def test_derived_sizes_and_names() -> None:
    config = GrmoeConfig(hidden_size=64, num_attention_heads=4, num_experts=16, hidden_act="swiglu")
    assert (config.intermediate_size, config.moe_intermediate_size, config.router_rank) == (256, 128, 4)
    assert (config.head_dim, config.num_key_value_heads, config.num_local_experts) == (16, 4, 16)
    # The name other software knows is the one that is stored.
    assert (config.hidden_act, config.activation) == ("silu", "swiglu")
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert (
        GrmoeConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope_parameters is not None
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be an integer >= 1, got 0"),
        ({"num_experts": 1}, "num_experts must be at least 2, got 1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_experts = 8, got 9"),
        ({"num_key_value_heads": 5}, "num_key_value_heads must divide num_attention_heads = 12, got 5"),
        ({"head_dim": 15}, "head_dim must be even for RoPE, got 15"),
        ({"moe_every": 13}, "moe_every = 13 leaves no MoE layer in 12 blocks"),
        ({"hidden_act": "relu"}, "hidden_act must be 'silu' or 'gelu', got 'relu'"),
        ({"router": "magic"}, "router must be one of grassmann, softmax"),
        ({"router_rank": 1000}, "router_rank must be at most hidden_size = 768, got 1000"),
        (
            {"selection": "best"},
            "selection must be one of topk, mass, at_least, threshold, dense, got 'best'",
        ),
        ({"selection": "mass", "selection_tau": 1.5}, "selection_tau must be in (0, 1], got 1.5"),
        (
            {"selection": "dense", "num_experts_per_tok": 2},
            "num_experts_per_tok must be 8 with selection 'dense', got 2",
        ),
        (
            {"router": "switch", "num_experts_per_tok": 2},
            "num_experts_per_tok must be 1 with router 'switch', got 2",
        ),
        ({"alpha": -1.0}, "alpha must be a finite number >= 0, got -1.0"),
        ({"alpha": [1.0, 2.0]}, "alpha must be one number or one for each of the 6 MoE layers"),
        ({"alpha": "2"}, "alpha must be a finite number >= 0, got '2'"),
        ({"shared_experts": -1}, "shared_experts must be an integer >= 0, got -1"),
        ({"router_options": ["rank"]}, "router_options must be a dict, got ['rank']"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        GrmoeConfig(**changes)
