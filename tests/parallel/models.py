"""A model small enough for many processes on one machine, a batch for it, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.parallel.shard import accumulate, finish_gradients
from grmoe.parallel.world import World, mean
from grmoe.routing import set_draw

ALONE = World(0, 1, 0, torch.device("cpu"), None)
VOCABULARY = 61  # no number of processes divides it


def tiny_config(**changes: Any) -> GrmoeConfig:
    """A dense block and one with experts.

    Weights and κ start larger than usual, so that all gradients are far above the tolerances.
    """
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_experts": 4,
        "router_rank": 3,
        "router_kappa": 4.0,
        "initializer_range": 0.3,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }
    return GrmoeConfig(**{**options, **changes})


def tiny(**changes: Any) -> GrmoeForCausalLM:
    """The same weights everywhere."""
    torch.manual_seed(0)
    return GrmoeForCausalLM(tiny_config(**changes)).train()


def batch(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (rows, 12), generator=torch.Generator().manual_seed(seed))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def backward(model: GrmoeForCausalLM, world: World, rows: Tensor, micro_batches: int = 1) -> Tensor:
    """Gradients of the mean loss over all processes, each taking its part of `rows`; returns that loss."""
    own = rows.chunk(world.size)[world.rank]
    total = torch.zeros(())
    for number, part in enumerate(own.chunk(micro_batches)):
        accumulate(model, world, last=number == micro_batches - 1)
        set_draw(model, 7, world.rank * len(own) + number * len(part))  # for models with random budgets
        loss = model(input_ids=part, labels=part).loss / micro_batches
        loss.backward()
        total += loss.detach()
    finish_gradients(model, world)
    return mean(world, total)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
