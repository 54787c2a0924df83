"""The cost of a model: parameters, arithmetic and memory, counted on the meta device, where nothing is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from grmoe.model.block_grmoe import GrmoeMoE
from grmoe.model.choices_grmoe import SLOT_ROUTERS
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.model.modeling_grmoe import GrmoeForCausalLM
from grmoe.routing import Router, SlotRouter, all_routers
from grmoe.routing.amortizer import AMORTIZERS, amortizer_sizes
from grmoe.tables import Table


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Parameters are numbers of weights. FLOPs are per token; a multiplication and an addition count as two."""

    total: int
    """All parameters."""
    active: int
    """Parameters used per token with `experts_per_token` experts, embeddings included."""
    experts: int
    """Parameters of the routed experts."""
    experts_per_token: float
    """Routed experts computed per token: the budget, if there is one. Soft MoE: slots per token. With "mass",
    "at_least", "threshold" and identity experts an upper bound."""
    router: int
    """Parameters of the routers."""
    embedding: int
    """Parameters of input and output embeddings; one matrix where they are tied."""
    context: int
    """Tokens of context that the FLOPs are counted at."""
    forward_flops: float
    """Products with weights, attention over a causal context, and Soft MoE's mixing."""
    train_flops: float
    """Three times `forward_flops`, because the backward computes two products for each."""
    train_flops_per_expert: float
    """What one more routed expert per token in every MoE layer adds to `train_flops`."""
    train_flops_6n: int
    """The usual 6·N, N the weights in products: no attention over positions, no mixing."""
    weight_bytes: int
    """Bytes of the weights in bf16, with routers in fp32."""

    def train_flops_at(self, experts_per_token: float) -> float:
        """`train_flops` where this many routed experts are computed per token, the mean over MoE layers."""
        return self.train_flops + self.train_flops_per_expert * (experts_per_token - self.experts_per_token)

    @property
    def router_share(self) -> float:
        return self.router / self.total

    @property
    def embedding_share(self) -> float:
        return self.embedding / self.total


def meta_model(config: GrmoeConfig) -> GrmoeForCausalLM:
    """The model's shapes, without memory."""
    with torch.device("meta"):
        return GrmoeForCausalLM(config)


def parameters(config: GrmoeConfig) -> int:
    """The number of parameters, from the sizes alone. Nothing is built. Options of a router may add a few."""
    assert config.head_dim is not None
    assert config.num_key_value_heads is not None
    assert config.intermediate_size is not None
    assert config.moe_intermediate_size is not None
    D, N, blocks = config.hidden_size, config.num_experts, config.num_hidden_layers
    heads, groups = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    biases = heads + 2 * groups + D if config.attention_bias else 0
    block = 2 * D * (heads + groups) + biases + 2 * D  # queries and output, keys and values; two norms
    if config.attention_heads_per_token is not None:
        block += config.num_attention_heads * (D * (config.router_rank or 0) + 1)
    matrices = 3 if config.activation == "swiglu" else 2
    experts = matrices * D * config.moe_intermediate_size * (N + config.shared_experts)
    moe, tables = len(config.moe_layers), 1 if config.tie_word_embeddings else 2
    dense = matrices * D * config.intermediate_size * (blocks - moe)
    return tables * config.vocab_size * D + D + blocks * block + dense + (experts + _router(config)) * moe


def _router(config: GrmoeConfig) -> int:
    """Parameters of one router, at least: frames and κ, slots, or one vector per expert."""
    D, N, options = config.hidden_size, config.gate_experts, config.router_options or {}
    if config.router == "hash":
        return 0
    if config.router in SLOT_ROUTERS:
        slots = options.get("slots") or options.get("max_tokens", config.max_position_embeddings) // N
        total = N * max(1, slots)
        return D * total + 1 if config.router == "soft_moe" else (D * options.get("slot_rank", 1) + 1) * total
    if config.router != "grassmann":
        return N * D + (N if config.router == "vmf" else 0)
    frames = N * D * (config.router_rank or 0) + N
    kind, hidden = options.get("amortizer"), options.get("amortizer_hidden", 64)
    if kind not in AMORTIZERS:
        return frames
    inputs, outputs = amortizer_sizes(kind, D, N)
    return frames + (inputs + 1) * hidden + (hidden + 1) * outputs


