"""Serving under load: clients that each wait for their answer and then ask again, beside transformers.

Ours is the engine of `grmoe serve` with random weights, without HTTP and without a tokenizer. The peer is an equal
Olmoe under transformers' continuous batching (`bench.serve_peer`). Both get the same load (`bench.serve_load`). Answers
are greedy and have a fixed length.

Before the timing our graphs of every size that can occur are captured, and each contender carries the whole load once.
Then it carries it `ROUNDS` times, with other prompts. Rates are medians of these rounds.
"""

from __future__ import annotations

import gc
import queue
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from grmoe import checks
from grmoe.bench.measure import SEED, Contender, Result, Row, Runs
from grmoe.bench.models import ModelShape, olmoe, ours
from grmoe.bench.run import Benchmark, Plan
from grmoe.bench.serve_load import Answer, Server, load, prompts
from grmoe.bench.serve_peer import Peer
from grmoe.probe.timing import Ratio, Times
from grmoe.serve.answer_text import AnswerText
from grmoe.serve.batching import BatchGenerator, Sequence
from grmoe.serve.engine import Engine, Event, Failed, Job, Piece
from grmoe.serve.graphs import GraphGenerator
from grmoe.serve.sampling import Sampling, TokenSampler
from grmoe.terminal import Progress, Steps, silent

CLIENTS = (1, 8, 32)
ROUNDS = 3
GRAPHS, EAGER = "ours, CUDA graphs", "ours, without graphs"
PEER, PEER_GRAPHS = "Olmoe, continuous batching", "Olmoe, continuous batching, CUDA graphs"
FIRST, ANSWER = "first token", "answer"
FACTS = {"tokens/s": ",.0f", "ms per token": ".3f", "answers at once": ".0f"}


def contenders(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, rank: int | None
) -> list[Contender]:
    """On a CPU the peer has no graphs. Ours computes from the same buffers there, without a graph."""
    peers = [PEER, PEER_GRAPHS] if device.type == "cuda" else [PEER]
    own = [Contender(name, lambda: Runs({})) for name in (GRAPHS, EAGER)]
    return own + [Contender(name, lambda: Runs({}), "peer", "transformers") for name in peers]


def benchmark() -> Benchmark[ModelShape]:
    return Benchmark(name="serve", contenders=contenders, compare=compare, facts=FACTS)


def run(plan: Plan[ModelShape], progress: Progress = silent, *, tokens: int, answers: int) -> list[Result]:
    """Every contender at every number of clients (the shapes' `batch`). results.json is written after each."""
    checks.positive_int("tokens", tokens, at_least=2)
    checks.positive_int("answers", answers)
    plan = replace(plan, rounds=ROUNDS)
    plan.out.mkdir(parents=True, exist_ok=True)
    listed = plan.contenders(plan.shapes[0])
    rows = {shape: [Row(c.name, c.kind, c.library) for c in listed] for shape in plan.shapes}
    report = Steps(progress, len(listed) * (1 + len(plan.shapes)))
    results: list[Result] = []
    for i, contender in enumerate(listed):
        mine = {shape: of_shape[i] for shape, of_shape in rows.items()}
        _measure(contender.name, plan, mine, tokens, answers, report)
        gc.collect()
        torch.cuda.empty_cache()
        results = [plan.benchmark.compare(shape, rows[shape][: i + 1]) for shape in plan.shapes]
        for result in results:
            result.extra |= {"tokens": tokens, "answers": answers}
        plan.write(results)
    return results


def _measure(
    name: str, plan: Plan[ModelShape], rows: dict[ModelShape, Row], tokens: int, answers: int, report: Steps
) -> None:
    """One contender at all numbers of clients. What fails becomes the reason in its rows."""
    built, server = Row(name, "ours", "grmoe"), None
    with built.catching():
        server = _server(name, plan, most=max(shape.batch for shape in rows))
    report(f"{name}: built")
    try:
        for shape, row in rows.items():
            row.failure = built.failure
            if server is not None:
                with row.catching():
                    _fill(row, server, shape, tokens, answers)
            report(f"{name}: {shape.batch} clients")
    finally:
        if server is not None:
            server.close()


