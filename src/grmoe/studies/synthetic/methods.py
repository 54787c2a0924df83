"""The rows of the synthetic table: how each method's router is built, and what the paper reports for it.

Every method has the same experts, tokens, steps, schedule and learning rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from grmoe.routing import Router, build_router
from grmoe.studies.synthetic.training import Training


@dataclass(frozen=True)
class PaperRow:
    """What the paper's table says (easy setting): accuracy %, CV, collapse %, entropy."""

    accuracy: float
    cv: float
    collapse: float
    entropy: float


@dataclass(frozen=True)
class Method:
    key: str
    title: str
    router: str  # name in grmoe.routing.ROUTERS
    options: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    supervised: bool = False
    paper: PaperRow | None = None

    def builder(self, dim: int, num_experts: int, rank: int, batch: int) -> Callable[[int], Router]:
        """A function from a seed to a router."""
        options = dict(self.options)
        if self.router == "grassmann":
            options["rank"] = rank
        if self.router == "soft_moe":
            options["slots"] = max(
                1, batch // num_experts
            )  # as many slots as tokens, as the method's authors do

        def build(seed: int) -> Router:
            torch.manual_seed(seed)  # amortisers initialise from the global generator
            if self.router == "hash":
                return build_router("hash", dim, num_experts, seed=0)
            generator = torch.Generator().manual_seed(seed)
            return build_router(self.router, dim, num_experts, generator=generator, **options)

        return build

    def configure(self, base: Training) -> Training:
        return replace(base, **self.training)


_GRASSMANN = {"kappa": 1.0}

METHODS = (
    Method(
        "softmax_top1",
        "Softmax top-1",
        "softmax",
        {"top_k": 1},
        paper=PaperRow(82.4, 0.312, 36, 1.02),
    ),
    Method("softmax_top2", "Softmax top-2", "softmax", {"top_k": 2}),
    Method("switch", "Switch", "switch", paper=PaperRow(85.1, 0.187, 22, 1.41)),
    Method(
        "expert_choice",
        "Expert Choice",
        "expert_choice",
        {"capacity_factor": 2.0},
        paper=PaperRow(84.7, 0.042, 0, 1.89),
    ),
    Method("hash", "Hash", "hash", paper=PaperRow(71.2, 0.031, 0, 2.08)),
    Method("soft_moe", "Soft MoE", "soft_moe", paper=PaperRow(86.8, 0.095, 8, 1.55)),
    Method("vmf", "vMF gate", "vmf", paper=PaperRow(86.3, 0.178, 18, 1.38)),
    Method("grmoe", "GrMoE", "grassmann", _GRASSMANN, paper=PaperRow(91.7, 0.058, 0, 1.52)),
    Method(
        "grmoe_amortized",
        "GrMoE + amortiser",
        "grassmann",
        {**_GRASSMANN, "amortizer": "affinity"},
        paper=PaperRow(90.8, 0.051, 0, 1.48),
    ),
    # Beside the paper's rows: its gate with its own prior, and what labels could teach a linear gate.
    Method("grmoe_paper_prior", "GrMoE, paper's prior", "grassmann", {**_GRASSMANN, "prior": "paper"}),
    Method("supervised", "Linear, with labels", "softmax", {"top_k": 1}, supervised=True),
)


def find_methods(keys: list[str] | None) -> list[Method]:
    """Methods by key, in table order; all of them for None."""
    known = {m.key: m for m in METHODS}
    unknown = [k for k in keys or [] if k not in known]
    if unknown:
        raise ValueError(f"method must be one of {', '.join(known)}, got {', '.join(unknown)}")
    return [m for m in METHODS if keys is None or m.key in keys]
