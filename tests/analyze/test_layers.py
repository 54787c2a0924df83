"""Every figure of a layer against a loop over its tokens, some without an expert and some without a finite gate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from grmoe.analyze.bounds import BoundsTally
from grmoe.analyze.layers import describe_layer
from grmoe.analyze.tally import LayerTally
from grmoe.routing import Routing, build_router

T, N, TYPES, DOMAINS = 120, 5, 4, 3


def random_routing(draw: torch.Generator) -> Routing:
    logits = 2 * torch.randn(2, T // 2, N, generator=draw)
    probs = logits.softmax(-1)
    probs[0, 3] = math.nan
    selected = torch.rand(probs.shape, generator=draw) < 0.4
    return Routing(
        logits=logits, probs=probs, selected=selected, weights=probs * selected, aux_loss=logits.new_zeros(())
    )


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def same(found: Any, want: Any) -> bool:
    """Equal up to rounding; None only where None is wanted."""
    a, b = (np.array(rows, dtype=float) for rows in (found, want))
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True))


@pytest.fixture(scope="module")
def case() -> tuple[Any, list[dict[str, Any]]]:
    """(the layer described, its tokens with a finite gate), counted in two forward passes."""
    draw = torch.Generator().manual_seed(0)
    passes = [random_routing(draw) for _ in range(2)]
    types_T = torch.randint(0, TYPES - 1, (2 * T,), generator=draw)  # the last type has no tokens
    domains_T = torch.randint(0, DOMAINS, (2 * T,), generator=draw)
    ids_T = torch.randint(0, 30, (2 * T,), generator=draw)
    tally = LayerTally.empty(N, TYPES, DOMAINS)
    leading = [
        tally.add(routing, types_T[i * T :][:T], domains_T[i * T :][:T]) for i, routing in enumerate(passes)
    ]
    _, places_T = np.unique(ids_T.numpy(), return_inverse=True)
    router = build_router("softmax", 8, N)
    layer = describe_layer(
        7, router, tally, BoundsTally(router), torch.cat(leading).numpy(), types_T.numpy(), domains_T.numpy(),
        places_T, np.random.default_rng(0),
    )  # fmt: skip
    tokens = []
    for place in range(2 * T):
        routing, at = passes[place // T], place % T
        gate = routing.probs.reshape(T, N)[at].double().tolist()
        if any(math.isnan(g) for g in gate):
            continue
        chosen = [e for e in range(N) if routing.selected.reshape(T, N)[at, e]]
        tokens.append(
            {
                "type": int(types_T[place]),
                "domain": int(domains_T[place]),
                "gate": gate,
                "chosen": chosen,
                "leader": max(chosen, key=gate.__getitem__) if chosen else None,
                "entropy": -sum(g * math.log(g) for g in gate),
            }
        )
    return layer, tokens


def test_counts_and_loads(case: tuple[Any, list[dict[str, Any]]]) -> None:
    layer, tokens = case
    experts = range(N)
    leaders = [token["leader"] for token in tokens]
    assert (layer.layer, layer.tokens) == (7, 2 * T - 2) == (7, len(tokens))
    assert layer.dropped == leaders.count(None) + 2 > 2  # two have no finite gate
    assert layer.expert_tokens == [leaders.count(e) for e in experts]
    assert same(layer.load, [mean([e in token["chosen"] for token in tokens]) for e in experts])
    assert same(layer.leading_load, [leaders.count(e) / len(tokens) for e in experts])
    assert same(layer.gate_load, [mean([token["gate"][e] for token in tokens]) for e in experts])
    assert layer.entropy == pytest.approx(mean([token["entropy"] for token in tokens]))


def test_by_type(case: tuple[Any, list[dict[str, Any]]]) -> None:
    layer, tokens = case
    by_type = [[token for token in tokens if token["type"] == k] for k in range(TYPES)]
    led = [[[t["leader"] for t in of].count(e) for of in by_type] for e in range(N)]
    assert layer.counts == led
    assert same(layer.of_expert, [[n / sum(row) for n in row] for row in led])
    served = [sum(t["leader"] is not None for t in of) for of in by_type]
    assert same(
        layer.of_type, [[n / s if s else None for n, s in zip(row, served, strict=True)] for row in led]
    )
    assert same(layer.gate_of_type, [[mean([t["gate"][e] for t in of]) for of in by_type] for e in range(N)])
    assert same(
        layer.load_of_type, [[mean([e in t["chosen"] for t in of]) for of in by_type] for e in range(N)]
    )
    assert same(layer.experts_per_token, [mean([len(t["chosen"]) for t in of]) for of in by_type])
    assert same(layer.type_entropy, [mean([t["entropy"] for t in of]) for of in by_type])
    spread = [np.std([t["entropy"] for t in of]) if of else None for of in by_type]
    assert np.allclose(
        np.array(layer.type_entropy_std, dtype=float),
        np.array(spread, dtype=float),
        atol=1e-7,
        equal_nan=True,
    )
    assert same(
        layer.expert_type_entropy,
        [-sum(n / sum(row) * math.log(n / sum(row)) for n in row if n) for row in led],
    )


def test_by_domain(case: tuple[Any, list[dict[str, Any]]]) -> None:
    layer, tokens = case
    by_domain = [[token for token in tokens if token["domain"] == d] for d in range(DOMAINS)]
    led = [[[t["leader"] for t in of].count(e) for e in range(N)] for of in by_domain]
    assert same(layer.domain_of_expert, [[n / sum(row) for n in row] for row in led])
    assert same(layer.domain_gate, [[mean([t["gate"][e] for t in of]) for e in range(N)] for of in by_domain])
    assert same(layer.domain_entropy, [mean([t["entropy"] for t in of]) for of in by_domain])
    assert layer.information.n == layer.domain_information.n == sum(map(sum, led))