def _fill(row: Row, server: Server, shape: ModelShape, tokens: int, answers: int) -> None:
    """Measure a server at one number of clients."""
    server.prepare(shape.batch, shape.length, tokens)
    vocabulary = shape.config().vocab_size
    # The first round compiles what is left to compile.
    _, *rounds = [
        load(server, prompts(shape.batch, answers, shape.length, vocabulary, SEED + i), tokens)
        for i in range(1 + ROUNDS)
    ]
    row.times = {
        FIRST: Times([seen.first for seen in rounds]),
        ANSWER: Times([seen.answer for seen in rounds]),
    }
    row.facts["tokens/s"] = statistics.median(len(seen.answer) * tokens / seen.seconds for seen in rounds)
    row.facts["ms per token"] = row.times[ANSWER].median / tokens
    row.facts["answers at once"] = min(seen.at_once for seen in rounds)


def _server(name: str, plan: Plan[ModelShape], most: int) -> Server:
    """Build a contender with weights. most: clients that it must answer at once."""
    shape = plan.shapes[0]
    if name in (PEER, PEER_GRAPHS):
        return Peer(_model(plan, lambda: olmoe(shape.config(), "sdpa")), graphs=name == PEER_GRAPHS)
    model = _model(plan, lambda: ours(shape.config("grassmann")))
    return Own(GraphGenerator(model, most) if name == GRAPHS else BatchGenerator(model, together=True), most)


def _model(plan: Plan[ModelShape], build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(SEED)
    with torch.device(plan.device):
        model = build().eval()
        nn.Module.to(model, plan.dtype)  # routers stay in fp32
    return model


class NoText(AnswerText):
    """In place of a tokenizer: an answer without text."""

    def __init__(self) -> None:
        super().__init__(None, [])

    def add(self, tokens: list[int], last: bool) -> tuple[str, bool]:
        return "", False


@dataclass(eq=False)
class Request:
    """Notes when its tokens come. Called in the engine's thread."""

    done: queue.SimpleQueue[Answer | Failed]
    times: list[float] = field(default_factory=list)
    tokens: int = 0

    def deliver(self, event: Event) -> None:
        if isinstance(event, Piece):
            self.times.append(perf_counter())
            self.tokens += len(event.tokens)
        elif isinstance(event, Failed):
            self.done.put(event)
        else:
            self.done.put(Answer(self, self.times[0], self.times[-1], self.tokens))


class Own:
    """Our engine as a `Server`."""

    def __init__(self, generator: BatchGenerator, most: int) -> None:
        generator.repeat_ties = False
        self.engine = Engine(generator, concurrency=most, queue=most)
        self.engine.ends = set()  # answers have a fixed length
        self.numbers = tuple(generator.model.config.layer_numbers(None))
        self.done: queue.SimpleQueue[Answer | Failed] = queue.SimpleQueue()
        self.engine.start()

    def prepare(self, clients: int, length: int, tokens: int) -> None:
        self.done = queue.SimpleQueue()  # answers that a failed load has left behind are not counted
        generator = self.engine.generator
        if isinstance(generator, GraphGenerator):
            generator.capture(range(length + 1, length + tokens), clients)

    def ask(self, prompt: list[int], tokens: int) -> Request:
        request = Request(self.done)
        job = Job(
            request=request,
            sequence=Sequence(prompt=prompt, numbers=self.numbers, sampler=TokenSampler(Sampling())),
            text=NoText(),
            max_tokens=tokens,
            stream=True,
            deliver=request.deliver,
        )
        self.engine.submit([job])
        return request

    def answer(self) -> Answer:
        done = self.done.get()
        if isinstance(done, Failed):
            raise RuntimeError(done.message)
        return done

    def close(self) -> None:
        self.engine.stop()


def compare(shape: ModelShape, rows: list[Row]) -> Result:
    """Tokens/s of ours over the others'."""
    result = Result(shape, rows)
    rates = {row.name: row.facts["tokens/s"] for row in rows if "tokens/s" in row.facts}
    for other in (EAGER, PEER, PEER_GRAPHS):
        if GRAPHS in rates and other in rates:
            result.ratios.append(Ratio(f"tokens/s, {GRAPHS} over {other}", rates[GRAPHS] / rates[other]))
    return result
