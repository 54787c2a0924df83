"""What `grmoe dial` found: the body of its results.json. Tables, the figure and the model card show the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grmoe.dial.beside import BudgetRow
from grmoe.dial.certify import LayerCertificate
from grmoe.dial.frontier import Gain
from grmoe.dial.meter import RULES, Family
from grmoe.dial.search import Option
from grmoe.dial.speed import Speed
from grmoe.dial.target import Target
from grmoe.probe.losses import Increase
from grmoe.runs.open import LoadedModel


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """One setting on the calibration text. Routing numbers are means over MoE layers."""

    family: Family
    name: str
    """The setting in short: "α 2, mass 0.5, cap 2"."""
    setting: dict[str, Any]
    """The setting in the words of config.json."""
    loss: float
    """Nats per token."""
    perplexity: float
    increase: Increase
    """Of perplexity, relative to the trained setting."""
    experts_per_token: float
    layer_experts: tuple[float, ...]
    """Experts per token of each MoE layer."""
    entropy: float
    """Of the gate, nats."""
    effective_experts_entropy: float
    """exp(H)."""
    effective_experts_inverse: float
    """1/Σg²."""
    load_cv: float
    """Standard deviation of the experts' loads over their mean."""
    min_load: float
    """Smallest load over experts and layers, as a share of the fair load."""
    speed: Speed | None
    """None where it was not timed."""
    on_frontier: bool
    """On the lower envelope of (experts per token, loss), one α per layer allowed."""
    on_uniform_frontier: bool
    """The same with one α for all layers."""
    on_rule_frontier: bool = False
    """The same within its own family, for the rules beside τ and α."""
    best: bool = False
    """No other setting of any rule has as few experts and a lower loss."""


@dataclass(frozen=True, kw_only=True)
class AlphaRow(PointResult):
    """One α for all layers, at the chosen τ and cap."""

    alpha: float


@dataclass(frozen=True)
class Calibration:
    """The text the setting was chosen on."""

    text: str
    tokens: int
    windows: int


@dataclass(frozen=True)
class SensitivityResult:
    """What single layers change around one uniform setting."""

    base: dict[str, Any]
    layers: list[list[Option]]


@dataclass(frozen=True, kw_only=True)
class Check:
    """The chosen setting on another text."""

    text: str
    tokens: int
    perplexity_trained: float
    perplexity: float
    experts_per_token: float
    increase: Increase
    missed_by: float | None
    """How far the target was missed, at most 0 if it was kept. None for a target of speed."""
    budgets: list[BudgetRow] = field(default_factory=list)
    """This model at round budgets, on this text."""


@dataclass(frozen=True, kw_only=True)
class DialResults:
    """Body of results.json."""

    target: Target
    asked: str
    """The target as text."""
    calibration: Calibration
    trained: PointResult
    chosen: PointResult
    points: list[PointResult]
    """Every setting measured, fewest experts per token first."""
    table: list[AlphaRow]
    """The paper's table: what α does at the chosen τ and cap."""
    per_layer_gains: list[Gain]
    sensitivities: list[SensitivityResult]
    certificates: list[LayerCertificate]
    checks: list[Check]
    curve: list[dict[str, Any]] = field(default_factory=list)
    """What `set_budget` follows: `budget_curve` of config.json."""
    budget: float | None = None
    """The chosen setting as a budget. None: it is the trained setting, and no point of the curve."""
    budgets: list[BudgetRow] = field(default_factory=list)
    """This model at round budgets, then the models it was compared with."""
    rule_gains: dict[Family, list[Gain]] = field(default_factory=dict)
    """What the rules beside τ and α gain over one α for all."""
    domains: dict[str, Increase] = field(default_factory=dict)
    """Of perplexity at the chosen setting, on each domain of the calibration text that has enough windows."""

    @property
    def timed(self) -> bool:
        """Whether speeds were measured. Then the chosen setting has one."""
        return self.chosen.speed is not None

    @property
    def families(self) -> dict[str, list[PointResult]]:
        """What is compared, fewest experts first: frontiers of the rules, and top-k at the trained α."""
        plain = [p for p in self.points if p.family in ("top-k", "trained")]
        return {
            "one α for all": [p for p in self.points if p.on_uniform_frontier],
            "one α per layer allowed": [p for p in self.points if p.on_frontier],
            "top-k": [p for p in plain if p.setting["selection"] == "topk"],
            **{rule: [p for p in self.points if p.family == rule and p.on_rule_frontier] for rule in RULES},
        }


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `run` returns."""

    loaded: LoadedModel
    """The model, at the chosen setting."""
    body: DialResults
