"""What `grmoe prune` found: the body of its results.json. Tables, the figure and the model card show the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from grmoe.probe.losses import Increase
from grmoe.prune.certificate import Certified
from grmoe.prune.layers import Layout
from grmoe.prune.small import Size
from grmoe.runs.open import LoadedModel

DRAWS = 10  # of each random baseline
_STUDENT = 1.833  # 90 % of Student's t with DRAWS − 1 = 9 degrees of freedom lie within ±1.833


@dataclass(frozen=True, kw_only=True)
class TextResult:
    """The trained model on a text."""

    text: str
    tokens: int
    loss: float
    """Nats per token."""
    perplexity: float
    experts_per_token: float


@dataclass(frozen=True, kw_only=True)
class PrunedResult:
    """A pruned model on a text."""

    loss: float
    perplexity: float
    experts_per_token: float
    increase: Increase
    """Of perplexity, relative to the trained model."""
    domains: dict[str, Increase] = field(default_factory=dict)
    """The same on each domain of the text that has enough windows."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a method reached with a number of experts."""

    method: str
    draw: int | None
    """Seed of a random method; None for others."""
    experts: int
    """In every layer."""
    layouts: tuple[Layout, ...]
    """For each MoE layer the groups of experts that became one. Experts in no group were dropped."""
    divergence: float | None
    """From the trained predictions, nats per token. Not measured for random methods."""
    texts: tuple[PrunedResult, ...]
    """Calibration text first. The others only where `experts` is the final number."""


@dataclass(frozen=True)
class Overlaps:
    """Smallest and largest similarity of two experts in one layer, as trained."""

    block: int
    smallest: float
    largest: float


@dataclass(frozen=True)
class Chance:
    """Perplexity over the draws of a random method. low to high is the 90 % interval of the mean."""

    mean: float
    low: float
    high: float
    smallest: float
    largest: float


def chance(losses: Sequence[float]) -> Chance:
    """Statistics of DRAWS losses, as perplexities."""
    mean, error = fmean(losses), _STUDENT * stdev(losses) / math.sqrt(len(losses))
    return Chance(*map(math.exp, (mean, mean - error, mean + error, min(losses), max(losses))))


@dataclass(frozen=True, kw_only=True)
class PruneResults:
    """Body of results.json."""

    asked: str
    """The request as text."""
    asked_experts: int | None
    max_ppl_increase: float | None
    """The bound on the increase of perplexity, where no number of experts was asked for."""
    router: str
    trained_experts: int
    """In every layer, before."""
    experts: int
    """The number of experts at which the methods are compared."""
    texts: tuple[TextResult, ...]
    """Calibration text first, then checks."""
    overlaps: tuple[Overlaps, ...]
    random_overlap: float | None
    """Of two random frames; None for routers without frames."""
    before: Size
    after: Size | None
    chosen: Outcome | None
    """None: nothing keeps the bound."""
    outcomes: tuple[Outcome, ...]
    """Every method at every number of experts that was measured, most experts first."""
    random: dict[str, list[Chance]]
    """By random method, for each text, at the final number of experts."""
    certificates: tuple[Certified, ...] = ()
    """What "certificate drop" guarantees for each MoE layer at the final number of experts."""

    @property
    def final(self) -> list[Outcome]:
        """Outcomes with `experts` experts."""
        return [o for o in self.outcomes if o.experts == self.experts]

    @property
    def ranked(self) -> list[Outcome]:
        """Final outcomes that are not random, the smallest divergence first."""
        return sorted((o for o in self.final if o.draw is None), key=lambda o: o.divergence or 0.0)

    def beaten(self, outcome: Outcome, kind: str, text: int) -> int:
        """How many draws of a random method have a higher loss on a text."""
        draws = (o.texts[text].loss for o in self.final if o.method == kind)
        return sum(loss > outcome.texts[text].loss for loss in draws)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `run` returns."""

    loaded: LoadedModel
    """The pruned model; the trained one where nothing was chosen."""
    body: PruneResults