def count(config: GrmoeConfig, context: int | None = None) -> Cost:
    """The cost at `context` tokens per sequence. Default: the longest the model is made for.

    A token attends to (context + 1)/2 keys on average, itself included; each costs 2·2·heads·head_dim per block.
    Experts per token are the router's own count: K, Expert Choice's capacity, Soft MoE's slots per token. With "mass"
    and "threshold" K is an upper bound.
    """
    model = meta_model(config)
    context = config.max_position_embeddings if context is None else context
    total = sum(p.numel() for p in model.parameters())  # a tied parameter appears once
    router = sum(p.numel() for r in all_routers(model) for p in r.parameters())
    blocks = [m for m in model.modules() if isinstance(m, GrmoeMoE)]
    experts = sum(p.numel() for block in blocks for p in block.experts.parameters())
    per_token = _per_token(config, blocks[0].router, context)
    assert config.head_dim is not None
    unused, mixing = _soft_moe(blocks[0].router, context)
    active = round(total - experts + experts * per_token / config.num_experts - len(blocks) * unused)
    table = config.vocab_size * config.hidden_size
    embedding = table if config.tie_word_embeddings else 2 * table
    # A look-up multiplies nothing; the output matrix does, tied or not. Norms and κ take no part in products.
    vectors = sum(p.numel() for p in model.parameters() if p.ndim <= 1)
    multiplied = active - vectors - (0 if config.tie_word_embeddings else table)
    keys = (context + 1) / 2
    attention = 4 * config.num_attention_heads * config.head_dim * keys * config.num_hidden_layers
    forward = 2 * multiplied + attention + len(blocks) * mixing
    return Cost(
        total=total,
        active=active,
        experts=experts,
        experts_per_token=per_token,
        router=router,
        embedding=embedding,
        context=context,
        forward_flops=forward,
        train_flops=3 * forward,
        train_flops_per_expert=6 * experts / config.num_experts,
        train_flops_6n=6 * multiplied,
        weight_bytes=2 * (total - router) + 4 * router,
    )


def _per_token(config: GrmoeConfig, router: Router, context: int) -> float:
    """The budget in use, or what the trained selection gives. The router itself has room for larger budgets."""
    if config.budget is not None:
        return config.budget
    if config.selection_policy() is None or config.num_experts_per_tok is None:
        return router.experts_per_token(context)
    return float(config.num_experts_per_tok)


def _soft_moe(router: Router, tokens: int) -> tuple[int, float]:
    """(slot weights that a sequence of `tokens` does not use, FLOPs per token of mixing tokens and slots)."""
    if not isinstance(router, SlotRouter):
        return 0, 0.0
    used = router.slots_for(tokens)
    rows = router.num_experts * used
    unused = router.num_experts * (router.slots - used) * router.dim * getattr(router, "rank", 1)
    return unused, 2 * 2 * rows * router.dim


def describe(name: str, config: GrmoeConfig, cost: Cost) -> Table:
    """The table that `grmoe info` prints."""
    H, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    layers = config.moe_layers
    first = ", ".join(map(str, layers[:3])) + (", …" if len(layers) > 3 else "")
    shared = f" + {config.shared_experts} shared" if config.shared_experts else ""
    rank = f", rank {config.router_rank}" if config.router == "grassmann" else ""
    tied = "tied" if config.tie_word_embeddings else "input and output"
    at = f"at {cost.context:,} tokens of context"
    table = Table(name, ["", ""], left=2)
    attention = f"{heads} heads of {config.head_dim}, {groups} for keys"
    if config.attention_heads_per_token is not None:
        attention += f", {config.attention_heads_per_token} per token (all are computed)"
    table.add("blocks", f"{config.num_hidden_layers} × {H}, {attention}")
    table.add("dense feed-forward", f"{config.intermediate_size}, {config.activation}")
    table.add("MoE layers", f"{len(layers)} (blocks {first}, counted from 0)")
    identity = f" + {config.identity_experts} identity" if config.identity_experts else ""
    experts = f"{config.num_experts} of width {config.moe_intermediate_size}{shared}{identity}"
    table.add("experts", f"{experts}, {_selection(config, cost)}")
    table.add("router", f"{config.router}{rank}, α = {config.alpha}")
    if config.budget_range is not None:
        low, high = config.budget_range
        now = "as trained" if config.budget is None else f"{config.budget:g}"
        table.add("budget", f"{now}, calibrated from {low:g} to {high:g} experts per token")
    table.add("vocabulary", f"{config.vocab_size:,}, {tied}")
    table.end_section()
    table.add("parameters", short(cost.total))
    bounded = (
        config.selection in ("mass", "at_least", "threshold")
        or config.router == "switch"
        or config.identity_experts
    )
    bound = ", at most" if bounded and config.budget is None else ""
    table.add("  active per token", f"{short(cost.active)}{bound}")
    table.add("  routed experts", f"{short(cost.experts)} ({cost.experts / cost.total:.1%})")
    table.add("  routers", f"{short(cost.router)} ({cost.router_share:.2%})")
    table.add("  embeddings", f"{short(cost.embedding)} ({cost.embedding_share:.1%})")
    table.add("weights in bf16", f"{short(cost.weight_bytes)}B, routers in fp32")
    table.end_section()
    table.add("FLOPs per token, forward", f"{short(cost.forward_flops)} {at}")
    training = f"{short(cost.train_flops)} {at}; 6N: {short(cost.train_flops_6n)}"
    table.add("FLOPs per token, training", training)
    return table


def _selection(config: GrmoeConfig, cost: Cost) -> str:
    if config.selection_policy() is None:
        return f"its own choice, {cost.experts_per_token:.3g} per token"
    if config.selection == "dense":
        return "all of them"
    if config.selection == "topk":
        return f"top-{config.num_experts_per_tok}"
    return f"{config.selection} {config.selection_tau:g}, at most {config.num_experts_per_tok}"


def short(value: float) -> str:
    """1234567 → '1.235 M'."""
    if value < 1000:
        return f"{value:g}"
    power = min(4, int(math.log10(value)) // 3)
    return f"{value / 1000**power:.4g} {' kMGT'[power]}"
