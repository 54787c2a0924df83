"""The step that CUDA graphs replay, run without a graph: answers, joining and leaving, numbers per row."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import CURVE, make_model, offline, options
from test_serve_batching import Asked, crowd, together

from grmoe.serve import server
from grmoe.serve.batching import BatchGenerator, Sequence
from grmoe.serve.graphs import GraphGenerator
from grmoe.serve.sampling import Sampling, TokenSampler
from grmoe.serve.server import make_service
from grmoe.serve.service import Service


@pytest.mark.parametrize(
    "changes",
    [
        {"router": "softmax", "router_kappa": None},
        {"num_key_value_heads": 1, "shared_experts": 1, "identity_experts": 1, "moe_every": 1},
    ],
    ids=["softmax", "all layers, identity"],
)
def test_answers_equal_generate(changes: dict[str, Any]) -> None:
    """In fp32 near ties are rare, and none is among these."""
    model = make_model(**changes)
    asked = crowd(1, 6, temperatures=(0.0, 0.7))
    expected = [offline(model, a.prompt, a.alpha, a.tokens, a.sampling) for a in asked]
    assert together(GraphGenerator(model, rows=6), asked) == expected


def test_budgets_share_a_step() -> None:
    model = make_model(budget_curve=CURVE)
    asked = [
        Asked([10 * i + j for j in range(3 + i)], 1.0, 8, Sampling(), arrives=i % 3, budget=1 + i / 2)
        for i in range(4)
    ]
    expected = [offline(model, a.prompt, 1.0, 8, budget=a.budget) for a in asked]
    assert together(GraphGenerator(model, rows=4), asked) == expected


@pytest.mark.parametrize("identity", [0, 1])
def test_budgets_with_a_bias_share_a_step(identity: int) -> None:
    """A bias has one number for each expert that the gate chooses from, identity experts too."""
    bias = [[0.3 * e for e in range(4 + identity)]] * 2
    model = make_model(budget_curve=[p | {"bias": bias} for p in CURVE], identity_experts=identity)
    asked = [
        Asked([10 * i + j for j in range(3 + i)], 1.0, 8, Sampling(), arrives=i % 3, budget=1 + i / 2)
        for i in range(4)
    ]
    expected = [offline(model, a.prompt, 1.0, 8, budget=a.budget) for a in asked]
    assert together(GraphGenerator(model, rows=4), asked) == expected


def test_scores_and_experts_are_those_of_the_batch() -> None:
    model = make_model()
    found = []
    for generator in (GraphGenerator(model, rows=3), BatchGenerator(model, together=False)):
        sequences = [
            Sequence(
                prompt=[1, 2, 3 + i],
                numbers=tuple(model.config.layer_numbers(None)),
                sampler=TokenSampler(Sampling()),
                alternatives=2,
            )
            for i in range(3)
        ]
        for sequence in sequences:
            generator.start([sequence])
        for _ in range(5):
            generator.step(sequences)
        found.append(sequences)
    for ours, plain in zip(*found, strict=True):
        assert ours.tokens == plain.tokens
        assert ours.experts == pytest.approx(plain.experts)
        for a, b in zip(ours.scores, plain.scores, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_prompts_are_read_together() -> None:
    """Prompts of any lengths, with τ, α and scores of their own: what each gets alone."""
    model = make_model(budget_curve=CURVE)

    def ask(i: int) -> Sequence:
        numbers = [n._replace(alpha=1.0 + i) for n in model.config.layer_numbers(None)]
        return Sequence(
            prompt=[(7 * i + j) % 50 for j in range(1 + 4 * i)],
            numbers=tuple(model.config.layer_numbers(1.0 + i / 2) if i % 2 else numbers),
            sampler=TokenSampler(Sampling()),
            alternatives=2,
            score_prompt=True,
        )

    joint, alone = [ask(i) for i in range(4)], [ask(i) for i in range(4)]
    generator = GraphGenerator(model, rows=4)
    assert generator.takes(joint)
    generator.start(joint)
    for sequence in alone:
        BatchGenerator(model, together=False).start([sequence])
    for ours, plain in zip(joint, alone, strict=True):
        assert (ours.tokens, ours.experts, ours.length) == (plain.tokens, plain.experts, plain.length)
        assert len(ours.scores) == len(plain.scores)
        for a, b in zip(ours.scores, plain.scores, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert ours.cache is not None
        assert plain.cache is not None
        for mine, other in zip(ours.cache.layers, plain.cache.layers, strict=True):
            torch.testing.assert_close(mine.keys, other.keys, atol=1e-5, rtol=1e-4)


def test_few_tokens_of_prompts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding counts. A prompt of any length is taken alone."""
    monkeypatch.setattr("grmoe.serve.graphs.PROMPT_TOKENS", 12)
    model = make_model()
    numbers = tuple(model.config.layer_numbers(None))
    short, long, longer = (
        Sequence(prompt=[1] * n, numbers=numbers, sampler=TokenSampler(Sampling())) for n in (1, 6, 20)
    )
    generator = GraphGenerator(model, rows=3)
    assert generator.takes([short, long])
    assert not generator.takes([short, long, short])
    assert generator.takes([longer])
    assert not BatchGenerator(model, together=True).takes([short, short])


