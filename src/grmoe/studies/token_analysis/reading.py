"""What an analysis of one model says of its experts: specialists, entropies of token types, and the amortiser."""

from __future__ import annotations

from collections.abc import Collection
from statistics import fmean
from typing import Any, NamedTuple

AMBIGUOUS = ("function word", "punctuation")


class Specialists(NamedTuple):
    """Of one model: the expert that leads most code, and another of the same layer that leads most names."""

    layer: int
    code: float
    """Share of all code tokens."""
    math: float
    """Share of the numbers and mathematics that the same expert leads."""
    all: float
    """Share of all tokens that the same expert leads. A specialist leads far more of its own type."""
    nouns: float
    kappas: tuple[float, float]
    """Of the two experts."""
    others: tuple[float, ...]
    """κ of the other experts of this layer."""


def specialists(body: dict[str, Any]) -> Specialists:
    """The layer is that in which one expert leads the largest share of code."""
    types = body["types"]
    code, numbers, nouns = (types.index(name) for name in ("code", "number/math", "proper noun"))
    layers = body["layers"]
    places = [(layer, e) for layer in range(len(layers)) for e in range(len(layers[layer]["of_type"]))]
    place, first = max(places, key=lambda at: layers[at[0]]["of_type"][at[1]][code] or 0.0)
    shares, kappa = layers[place]["of_type"], layers[place]["kappa"]
    second = max((e for e in range(len(shares)) if e != first), key=lambda e: shares[e][nouns] or 0.0)
    return Specialists(
        layers[place]["layer"],
        shares[first][code] or 0.0,
        shares[first][numbers] or 0.0,
        _mean_over(body, _by_type(body, shares[first]), types) or 0.0,
        shares[second][nouns] or 0.0,
        (kappa[first], kappa[second]),
        tuple(value for e, value in enumerate(kappa) if e not in (first, second)),
    )


def _mean_over(body: dict[str, Any], values: dict[str, float], names: Collection[str]) -> float | None:
    """The mean of values by type over all tokens of these types; None where there are none."""
    tokens = dict(zip(body["types"], body["type_tokens"], strict=True))
    known = [name for name in values if name in names]
    total = sum(tokens[name] for name in known)
    return sum(values[name] * tokens[name] for name in known) / total if total else None


def _apart(body: dict[str, Any], values: dict[str, float]) -> float | None:
    """The mean over function words and punctuation minus that over all other tokens; None where the text has none."""
    mine = _mean_over(body, values, AMBIGUOUS)
    others = _mean_over(body, values, [name for name in body["types"] if name not in AMBIGUOUS])
    return None if mine is None or others is None else mine - others


def _by_type(body: dict[str, Any], values: list[float | None]) -> dict[str, float]:
    """Types without tokens are left out."""
    return {name: v for name, v in zip(body["types"], values, strict=True) if v is not None}


def type_entropies(body: dict[str, Any]) -> dict[str, float]:
    """Entropy of the gate over the tokens of each type, the mean over layers; types without tokens are left out."""
    return {
        name: fmean(layer["type_entropy"][k] for layer in body["layers"])
        for k, (name, n) in enumerate(zip(body["types"], body["type_tokens"], strict=True))
        if n
    }


def ambiguity(body: dict[str, Any]) -> float | None:
    """Entropy of function words and punctuation minus that of all other tokens."""
    return _apart(body, type_entropies(body))


def generalist(body: dict[str, Any]) -> tuple[float, float | None]:
    """Of the expert with the smallest κ of the last layer: (κ, its share of function words and punctuation minus its
    share of all other tokens)."""
    layer = body["layers"][-1]
    expert = min(range(len(layer["kappa"])), key=lambda e: layer["kappa"][e])
    return layer["kappa"][expert], _apart(body, _by_type(body, layer["of_type"][expert]))


def amortisers(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each layer with an amortiser: what it does to concentrations and logits."""
    return [layer["amortized"] for layer in body["layers"] if layer["amortized"] is not None]


def confidence(body: dict[str, Any]) -> float | None:
    """h of the leading expert over function words and punctuation minus that over all other tokens."""
    found = [_apart(body, _by_type(body, one["type_h"])) for one in amortisers(body)]
    known = [value for value in found if value is not None]
    return fmean(known) if known else None


def kappas(body: dict[str, Any]) -> list[float]:
    return [kappa for layer in body["layers"] for kappa in layer["kappa"]]
