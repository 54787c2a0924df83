"""A model that is built in shards: a process holds its own, the embedding and one block, never the whole.

Its weights are to the bit those of `GrmoeForCausalLM(config)` from the same random state on one process with the same
kind of device. That constructor draws twice: embedding and blocks as their own constructors start them, then, in the
same order, `_init_weights` over all that; the head comes last. Routers alone keep what was drawn first. So here, too,
all blocks are drawn, one at a time, and dropped but for their routers; then each gets memory, its weights and its
division before the next has any.
"""

from __future__ import annotations

import torch
from torch import nn

from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.model.count import meta_model
from grmoe.model.modeling_grmoe import GrmoeDecoderLayer, GrmoeMoE, GrmoePreTrainedModel
from grmoe.parallel.shard import Sharding
from grmoe.parallel.world import World
from grmoe.routing import Router


def build_model(config: GrmoeConfig, world: World, bf16: bool = False) -> GrmoeForCausalLM:
    """The model on its device, as the random state gives it, and as `shard` would divide it."""
    if world.mesh is None:
        with torch.device(world.device):
            return GrmoeForCausalLM(config)
    model = meta_model(config)  # no memory, no draws
    body, blocks, head = model.model, list(model.model.layers), model.lm_head
    sharding = Sharding(model.config, world.mesh, bf16)

    body.embed_tokens.to_empty(device=world.device)
    body.embed_tokens.reset_parameters()
    routers = [_drawn_router(model.config, index, world.device) for index in range(len(blocks))]

    _initialise(body, body.embed_tokens, world.device)
    for block, router in zip(blocks, routers, strict=True):
        block.to_empty(device=world.device)
        if router is not None:
            block.mlp.router = router
        _initialise(body, block, world.device)
        sharding.block(block, last=block is blocks[-1])
    for rest in (body.norm, body.rotary_emb):
        rest.to_empty(device=world.device)
        _initialise(body, rest, world.device)

    head.to_empty(device=world.device)
    head.reset_parameters()
    _initialise(model, head, world.device)
    model.tie_weights()
    sharding.root(model)
    return model


def _drawn_router(config: GrmoeConfig, index: int, device: torch.device) -> Router | None:
    """All that a block's constructor draws, and what remains of it."""
    with torch.device(device):
        mlp = GrmoeDecoderLayer(config, index).mlp
    return mlp.router if isinstance(mlp, GrmoeMoE) else None


def _initialise(model: GrmoePreTrainedModel, piece: nn.Module, device: torch.device) -> None:
    """What `model.initialize_weights` does to one piece, on the device the model is built on."""
    with torch.device(device):
        piece.apply(model._initialize_weights)
