"""One setting of the dial and everything measured there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grmoe.checks import finite, require
from grmoe.evaluate.perplexity import Perplexity
from grmoe.model import GrmoeForCausalLM

Alpha = float | list[float]


@dataclass(frozen=True)
class Point:
    alpha: Alpha
    texts: dict[tuple[str, str], Perplexity] = field(default_factory=dict)  # by (text, domain)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)  # {task: {metric: number}}
    text_routing: dict[str, float] = field(default_factory=dict)
    task_routing: dict[str, float] = field(default_factory=dict)  # the padding of batches is in it

    @property
    def experts(self) -> float:
        """Experts a token and layer: on the texts, or on the tasks where there were none."""
        return (self.text_routing or self.task_routing).get("experts_per_token", math.nan)

    def totals(self) -> dict[str, Perplexity]:
        """Of each text, its domains together."""
        found: dict[str, Perplexity] = {}
        for (text, _), value in self.texts.items():
            found[text] = found[text] + value if text in found else value
        return found


def points_of(model: GrmoeForCausalLM, alphas: Sequence[float]) -> list[Point]:
    """One for each α; without any, the model's own, which may be one for each layer."""
    require(
        not alphas or model.config.router != "hash",
        "a hash router has no dial, for its gate is a fixed choice: leave --alpha out",
    )
    own = model.config.alpha
    saved: Alpha = float(own) if isinstance(own, int | float) else [float(a) for a in own]
    return [Point(finite("alpha", a, at_least=0)) for a in dict.fromkeys(alphas)] or [Point(saved)]


def show(alpha: Alpha) -> str:
    return ", ".join(f"{a:g}" for a in (alpha if isinstance(alpha, list) else [alpha]))


def routing(model: GrmoeForCausalLM) -> dict[str, float]:
    """What the routers did since the last reset: means over MoE layers."""
    layers = model.routing_metrics()
    return {
        "experts_per_token": statistics.mean(layer.experts_per_token for layer in layers),
        "effective_experts_entropy": statistics.mean(layer.effective_experts_entropy for layer in layers),
        "effective_experts_inverse": statistics.mean(layer.effective_experts_inverse for layer in layers),
        "entropy": statistics.mean(layer.entropy for layer in layers),
    }
