"""Memory of one process in a training step, from shapes alone. The names are those of `cost.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from grmoe.head import TOKENS
from grmoe.layer import MoE
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.model.modeling_grmoe import GrmoeForCausalLM
from grmoe.optim import GrassmannAdam, split_parameters
from grmoe.parallel.cost import FP32, Group, Plan, groups
from grmoe.routing import all_routers, routers


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the process that holds the most. The first four are exact, the next three are estimates."""

    weights: int
    """fp32 shards."""
    gradients: int
    """fp32 shards."""
    moments: int
    """The two of AdamW, fp32 shards."""
    routers: int
    """Weights, gradients, moments and workspace of the routers, which are not sharded."""
    gathered: int
    activations: int
    logits: int
    start: int
    """The largest amount while the model is built, before the first step."""

    @property
    def total(self) -> int:
        return sum(value for name, value in vars(self).items() if name != "start")


def memory(model: GrmoeForCausalLM, plan: Plan) -> Memory:
    """The largest number of bytes that a process holds during a step.

    routers      4 bytes per weight and 4 per gradient, 8 for AdamW's moments of κ; for a frame of D × k a momentum, one
                 second moment and a k × k matrix, and GrassmannAdam's workspace of all frames
    gathered     in the backward: 2c per weight of the root (the weight, and the gradient that waits for the part of the
                 embedding) and 3c + 4 per weight of the largest block: its weights, its gradient, the weights of the
                 next block, and the buffer for reducing its gradient. With several micro-batches also 4 for the
                 gradient of every weight that a process computes with
    activations  see `block_activations`
    logits       c per token and word, for at most 16384 tokens (see `grmoe.head`), and 4 per weight of the output
                 matrix for its gradient
    start        4 per weight of the shards, the routers, the embedding, and the largest block or, if larger, the head
    """
    c, parts = plan.compute_bytes, groups(model, plan)
    shard, whole = sum(g.shard for g in parts), sum(g.whole for g in parts)
    root = parts[-1].whole
    busy = max(root * FP32, max(_blocks(parts)) * (3 * c + FP32))
    waiting = FP32 * whole if plan.micro_batches > 1 else 0
    tokens = plan.tokens // plan.micro_batches
    per_token = routers(model)[0].experts_per_token(plan.length)
    config = model.config
    each = [block_activations(config, i, plan, per_token) for i in range(config.num_hidden_layers)]
    kept = len(each) * config.hidden_size * c + max(each) if plan.checkpointing else sum(each)
    return Memory(
        weights=FP32 * shard,
        gradients=FP32 * shard,
        moments=2 * FP32 * shard,
        routers=_router_bytes(model),
        gathered=root * 2 * c + busy + waiting,
        activations=tokens * kept,
        logits=model.config.vocab_size * (min(tokens, TOKENS) * c + model.config.hidden_size * FP32),
        start=FP32 * (shard + _start(model, plan)),
    )


def block_activations(config: GrmoeConfig, index: int, plan: Plan, experts_per_token: float) -> int:
    """Estimate of the bytes per token that block `index` keeps for its backward.

    In numbers of c bytes: the residual stream and its normalised form, twice (4D); queries, attention outputs, keys and
    values; the inner width three times for SwiGLU (gate, up, product) and twice for GELU. A MoE layer has the inner
    width for K rows, and the rows before and after (with divided experts also the rows that came back). In fp32 the
    logits, gate and weights of the router. Fused norms and activations keep this much; eager PyTorch up to twice.
    """
    assert config.head_dim is not None
    assert config.num_key_value_heads is not None
    D, inner = config.hidden_size, 3 if config.activation == "swiglu" else 2
    numbers = 4 * D + 2 * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    if index not in config.moe_layers:
        assert config.intermediate_size is not None
        return plan.compute_bytes * (numbers + inner * config.intermediate_size)
    assert config.moe_intermediate_size is not None
    rows = (3 if plan.expert > 1 else 2) * D
    each = rows + inner * config.moe_intermediate_size
    many = experts_per_token * each + inner * config.shared_experts * config.moe_intermediate_size
    return round(plan.compute_bytes * (numbers + many)) + 3 * FP32 * config.gate_experts


def _start(model: GrmoeForCausalLM, plan: Plan) -> int:
    """Elements beside the shards while `build_model` builds the largest block or the head.

    A block is complete, with all its experts, while it is being sharded. With both `expert` and `fsdp`, the share of a
    process in a stack of experts exists before FSDP shards it further.
    """
    layers = model.model.layers
    routed = sum(p.numel() for router in all_routers(model) for p in router.parameters())
    words = model.lm_head.weight.numel()
    block = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    if plan.expert > 1 and plan.fsdp > 1:
        stacks = (layer.mlp.experts.up for layer in layers if isinstance(layer.mlp, MoE))
        block += max(stack.numel() for stack in stacks) // plan.expert
    return routed + words + max(words, block)


def _blocks(parts: Iterable[Group]) -> Iterator[int]:
    """Gathered elements of each block, including its experts."""
    experts = 0
    for group in parts:
        if group.kind == "experts":
            experts = group.whole
        elif group.kind == "block":
            yield group.whole + experts
            experts = 0


def _router_bytes(model: GrmoeForCausalLM) -> int:
    split = split_parameters(model)
    frames = [p for group in split.frame_groups for p in group["params"]]
    parameters = {p for router in all_routers(model) for p in router.parameters()}
    states = (GrassmannAdam.initial_state(p).items() for p in frames)
    state = sum(t.nbytes for items in states for key, t in items if key != "step")
    every, framed = sum(p.numel() for p in parameters), sum(p.numel() for p in frames)
    return FP32 * (2 * every + 2 * (every - framed) + framed) + state
