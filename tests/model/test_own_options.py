"""Options of a router that the configuration has under another name."""

from __future__ import annotations

from typing import Any

import pytest

from grmoe.model import GrmoeConfig, GrmoeForCausalLM


@pytest.mark.parametrize(
    ("changes", "option", "name"),
    [
        ({"router_options": {"rank": 2}}, "rank", "router_rank"),
        ({"router": "softmax", "router_options": {"top_k": 4}}, "top_k", "num_experts_per_tok"),
        ({"router_options": {"selection": "whatever"}}, "selection", "selection"),
        ({"router_options": {"alpha": 3.0}}, "alpha", "alpha"),
        ({"router_kappa": 2.0, "router_options": {"kappa": 9.0}}, "kappa", "router_kappa"),
    ],
)
def test_they_are_refused_where_they_would_be_ignored(
    changes: dict[str, Any], option: str, name: str
) -> None:
    small: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_experts": 4,
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"router_options.{option} has no effect: set {name}"):
        GrmoeForCausalLM(GrmoeConfig(**small, **changes))


def test_the_same_number_twice_is_fine() -> None:
    config = GrmoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_experts=4, router_rank=2, router_options={"rank": 2},
    )  # fmt: skip
    assert GrmoeForCausalLM(config).config.router_rank == 2
