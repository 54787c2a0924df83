"""What the routers did in a forward pass: experts computed for each sequence, and whether a choice was close.

Legend: B sequences, S tokens of each, N experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grmoe.routing import Router, Routing
from grmoe.serve.choice import MARGIN


class Watch:
    """Hooks on all routers of a model; reads what they decided in the forward pass before."""

    def __init__(self, routers: list[Router]) -> None:
        self.routings: list[tuple[Router, Routing]] = []
        self.layers = len(routers)
        for router in routers:
            router.register_forward_hook(self._see)

    def _see(self, router: Any, args: Any, routing: Routing) -> None:
        self.routings.append((router, routing))

    def start(self) -> None:
        self.routings.clear()

    def experts(self) -> list[float]:
        """Experts computed for each sequence, the mean over layers, the sum over its tokens."""
        counts_B = torch.stack([r.selected.flatten(1).sum(-1) for _, r in self.routings]).sum(0)
        return [count / self.layers for count in counts_B.tolist()]

    def steady(self) -> list[bool]:
        """For each sequence whether every layer would choose the same experts with gates off by rounding."""
        return torch.stack([steady_experts(*seen) for seen in self.routings]).all(0).tolist()


def steady_experts(router: Router, routing: Routing) -> Tensor:
    """(B,) True where no selected expert is near one left out, and the selection's threshold near no expert.

    A policy keeps the most probable experts; which ones hangs on the gap between the last kept and the first left out,
    how many on a sum or a probability that is compared with a constant: gates a little larger and smaller tell.
    """
    probs, selected = routing.probs, routing.selected
    least = torch.where(selected, probs, torch.inf).amin(-1)
    most = torch.where(selected, -torch.inf, probs).amax(-1)
    steady = least - most > MARGIN
    for factor in (1 - MARGIN, 1 + MARGIN):
        steady &= (router.selection(probs * factor) == selected).all(-1)
    return steady.flatten(1).all(-1)