def test_sizes_are_few_and_rows_are_reused() -> None:
    generator = GraphGenerator(make_model(), rows=12)
    assert [generator._round_rows(n) for n in (1, 2, 3, 4, 5, 8, 9, 12)] == [1, 2, 4, 4, 8, 8, 12, 12]
    generator.model.config.max_position_embeddings = 1000
    assert [generator._round_length(n) for n in (1, 256, 257, 600)] == [256, 256, 512, 1000]


def test_captured_sizes_are_those_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at the start, the largest first. Then no step captures, and answers are the same."""
    captured: list[tuple[int, int]] = []
    compute = GraphGenerator._compute

    def note(self: GraphGenerator, B: int, L: int) -> None:
        captured.append((B, L))
        compute(self, B, L)

    monkeypatch.setattr(GraphGenerator, "_compute", note)
    monkeypatch.setattr("grmoe.serve.graphs.SHORTEST", 16)
    model = make_model()
    asked = crowd(1, 3)
    expected = [offline(model, a.prompt, a.alpha, a.tokens, a.sampling) for a in asked]
    generator = GraphGenerator(model, rows=6)
    assert generator.capture(range(10, 40), 3) == 9
    assert captured == [(B, L) for B in (4, 2, 1) for L in (64, 32, 16)]
    assert generator.capture([64]) == 1  # the rest of the rows
    assert captured.pop() == (6, 64)
    before = dict(generator.replays)
    assert together(generator, asked) == expected
    assert generator.replays == before
    assert set(captured[9:]) <= before.keys()


def test_the_server_captures_at_its_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a request can arrive, and only where there are graphs."""
    found: list[list[tuple[int, int]]] = []

    class Served:
        def __init__(self, service: Service) -> None:
            found.append(list(service.engine.generator.replays))  # type: ignore[attr-defined]

        def run(self, sockets: list[socket.socket]) -> None: ...

    monkeypatch.setattr(server, "Server", Served)
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(server.log, name, getattr(server.log, name))
    for captures in (True, False):
        service = make_service(options(folder, graphs=True, concurrency=3))
        service.engine.generator.captures = captures  # type: ignore[attr-defined]
        with socket.socket() as sock:
            server.run(service, sock)
        service.engine.stop()
    assert found == [[(3, 128), (2, 128), (1, 128)], []]  # 128 positions are all that the model has


@torch.no_grad()
def test_a_row_that_ends_frees_its_place() -> None:
    """The last row moves into it, with its cache."""
    model = make_model()
    generator = GraphGenerator(model, rows=3)
    numbers = tuple(model.config.layer_numbers(None))
    one, two, three = (
        Sequence(prompt=[7 * i, 5], numbers=numbers, sampler=TokenSampler(Sampling())) for i in range(3)
    )
    for sequence in (one, two, three):
        generator.start([sequence])
    generator.step([one, two, three])
    generator.step([three, two])
    assert generator.batch == [three, two]
    assert all(s.cache is None for s in generator.batch)
    generator.step([two, three])  # the order that is asked for does not matter
    assert generator.batch == [three, two]
    for i, sequence in enumerate((one, two, three)):
        assert sequence.tokens == offline(make_model(), [7 * i, 5], 1.0, len(sequence.tokens))


def test_the_server_takes_it(folder: Path) -> None:
    generator = make_service(options(folder, graphs=True, concurrency=3)).engine.generator
    assert isinstance(generator, GraphGenerator)
    assert len(generator.next_R) == 3
    with pytest.raises(ValueError, match="leave out --alone"):
        options(folder, graphs=True, together=False)
