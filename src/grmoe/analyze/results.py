"""What an analysis found: the body of its results.json."""

from __future__ import annotations

from dataclasses import dataclass

from grmoe.analyze.statistics import Correlation, Information
from grmoe.runs.open import LoadedModel

# Rows are experts and columns are token types, unless a field says otherwise. None: there is nothing to divide by.
Rows = list[list[float | None]]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How experts lie to each other. Matrices are experts × experts."""

    kind: str
    """"overlap": ‖UᵢᵀUⱼ‖²_F / k of frames, 1 on the diagonal. "cosine": of routers with one direction per expert."""
    gram: list[list[float]]
    random: float
    """What independent random experts would have off the diagonal: k/d for overlaps, 0 for cosines."""
    angle_min: list[list[float]] | None = None
    """Smallest of the k principal angles of each pair, radians. None without frames."""
    angle_mean: list[list[float]] | None = None
    angle_max: list[list[float]] | None = None


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Δ = γ(κ_min − ρ κ_max) of Theorem "Collapse Resistance", in units of the affinity that κ multiplies."""

    left_out: float
    """Share of the tokens that may break γ or ργ. The theorem allows none."""
    gamma: float
    """The least affinity of a token to its own expert, the one of its largest affinity."""
    rho: float | None
    """The largest affinity to another expert, over γ. Subspaces are separated where it is well below one."""
    gap: float
    holds: bool
    """Δ > 0."""


@dataclass(frozen=True, kw_only=True)
class Separation:
    """Theorem "Collapse Resistance" (CV ≤ (N−1) e^{−αΔ}, if Δ > 0) on the tokens of one layer."""

    gaps: list[Gap]
    """With no token left out, as the theorem asks, and with more and more of them."""
    kappa_min: float
    """The least factor of an affinity, κ of an expert. With an amortiser: h·κ over all tokens."""
    kappa_max: float
    prior_range: float
    """max b − min b of the log-prior. The theorem's gate has no prior: a lead may be smaller by this much."""
    holds: bool
    """Δ, less the range of the prior, is above zero: the theorem holds for this gate."""
    leading_tokens: float
    """Share of tokens with κ_min·(own affinity) > κ_max·(largest other), the hypothesis token by token."""
    mixture_cv: float
    """Coefficient of variation of the tokens by own expert. The theorem assumes zero."""
    load_cv: float
    """Coefficient of variation of the mean gate, the number that the theorem bounds."""
    paper: float | None
    """The paper's bound on `load_cv`. None where the hypothesis fails."""
    sharp: float | None
    """The best bound from the same assumptions."""
    gap_needed: float | None
    """Δ at which the paper's bound would equal `load_cv`."""


@dataclass(frozen=True, kw_only=True)
class TopMass:
    """Corollary "Top-k Mass Control": G_k ≥ 1 − (N−k) e^{−gap}. Means over tokens."""

    k: int
    mass: float
    """G_k, the gate's mass on its k largest experts."""
    paper: float
    """The paper's bound on it; may be negative."""
    sharp: float
    """The best bound from the same gap, k/(k+(N−k)e^{−gap})."""
    paper_useful: float
    """Share of tokens for which the paper's bound is above k/N, which is true of any gate."""
    broken: int
    """Tokens with a mass below one of the bounds. The corollary says that there are none."""


