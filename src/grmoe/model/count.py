"""What a model costs: parameters, arithmetic and memory, counted on the meta device, where nothing is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.model.modeling_grmoe import GrmoeForCausalLM, GrmoeMoE
from grmoe.routing import routers
from grmoe.tables import Table


@dataclass(frozen=True)
class Cost:
    """Parameters are numbers of weights; FLOPs are per token, a multiplication and an addition counting as two."""

    total: int
    active: int  # weights a token goes through with K experts; embeddings included
    experts: int  # routed ones
    router: int
    embedding: int  # input and output; one matrix where they are tied
    context: int
    forward_flops: float  # products with weights, and attention over a causal context
    train_flops: float  # three times that: the backward computes two products for each
    train_flops_6n: int  # the usual 6·N of weights in products: no attention over positions
    weight_bytes: int  # bf16, routers fp32

    @property
    def router_share(self) -> float:
        return self.router / self.total

    @property
    def embedding_share(self) -> float:
        return self.embedding / self.total


def meta_model(config: GrmoeConfig) -> GrmoeForCausalLM:
    """The model's shapes without its memory."""
    with torch.device("meta"):
        return GrmoeForCausalLM(config)


def count(config: GrmoeConfig, context: int | None = None) -> Cost:
    """The cost at `context` tokens, by default the longest the model was made for.

    A token has on average (context + 1)/2 keys before it, itself included; each costs 2·2·heads·head_dim a block.
    A token with fewer than K experts (selection "mass" or "threshold") costs less than is counted here.
    """
    model = meta_model(config)
    context = config.max_position_embeddings if context is None else context
    total = sum(p.numel() for p in model.parameters())  # a tied parameter appears once
    router = sum(p.numel() for r in routers(model) for p in r.parameters())
    blocks = [m for m in model.modules() if isinstance(m, GrmoeMoE)]
    experts = sum(p.numel() for block in blocks for p in block.experts.parameters())
    N, K = config.num_experts, config.num_experts_per_tok
    assert K is not None
    assert config.head_dim is not None
    active = total - experts + experts * K // N
    table = config.vocab_size * config.hidden_size
    embedding = table if config.tie_word_embeddings else 2 * table
    # Looking up a token multiplies nothing; the output matrix, tied or not, does. Norms and κ are no products.
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    multiplied = active - vectors - (0 if config.tie_word_embeddings else table)
    keys = (context + 1) / 2
    attention = 4 * config.num_attention_heads * config.head_dim * keys * config.num_hidden_layers
    forward = 2 * multiplied + attention
    return Cost(
        total=total,
        active=active,
        experts=experts,
        router=router,
        embedding=embedding,
        context=context,
        forward_flops=forward,
        train_flops=3 * forward,
        train_flops_6n=6 * multiplied,
        weight_bytes=2 * (total - router) + 4 * router,
    )


def describe(name: str, config: GrmoeConfig, cost: Cost) -> Table:
    """The table that `grmoe info` prints."""
    H, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    layers = config.moe_layers
    first = ", ".join(str(i + 1) for i in layers[:3]) + (", …" if len(layers) > 3 else "")
    shared = f" + {config.shared_experts} shared" if config.shared_experts else ""
    rank = f", rank {config.router_rank}" if config.router == "grassmann" else ""
    tied = "tied" if config.tie_word_embeddings else "input and output"
    at = f"at {cost.context:,} tokens of context"
    table = Table(name, ["", ""], left=2)
    table.add(
        "blocks", f"{config.num_hidden_layers} × {H}, {heads} heads of {config.head_dim}, {groups} for keys"
    )
    table.add("dense feed-forward", f"{config.intermediate_size}, {config.activation}")
    table.add("MoE layers", f"{len(layers)} (blocks {first})")
    experts = f"{config.num_experts} of width {config.moe_intermediate_size}{shared}"
    table.add("experts", f"{experts}, {_selection(config)}")
    table.add("router", f"{config.router}{rank}, α = {config.alpha}")
    table.add("vocabulary", f"{config.vocab_size:,}, {tied}")
    table.end_section()
    table.add("parameters", short(cost.total))
    table.add("  active per token", f"{short(cost.active)} at most")
    table.add("  routed experts", f"{short(cost.experts)} ({cost.experts / cost.total:.1%})")
    table.add("  routers", f"{short(cost.router)} ({cost.router_share:.2%})")
    table.add("  embeddings", f"{short(cost.embedding)} ({cost.embedding_share:.1%})")
    table.add("weights in bf16", f"{cost.weight_bytes / 1e9:.3g} GB, routers in fp32")
    table.end_section()
    table.add("FLOPs per token, forward", f"{short(cost.forward_flops)} {at}")
    training = f"{short(cost.train_flops)} {at}; 6N: {short(cost.train_flops_6n)}"
    table.add("FLOPs per token, training", training)
    return table


def _selection(config: GrmoeConfig) -> str:
    policy = config.selection_policy()
    if policy is None or config.selection == "dense":
        return "its own choice" if policy is None else "all of them"
    if config.selection == "topk":
        return f"top-{config.num_experts_per_tok}"
    return f"{config.selection} {config.selection_tau:g}, at most {config.num_experts_per_tok}"


def short(value: float) -> str:
    """1234567 → '1.235 M'."""
    if value < 1000:
        return f"{value:g}"
    power = min(4, int(math.log10(value)) // 3)
    return f"{value / 1000**power:.4g} {' kMGT'[power]}"
