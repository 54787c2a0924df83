"""The pruned model as a consistent model of its own: a smaller configuration, and weights of the right shapes."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from grmoe.model import GrmoeForCausalLM
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.routing import Threshold


@dataclass(frozen=True)
class Size:
    """Size of a model."""

    parameters: int
    bytes: int
    """Of the weights, as they would be saved."""


def size(model: nn.Module) -> Size:
    """Parameters (tied ones once), and bytes including saved buffers."""
    parameters = list(model.parameters())
    counted = {id(p) for p in parameters}
    buffers = [t for t in model.state_dict(keep_vars=True).values() if id(t) not in counted]
    return Size(sum(p.numel() for p in parameters), sum(t.nbytes for t in [*parameters, *buffers]))


def small_config(config: GrmoeConfig, experts: int) -> GrmoeConfig:
    """The configuration with fewer experts, and everything that depends on their number."""
    small = copy.deepcopy(config)
    small.num_experts = experts
    small.budget = small.budget_curve = None  # a curve belongs to the experts it was calibrated with
    if config.selection == "dense":
        small.num_experts_per_tok = experts
    elif config.selection == "threshold":
        assert config.selection_tau is not None
        small.num_experts_per_tok = Threshold(config.selection_tau).max_experts(experts)
    options = dict(config.router_options or {})
    if options.get("prior", "balanced") != "balanced":  # `reduce_router` made it a learned one
        small.router_options = options | {"prior": "balanced"}
    small.check()
    return small


def small_model(model: GrmoeForCausalLM, experts: int) -> GrmoeForCausalLM:
    """A new model with fewer experts, from one in which `PrunableLayer.install` put smaller layers."""
    small = GrmoeForCausalLM(small_config(model.config, experts))
    nn.Module.to(small, device=model.device, dtype=model.dtype)  # routers stay in fp32
    small.load_state_dict(model.state_dict())
    return small.eval()
