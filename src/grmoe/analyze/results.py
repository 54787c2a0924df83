"""What an analysis found, as plain data: the content of results.json."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grmoe.analyze.statistics import Correlation, Information

FORMAT = 1
DIGITS = 6  # significant, of every number written


@dataclass(frozen=True)
class Geometry:
    """How experts lie to each other. Matrices are experts × experts.

    kind: "overlap" for frames, ‖UᵢᵀUⱼ‖²_F / k, 1 on the diagonal; "cosine" for routers with one direction an expert.
    random: what independent random experts would have off the diagonal (k/d; 0 for cosines).
    angle_*: smallest, mean and largest of the k principal angles of each pair, radians; None without frames.
    """

    kind: str
    gram: list[list[float]]
    random: float
    angle_min: list[list[float]] | None
    angle_mean: list[list[float]] | None
    angle_max: list[list[float]] | None


@dataclass(frozen=True)
class Layer:
    """One MoE layer. Rows of a table are experts, columns types, unless it says otherwise; None: nothing to divide by.

    A token's expert is the leading one, of the largest combine weight; a token that no expert computes (Switch and
    Expert Choice drop some) has none and counts under `dropped`.
    """

    layer: int  # its place among all blocks of the model
    alpha: float
    tokens: int
    dropped: int
    counts: list[list[int]]  # tokens of a type that an expert leads
    of_expert: list[list[float | None]]  # share of an expert's tokens that have the type; rows sum to one
    of_type: list[list[float | None]]  # share of a type's tokens that the expert has; columns sum to one
    gate_of_type: list[list[float | None]]  # mean gate probability over a type's tokens; columns sum to one
    work_of_type: list[list[float | None]]  # share of a type's computed pairs; columns sum to one
    experts_per_token: list[float | None]  # computed, of each type
    load: list[float]  # share of tokens an expert receives, as in `RoutingMetrics`
    leading_load: list[float]  # share of tokens an expert leads
    gate_load: list[float]  # mean gate probability
    entropy: float  # mean entropy of the gate, nats; log N is the most
    type_entropy: list[float | None]  # the same over the tokens of each type
    type_entropy_std: list[float | None]  # over the tokens of each type
    domain_of_expert: list[
        list[float | None]
    ]  # domains × experts: share of a domain's tokens that the expert has
    domain_gate: list[list[float | None]]  # domains × experts: mean gate probability
    domain_entropy: list[float | None]  # mean entropy of the gate in each domain
    kappa: list[float] | None  # concentration of each expert (mean over columns where diagonal)
    expert_tokens: list[int]  # tokens each expert leads
    expert_type_entropy: list[float | None]  # entropy of the types of each expert's tokens, nats
    kappa_correlation: Correlation | None  # κ against that entropy, over the experts of this layer
    information: Information | None  # expert and type
    domain_information: Information | None  # expert and domain
    geometry: Geometry | None


@dataclass(frozen=True)
class Training:
    """From the run's log: per MoE layer, per logged step. load: share of tokens received."""

    steps: list[int]
    load: list[list[list[float]]]  # layers × steps × experts
    entropy: list[list[float]]  # layers × steps
    kappa_min: list[list[float]] | None
    kappa_max: list[list[float]] | None


@dataclass(frozen=True)
class Excerpt:
    """Some text, token by token: what a text view needs."""

    pieces: list[str]
    types: list[int]  # places in Analysis.types
    domain: str
    experts: list[list[int]]  # layers × tokens: the leading expert, −1 for none
    probs: list[list[list[float]]]  # layers × tokens × experts, three decimals


@dataclass(frozen=True)
class Analysis:
    """All of an analysis. Lists over types and domains are in the order of `types` and `domains`."""

    format: int
    grmoe: str  # version
    model: str  # folder
    router: str
    step: int | None  # of the run's checkpoint
    text: str  # where the tokens came from
    tokens: int
    sequence_length: int
    experts: int
    types: list[str]
    type_tokens: list[int]
    domains: list[str]
    domain_tokens: list[int]
    least_tokens: int  # experts that lead fewer are left out of the correlations
    layers: list[Layer]
    # κ against the entropy of an expert's types: experts of all layers, and differences from their layer's means.
    kappa_correlation: Correlation | None
    kappa_correlation_within: Correlation | None
    training: Training | None
    excerpts: list[Excerpt]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plain(dataclasses.asdict(self)), ensure_ascii=False, separators=(",", ":"))
        path.write_text(text + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """Lists, dicts, strings and numbers that JSON knows: NaN is null, floats have six digits."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