@dataclass(frozen=True, kw_only=True)
class Amortized:
    """What an amortiser does to the concentrations. h_e of the matrix amortiser is its score over κ_e a_e."""

    concentration: float | None
    """Σ_e h_e κ_e / Σ_e κ_e, the mean over tokens: 1 would be the paper's "average concentration preserved"."""
    concentration_low: float | None
    """Its 5 % quantile over tokens."""
    concentration_high: float | None
    """Its 95 % quantile over tokens."""
    ratio: float | None
    """The same of logits: Σ_e h_e κ_e a_e / Σ_e κ_e a_e."""
    ratio_low: float | None
    """Its 5 % quantile over tokens."""
    ratio_high: float | None
    """Its 95 % quantile over tokens."""
    type_ratio: list[float | None]
    """The mean ratio over the tokens of each type."""
    type_h: list[float | None]
    """h of the leading expert, the mean over the tokens of each type: above 1 the gate is surer of it than κ alone."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One MoE layer.

    The expert of a token is the leading one, which has the largest combine weight. A token that no expert computes
    (Switch and Expert Choice drop some) has none and counts under `dropped`.
    """

    layer: int
    """Place among all blocks of the model."""
    alpha: float
    tokens: int
    """Tokens with a finite gate."""
    dropped: int
    """Tokens without a leading expert."""
    counts: list[list[int]]
    """Tokens of a type that the expert leads."""
    of_expert: Rows
    """Share of the tokens an expert leads that have the type. Rows sum to one."""
    of_type: Rows
    """Share of a type's tokens that the expert leads. Columns sum to one, dropped tokens left out."""
    gate_of_type: Rows
    """Mean gate probability over a type's tokens. Columns sum to one."""
    load_of_type: Rows
    """Share of a type's tokens that the expert receives. Columns sum to `experts_per_token`."""
    experts_per_token: list[float | None]
    """Experts computed per token, for each type."""
    load: list[float | None]
    """Share of tokens each expert receives, that is, computes. Sums to the experts per token."""
    leading_load: list[float | None]
    """Share of tokens each expert leads. Sums to one without dropped tokens."""
    gate_load: list[float | None]
    """Mean gate probability of each expert."""
    entropy: float | None
    """Mean entropy of the gate, nats. At most log N."""
    type_entropy: list[float | None]
    """The same over the tokens of each type."""
    type_entropy_std: list[float | None]
    """Standard deviation over the tokens of each type."""
    domain_of_expert: Rows
    """Domains × experts: share of a domain's tokens that the expert leads."""
    domain_gate: Rows
    """Domains × experts: mean gate probability."""
    domain_entropy: list[float | None]
    """Mean entropy of the gate in each domain."""
    kappa: list[float] | None
    """Concentration of each expert; for diagonal concentrations the mean over columns. None without κ."""
    expert_tokens: list[int]
    """Tokens each expert leads."""
    expert_type_entropy: list[float | None]
    """Entropy of the types of each expert's tokens, nats."""
    kappa_correlation: Correlation | None
    """κ against `expert_type_entropy`, over the experts of this layer."""
    information: Information | None
    """Between expert and type."""
    domain_information: Information | None
    """Between expert and domain."""
    geometry: Geometry | None
    separation: Separation | None
    """None without subspaces, and with a linear term or a matrix amortiser."""
    top_mass: list[TopMass]
    """For k = 1, 2 and the experts per token. Empty if the gate is no softmax over experts."""
    amortized: Amortized | None = None
    """None without an amortiser."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The run's log, per MoE layer and logged step."""

    steps: list[int]
    load: list[list[list[float]]]
    """Layers × steps × experts, as the log has it."""
    entropy: list[list[float]]
    """Layers × steps."""
    kappa_min: list[list[float]] | None
    kappa_max: list[list[float]] | None


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """All of an analysis. Lists over types and domains are in the order of `types` and `domains`."""

    router: str
    text: str
    """Where the tokens came from."""
    tokens: int
    sequence_length: int
    experts: int
    """Experts per MoE layer that the gate chooses from."""
    types: list[str]
    type_tokens: list[int]
    domains: list[str]
    domain_tokens: list[int]
    least_tokens: int
    """Experts that lead fewer tokens are left out of the correlations."""
    layers: list[Layer]
    kappa_correlation: Correlation | None
    """κ against the entropy of an expert's types, over the experts of all layers."""
    kappa_correlation_within: Correlation | None
    """The same for differences from the means of each layer."""
    training: Training | None
    """None for an exported model."""
    identity_experts: int = 0
    """How many of the experts, the last ones, compute nothing."""


@dataclass(frozen=True)
class Result:
    loaded: LoadedModel
    analysis: Analysis
