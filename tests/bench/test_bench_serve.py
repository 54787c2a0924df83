"""`grmoe bench serve`: clients ask as soon as they are answered, the peer too, and a contender that fails says why."""

from __future__ import annotations

import json
import queue
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_scale import MICRO
from typer.testing import CliRunner

from grmoe.bench import serve as bench
from grmoe.bench.measure import Row
from grmoe.bench.models import ModelShape, olmoe, ours
from grmoe.bench.run import Plan
from grmoe.bench.serve_load import Answer, Seen, load, prompts
from grmoe.bench.serve_peer import Peer, settings
from grmoe.cli import app
from grmoe.model import PRESETS


@pytest.fixture(autouse=True)
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "micro", MICRO)


def run(out: Path, *options: str) -> list[dict[str, Any]]:
    command = ["bench", "serve", "--preset", "micro", "--device", "cpu", "--length", "4", "--tokens", "5"]
    result = CliRunner().invoke(app, [*command, *options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    return json.loads((out / "results.json").read_text())["shapes"]  # type: ignore[no-any-return]


def test_command(tmp_path: Path) -> None:
    shapes = run(tmp_path, "--clients", "1", "--clients", "3", "--answers", "2", "--contender", "ours")
    for shape, clients in zip(shapes, (1, 3), strict=True):
        assert [row["contender"] for row in shape["rows"]] == [bench.GRAPHS, bench.EAGER]
        for row in shape["rows"]:
            assert row["failure"] is None
            first, answers = (row["times"][name]["rounds_ms"] for name in (bench.FIRST, bench.ANSWER))
            assert (
                [len(each) for each in answers]
                == [len(each) for each in first]
                == [2 * clients] * bench.ROUNDS
            )
            assert all(
                0 < a < b for pair in zip(first, answers, strict=True) for a, b in zip(*pair, strict=True)
            )
            # The best round: all its tokens over a time that is no shorter than its longest answer.
            assert 0 < row["tokens/s"] <= 1.001e3 * 5 * 2 * clients / min(map(max, answers))
            assert 1 <= row["answers at once"] <= clients
        (ratio,) = shape["ratios"]
        assert ratio["value"] == pytest.approx(shape["rows"][0]["tokens/s"] / shape["rows"][1]["tokens/s"])


@pytest.mark.parametrize(
    ("place", "failure"),
    [("_compute", "MemoryError: no room"), ("start", "RuntimeError: MemoryError: no room")],
    ids=["a capture", "an answer"],
)
def test_a_failure_is_a_row(
    place: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(bench.GraphGenerator, place, out_of_memory)
    (shape,) = run(tmp_path, "--clients", "1", "--answers", "1", "--contender", "ours, CUDA graphs")
    assert shape["rows"][0]["failure"] == failure
    assert not shape["rows"][0]["times"]


def test_ratios_over_the_peers() -> None:
    shape = ModelShape("micro", 1, 4, "silu")
    rates = {bench.GRAPHS: 6.0, bench.EAGER: 3.0, bench.PEER: 2.0, bench.PEER_GRAPHS: 4.0}
    rows = [Row(name, "ours", "grmoe", facts={"tokens/s": rate}) for name, rate in rates.items()]
    assert [ratio.value for ratio in bench.compare(shape, rows).ratios] == [2.0, 3.0, 1.5]


def test_the_peer_has_graphs_on_a_gpu() -> None:
    def names(device: str) -> list[str]:
        shape = ModelShape("micro", 1, 4, "silu")
        return [c.name for c in bench.contenders(shape, torch.device(device), torch.float32, None)]

    assert names("cpu") == [bench.GRAPHS, bench.EAGER, bench.PEER]
    assert names("cuda") == [*names("cpu"), bench.PEER_GRAPHS]


def test_no_size_is_captured_in_the_timed_part() -> None:
    """Whatever numbers of answers meet in a step."""
    generator = bench.GraphGenerator(ours(ModelShape("micro", 1, 4, "silu").config("grassmann")), rows=9)
    server = bench.Own(generator, 9)
    try:
        server.prepare(8, 4, 10)
        assert sorted(generator.replays) == [(rows, 32) for rows in (1, 2, 4, 8)]
        server.prepare(9, 4, 10)
        sizes = set(generator.replays)
        load(server, prompts(9, 2, 4, 64, seed=1), 10)
        assert set(generator.replays) == sizes
    finally:
        server.close()


# -- the load ----------------------------------------------------------------------------------------------------


class Script:
    """A server that answers in the order in which it was asked, one answer at a time."""

    def __init__(self, short: bool = False) -> None:
        self.asked: list[list[int]] = []
        self.left: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.short, self.clock = short, iter(range(1000))

    def prepare(self, clients: int, length: int, tokens: int) -> None: ...

    def ask(self, prompt: list[int], tokens: int) -> Hashable:
        self.asked.append(prompt)
        self.left.put(len(self.asked))
        self.tokens = tokens
        return len(self.asked)

    def answer(self) -> Answer:
        return Answer(self.left.get(), next(self.clock), next(self.clock), self.tokens - self.short)

    def close(self) -> None: ...


def test_a_client_asks_again_when_it_is_answered() -> None:
    server, asked = Script(), prompts(2, 3, 4, 64, seed=0)
    seen = load(server, asked, 7)
    one, two = asked
    assert server.asked == [one[0], two[0], one[1], two[1], one[2], two[2]]
    assert len(seen.first) == len(seen.answer) == 6
    assert [b - a for a, b in zip(seen.first, seen.answer, strict=True)] == pytest.approx([1e3] * 6)
    assert seen.at_once == 1
    with pytest.raises(RuntimeError, match="an answer has 6 tokens, not 7"):
        load(Script(short=True), asked, 7)


def test_prompts_are_new_in_each_round() -> None:
    first, again = (prompts(2, 3, 4, 64, seed) for seed in (0, 1))
    assert len({tuple(prompt) for client in first + again for prompt in client}) == 12


def test_answers_at_once() -> None:
    assert Seen(spans=[(0, 2), (2, 3), (1, 2.5), (4, 9)]).at_once == 2


# -- transformers ------------------------------------------------------------------------------------------------


@pytest.fixture
def peer() -> Iterator[Peer]:
    torch.manual_seed(0)
    peer = Peer(olmoe(ModelShape("micro", 1, 4, "silu").config(), "sdpa").eval(), graphs=False)
    yield peer
    peer.close()


def test_the_peer_runs_all_clients_at_once(peer: Peer) -> None:
    """After one client too: transformers would keep a manager that computes one answer at a time."""
    for clients in (1, 3):
        peer.prepare(clients, 4, 24)
        seen = load(peer, prompts(clients, 2, 4, 64, seed=0), 24)
        assert len(seen.answer) == 2 * clients
        assert seen.at_once == clients
        assert peer.manager.continuous_batching_config.max_requests_per_batch == clients
    peer.close()
    assert peer.manager is None


def test_the_peer_is_measured(tmp_path: Path) -> None:
    plan = Plan(
        benchmark=bench.benchmark(),
        shapes=[ModelShape("micro", 2, 4, "silu")],
        device=torch.device("cpu"),
        dtype=torch.float32,
        rounds=1,
        out=tmp_path,
        wanted=[bench.PEER],
    )
    (result,) = bench.run(plan, tokens=8, answers=1)
    (row,) = result.rows
    assert row.failure is None
    assert [[len(each) for each in row.times[name].rounds] for name in (bench.FIRST, bench.ANSWER)] == [
        [2] * 3
    ] * 2
    assert 1 <= row.facts["answers at once"] <= 2


def test_the_peer_says_why_it_failed(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(peer.model, "forward", out_of_memory)
    peer.prepare(1, 4, 5)
    with pytest.raises(RuntimeError, match="no room"):
        load(peer, [[[1, 2, 3, 4]]], 5)
    with pytest.raises(RuntimeError, match="the manager stopped: no room"):  # and takes no more
        load(peer, [[[1, 2, 3, 4]]], 5)


def test_the_peer_has_room_for_the_load() -> None:
    config = settings(32, 128, 128, graphs=True)
    assert config.max_requests_per_batch == 32
    assert config.max_batch_tokens == 32 * 128
    assert config.num_blocks * config.block_size >= 32 * (128 + 128)
    assert config.use_cuda_graph is True
    assert settings(64, 1024, 8, graphs=False).max_batch_tokens == 8192
