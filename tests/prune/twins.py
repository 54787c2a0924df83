"""Untrained models with two equal experts (twins). Merging the twins must change nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grmoe.geometry import haar_frames
from grmoe.model import GrmoeForCausalLM
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.probe.routing import moe_layers
from grmoe.routing import GrassmannRouter, SoftmaxRouter, VMFRouter

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "moe_every": 1,
    "num_experts": 4, "max_position_embeddings": 32,
}  # fmt: skip
TWINS = (1, 3)


def untrained(seed: int = 0, **fields: Any) -> GrmoeForCausalLM:
    """A model with larger weights than at the start of training, so that experts and gates differ clearly."""
    torch.manual_seed(seed)
    model = GrmoeForCausalLM(GrmoeConfig(**SIZES | {"vocab_size": 50, "router_rank": 4} | fields)).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in moe_layers(model):
            layer.experts.up.copy_(torch.randn(layer.experts.up.shape, generator=draw) / 3)
            layer.experts.down_proj.copy_(torch.randn(layer.experts.down_proj.shape, generator=draw) / 3)
            layer.router.log_prior.copy_(torch.randn(4, generator=draw) / 3)
            for parameter in (getattr(layer.router, n, None) for n in ("log_kappa", "mu")):
                if parameter is not None:
                    parameter += torch.randn(parameter.shape, generator=draw) / 3
    return model


@torch.no_grad()
def make_twins(model: GrmoeForCausalLM, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Expert 3 becomes expert 1 with its units in another order (and signs), its frame turned in its own subspace.

    It keeps its own prior. Returns order and signs of each layer: unit r of expert 1 is unit order[r] of expert 3.
    """
    draw = torch.Generator().manual_seed(seed)
    a, b = TWINS
    made = []
    for layer in moe_layers(model):
        router, experts = layer.router, layer.experts
        if isinstance(router, GrassmannRouter):
            turn = haar_frames(router.rank, router.rank, generator=draw)
            if router.log_kappa.ndim == 2:  # λ along the columns: they can only change places
                turn = torch.eye(router.rank)[torch.randperm(router.rank, generator=draw)]
                router.log_kappa[b] = router.log_kappa[a] @ turn
            else:
                router.log_kappa[b] = router.log_kappa[a]
            router.frames[b] = router.frames[a] @ turn
            if router.mu is not None:
                router.mu[b] = router.mu[a]
        else:
            assert isinstance(router, SoftmaxRouter | VMFRouter)
            router.weight[b] = router.weight[a]
            if isinstance(router, VMFRouter):
                router.log_kappa[b] = router.log_kappa[a]
        I = experts.hidden
        order, sign = torch.randperm(I, generator=draw), torch.ones(I)
        if experts.activation == "swiglu":
            sign = torch.randint(0, 2, (I,), generator=draw) * 2.0 - 1
            gate, linear = experts.up[a].chunk(2)
            experts.up[b, order] = gate
            experts.up[b, I + order] = sign[:, None] * linear
        else:
            experts.up[b, order] = experts.up[a]
        experts.down_proj[b][:, order] = sign * experts.down_proj[a]
        made.append((order, sign))
    return made


def tokens(count: int = 512, seed: int = 2) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))
