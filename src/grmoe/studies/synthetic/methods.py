"""The rows of the synthetic table: how each method's router is built, and the paper's figures for it.

Every method has the same experts, tokens, steps and schedule, and chooses among the same learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grmoe import checks
from grmoe.routing import Router, TopK, build_router
from grmoe.studies.synthetic.training import Overlap


@dataclass(frozen=True)
class PaperRow:
    """The paper's figures; None where it states none."""

    accuracy: float
    """Per cent."""
    cv: float | None = None
    collapse: float | None = None
    """Per cent of seeds."""
    entropy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table."""

    key: str
    """Name on the command line."""
    title: str
    """Name in the table."""
    router: str
    """Name in `grmoe.routing.ROUTERS`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the router."""
    supervised: bool = False
    """Train the gate on the labels."""
    overlap: Overlap | None = None
    """Overlap penalty in the objective."""
    paper: dict[str, PaperRow] = field(default_factory=dict)
    """The paper's figures by setting: its table (easy) and its text (hard)."""

    def builder(self, dim: int, num_experts: int, rank: int, batch: int) -> Callable[[int], Router]:
        """A function from a seed to a router."""
        options = dict(self.options)
        if "selection" in options:
            options["selection"] = TopK(**options["selection"])
        if self.router == "grassmann":
            options["rank"] = rank
        if self.router == "soft_moe":
            options["slots"] = max(1, batch // num_experts)  # as many slots as tokens, as its authors do

        def build(seed: int) -> Router:
            torch.manual_seed(seed)  # amortisers initialise from the global generator
            if self.router == "hash":
                return build_router("hash", dim, num_experts, seed=0)
            generator = torch.Generator().manual_seed(seed)
            return build_router(self.router, dim, num_experts, generator=generator, **options)

        return build


_GRASSMANN = {"kappa": 1.0}
_PAPER_PRIOR = {**_GRASSMANN, "prior": "paper"}
_PAPER_GATE = {**_PAPER_PRIOR, "scaling": "raw"}  # κ‖Uᵀx‖², as the paper writes it
_TOP2 = {"k": 2, "renormalize": False}
_TOP2_RENORMALIZED = {"k": 2, "renormalize": True}
# The paper's hinge ρ₀ = 0.3 lies above the overlap k/d = 0.125 of random frames. The other one lies below.
_PAPER_HINGE = Overlap(rho=0.3)
_LOW_HINGE = Overlap(rho=0.5, relative=True)
_SOFTMAX_ROW = {"easy": PaperRow(82.4, 0.312, 36, 1.02), "hard": PaperRow(68.1, collapse=62)}
_GRMOE_ROW = {"easy": PaperRow(91.7, 0.058, 0, 1.52), "hard": PaperRow(78.3, collapse=0)}

METHODS = (
    Method(
        key="softmax_top1",
        title="Softmax top-1",
        router="softmax",
        options={"top_k": 1},
        paper=_SOFTMAX_ROW,
    ),
    # softmax(Wx + noise), as in the paper's background. It states no size of the noise; here it is standard normal.
    Method(
        key="softmax_noise",
        title="Softmax top-1 + noise",
        router="softmax",
        options={"top_k": 1, "noise": 1.0},
        paper=_SOFTMAX_ROW,
    ),
    Method(key="softmax_top2", title="Softmax top-2", router="softmax", options={"top_k": 2}),
    Method(key="switch", title="Switch", router="switch", paper={"easy": PaperRow(85.1, 0.187, 22, 1.41)}),
    Method(
        key="expert_choice",
        title="Expert Choice",
        router="expert_choice",
        options={"capacity_factor": 2.0},
        paper={"easy": PaperRow(84.7, 0.042, 0, 1.89)},
    ),
    Method(key="hash", title="Hash", router="hash", paper={"easy": PaperRow(71.2, 0.031, 0, 2.08)}),
    Method(
        key="soft_moe", title="Soft MoE", router="soft_moe", paper={"easy": PaperRow(86.8, 0.095, 8, 1.55)}
    ),
    Method(
        key="vmf",
        title="vMF gate",
        router="vmf",
        paper={"easy": PaperRow(86.3, 0.178, 18, 1.38), "hard": PaperRow(72.4)},
    ),
    Method(
        key="grmoe",
        title="GrMoE",
        router="grassmann",
        options=_GRASSMANN,
        paper=_GRMOE_ROW,
    ),
    Method(
        key="grmoe_amortized",
        title="GrMoE + amortiser",
        router="grassmann",
        options={**_GRASSMANN, "amortizer": "affinity"},
        paper={"easy": PaperRow(90.8, 0.051, 0, 1.48)},
    ),
    # Beside the paper's rows. First, other priors.
    Method(
        key="grmoe_uniform_prior",
        title="GrMoE, uniform prior",
        router="grassmann",
        options={**_GRASSMANN, "prior": "uniform"},
    ),
    Method(key="grmoe_paper_prior", title="GrMoE, paper's prior", router="grassmann", options=_PAPER_PRIOR),
    # The paper's gate: its scaling, its prior, and the overlap penalty of its objective.
    Method(
        key="grmoe_paper",
        title="GrMoE as in the paper",
        router="grassmann",
        options=_PAPER_GATE,
        overlap=_PAPER_HINGE,
        paper=_GRMOE_ROW,
    ),
    Method(
        key="grmoe_paper_no_overlap",
        title="GrMoE as in the paper, no overlap term",
        router="grassmann",
        options=_PAPER_GATE,
    ),
    Method(
        key="grmoe_paper_low_hinge",
        title="GrMoE as in the paper, overlap term at half of random",
        router="grassmann",
        options=_PAPER_GATE,
        overlap=_LOW_HINGE,
        paper=_GRMOE_ROW,
    ),
    # Our gate with the overlap penalty.
    Method(
        key="grmoe_overlap",
        title="GrMoE + overlap term ρ₀ = 0.3",
        router="grassmann",
        options=_GRASSMANN,
        overlap=_PAPER_HINGE,
    ),
    Method(
        key="grmoe_low_hinge",
        title="GrMoE + overlap term at half of random",
        router="grassmann",
        options=_GRASSMANN,
        overlap=_LOW_HINGE,
    ),
    # Two experts per token: GrMoE at the cost of Softmax top-2, weights renormalised or not, and a balanced softmax.
    Method(
        key="grmoe_top2",
        title="GrMoE top-2",
        router="grassmann",
        options={**_GRASSMANN, "selection": _TOP2},
    ),
    Method(
        key="grmoe_top2_renormalized",
        title="GrMoE top-2, renormalised",
        router="grassmann",
        options={**_GRASSMANN, "selection": _TOP2_RENORMALIZED},
    ),
    Method(
        key="softmax_top2_renormalized",
        title="Softmax top-2, renormalised",
        router="softmax",
        options={"top_k": 2, "selection": _TOP2_RENORMALIZED},
    ),
    Method(
        key="softmax_top2_balanced",
        title="Softmax top-2, balanced",
        router="softmax",
        options={"top_k": 2, "balance": True},
    ),
    # The best a linear gate can do.
    Method(
        key="supervised", title="Linear, with labels", router="softmax", options={"top_k": 1}, supervised=True
    ),
)


def find_methods(keys: Sequence[str]) -> tuple[Method, ...]:
    """Methods by key, in table order."""
    known = tuple(m.key for m in METHODS)
    for key in keys:
        checks.one_of("method", key, known)
    return tuple(m for m in METHODS if m.key in keys)
