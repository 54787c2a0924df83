"""What an evaluation found: the body of its results.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grmoe.evaluate.perplexity import Perplexity
from grmoe.probe.routing import RoutingFigures
from grmoe.runs.open import LoadedModel

Alpha = float | list[float]  # one for all layers, or one per MoE layer


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting of the dial and everything measured there."""

    alpha: Alpha
    budget: float | None = None
    """The budget asked for, in experts per token. None: `alpha` with the saved selection."""
    experts_per_token: float
    """Experts computed per token and layer: on the texts, or on the tasks if there are no texts."""
    texts: dict[str, dict[str, Perplexity]] = field(default_factory=dict)
    """By text and domain."""
    totals: dict[str, Perplexity] = field(default_factory=dict)
    """By text, its domains together."""
    text_routing: RoutingFigures | None = None
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By task: "metric,filter" as the harness names them, "shots" and "rows"."""
    task_routing: RoutingFigures | None = None
    """Counts the padding of batches too."""

    @property
    def routing(self) -> RoutingFigures:
        routing = self.text_routing or self.task_routing
        assert routing is not None  # a point is made when something was measured
        return routing


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All of an evaluation. None means: no limit, or as the task has it."""

    length: int
    """Tokens per window."""
    stride: int
    """Tokens from the start of a window to the start of the next."""
    batch: int
    tokens: int | None
    """Most tokens of each domain of a text."""
    shots: int | None
    """Examples per prompt of a task."""
    limit: int | None
    """Most rows of each task."""
    scorer: str
    """What scored the tasks: "harness" (lm_eval) or "grmoe"; empty without tasks."""
    versions: dict[str, str]
    """Of the libraries that decide the numbers."""
    points: list[Point]


@dataclass(frozen=True, kw_only=True)
class Result:
    loaded: LoadedModel
    evaluation: Evaluation


def show_alpha(alpha: Alpha, budget: float | None = None) -> str:
    """budget 1.5; α = 2; or α = 1, 2, 4 for one per layer."""
    if budget is not None:
        return f"budget {budget:g}"
    values = alpha if isinstance(alpha, list) else [alpha]
    return "α = " + ", ".join(f"{value:g}" for value in values)
