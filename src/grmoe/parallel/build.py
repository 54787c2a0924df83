"""Build a model in shards: a process holds its shards, the embedding and one block, but never the whole model.

The weights are bit for bit those of `GrmoeForCausalLM(config)` from the same random state on one process with the same
kind of device. That constructor draws random numbers twice. First the constructors of embedding and blocks draw their
weights. Then `_init_weights` draws all of them again, in the same order, and the head last. Only routers keep the first
draw. So this module first draws all blocks, one at a time, and keeps only their routers. Then each block gets memory,
weights and sharding before the next one gets memory.
"""

from __future__ import annotations

import torch
from torch import nn

from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.model.block_grmoe import GrmoeDecoderLayer
from grmoe.model.count import meta_model
from grmoe.model.pretrained_grmoe import GrmoePreTrainedModel
from grmoe.parallel.shard import Sharding
from grmoe.parallel.world import World
from grmoe.routing import Router


def build_model(config: GrmoeConfig, world: World, bf16: bool = False) -> GrmoeForCausalLM:
    """The model on its device, with the weights of the current random state, sharded as `shard` does it."""
    if world.mesh is None:
        with torch.device(world.device):
            return GrmoeForCausalLM(config)
    model = meta_model(config)  # allocates no memory, draws no random numbers
    body, blocks, head = model.model, list(model.model.layers), model.lm_head
    sharding = Sharding(model.config, world.mesh, bf16)

    body.embed_tokens.to_empty(device=world.device)
    body.embed_tokens.reset_parameters()
    drawn = [_drawn_routers(model.config, index, world.device) for index in range(len(blocks))]

    _initialise(body, body.embed_tokens, world.device)
    for block, routers in zip(blocks, drawn, strict=True):
        block.to_empty(device=world.device)
        for name, router in routers.items():
            block.get_submodule(name.removesuffix(".router")).router = router
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


def _drawn_routers(config: GrmoeConfig, index: int, device: torch.device) -> dict[str, Router]:
    """Draw what the constructor of a block draws, and keep its routers, by name: of experts, of heads."""
    with torch.device(device):
        block = GrmoeDecoderLayer(config, index)
    return {name: module for name, module in block.named_modules() if isinstance(module, Router)}


def _initialise(model: GrmoePreTrainedModel, piece: nn.Module, device: torch.device) -> None:
    """Do to one piece what `model.initialize_weights` does, on the device of the model."""
    with torch.device(device):
        piece.apply(model._initialize_weights)
