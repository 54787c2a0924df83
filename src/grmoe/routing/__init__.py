"""Routers: one contract (`Router`, `Routing`), one file per router, selection policies apart from gating."""

from __future__ import annotations

from typing import Any

from grmoe import checks
from grmoe.routing.base import Router, read_metrics_of
from grmoe.routing.controls import (
    all_routers,
    routers,
    set_alpha,
    set_balances,
    set_draw,
    set_elastic,
    set_entropy,
    set_layer_numbers,
    set_leading,
    uncounted,
    update_priors,
)
from grmoe.routing.curve import LayerNumbers, check_curve, curve_loss, curve_numbers, curve_room
from grmoe.routing.elastic import FULL, Elastic, step_key
from grmoe.routing.entropy import EntropyTerm, gate_entropy
from grmoe.routing.expert_choice import ExpertChoiceRouter
from grmoe.routing.frames import FrameRouter
from grmoe.routing.grassmann import GrassmannRouter, grassmann_logits_reference
from grmoe.routing.grassmann_soft_moe import GrassmannSoftMoERouter, grassmann_soft_moe_reference
from grmoe.routing.hash import HashRouter
from grmoe.routing.heads import HeadRouter
from grmoe.routing.leading import leading_loss
from grmoe.routing.linear import LinearRouter
from grmoe.routing.metrics import RoutingMetrics
from grmoe.routing.result import Routing, SlotMixing
from grmoe.routing.selection import BY_RANK, AtLeast, Dense, Mass, Selection, Threshold, TopK
from grmoe.routing.soft_moe import SlotRouter, SoftMoERouter
from grmoe.routing.softmax import SoftmaxRouter, load_balancing_loss
from grmoe.routing.switch import SwitchRouter
from grmoe.routing.vmf import VMFRouter

ROUTERS: dict[str, type[Router]] = {
    "grassmann": GrassmannRouter,
    "softmax": SoftmaxRouter,
    "switch": SwitchRouter,
    "expert_choice": ExpertChoiceRouter,
    "hash": HashRouter,
    "soft_moe": SoftMoERouter,
    "grassmann_soft_moe": GrassmannSoftMoERouter,
    "vmf": VMFRouter,
}


def build_router(name: str, dim: int, num_experts: int, **options: Any) -> Router:
    """A router by name, for configuration files: `build_router("grassmann", 768, 8, rank=48)`."""
    checks.one_of("router", name, tuple(ROUTERS))
    return ROUTERS[name](dim, num_experts, **options)


__all__ = [
    "BY_RANK",
    "FULL",
    "ROUTERS",
    "AtLeast",
    "Dense",
    "Elastic",
    "EntropyTerm",
    "ExpertChoiceRouter",
    "FrameRouter",
    "GrassmannRouter",
    "GrassmannSoftMoERouter",
    "HashRouter",
    "HeadRouter",
    "LayerNumbers",
    "LinearRouter",
    "Mass",
    "Router",
    "Routing",
    "RoutingMetrics",
    "Selection",
    "SlotMixing",
    "SlotRouter",
    "SoftMoERouter",
    "SoftmaxRouter",
    "SwitchRouter",
    "Threshold",
    "TopK",
    "VMFRouter",
    "all_routers",
    "build_router",
    "check_curve",
    "curve_loss",
    "curve_numbers",
    "curve_room",
    "gate_entropy",
    "grassmann_logits_reference",
    "grassmann_soft_moe_reference",
    "leading_loss",
    "load_balancing_loss",
    "read_metrics_of",
    "routers",
    "set_alpha",
    "set_balances",
    "set_draw",
    "set_elastic",
    "set_entropy",
    "set_layer_numbers",
    "set_leading",
    "step_key",
    "uncounted",
    "update_priors",
]
