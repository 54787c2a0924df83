"""Serving by CUDA graphs: a replay computes what the same step computes without a graph, at every size and number."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from grmoe.bench.models import ModelShape, ours
from grmoe.serve import graphs
from grmoe.serve.batching import Sequence
from grmoe.serve.graphs import GraphGenerator
from grmoe.serve.sampling import Sampling, TokenSampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@dataclass
class Answers:
    tokens: list[list[int]]
    experts: list[float]
    captured: int


def answers() -> Answers:
    """Eight sequences with three α: they join in groups, and the early ones leave."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = ModelShape("small", 1, 64, "gelu").config("grassmann")
        config.selection, config.selection_tau = "mass", 0.5
        model = ours(config).eval()
        nn.Module.to(model, torch.bfloat16)
    generator, everyone, running = GraphGenerator(model, rows=6), [], []
    for i in range(8):
        numbers = tuple(n._replace(alpha=(0.5, 1.0, 20.0)[i % 3]) for n in model.config.layer_numbers(None))
        sampler = TokenSampler(Sampling(temperature=0.5 * (i % 2), seed=i))
        everyone.append(Sequence(prompt=list(range(1 + i, 20 + 40 * i)), numbers=numbers, sampler=sampler))
    for group in (everyone[:1], everyone[1:2], everyone[2:4], everyone[4:7], everyone[7:]):
        assert generator.takes(group)
        generator.start(group)
        running = [*running, *group][-5:]
        for _ in range(4):
            generator.step(running)
    return Answers([s.tokens for s in everyone], [s.experts for s in everyone], len(generator.replays))


def test_a_replay_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = answers()
    assert replayed.captured >= 4
    monkeypatch.setattr(graphs, "warmed_up", lambda run, device, pool: run)
    plain = answers()
    assert replayed.tokens == plain.tokens
    assert replayed.experts == pytest.approx(plain.experts)
    assert len(set(map(tuple, replayed.tokens))) > 1
