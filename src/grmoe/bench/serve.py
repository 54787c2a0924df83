"""Serving under load: clients that each wait for their answer and then ask again, beside transformers.

Ours is the engine of `grmoe serve` with random weights, without HTTP and without a tokenizer. Each client is a thread.
The peer is an equal Olmoe under transformers' continuous batching, which gets one prompt per client at once. Answers
are greedy and have a fixed length.
"""

from __future__ import annotations

import gc
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn

from grmoe import checks
from grmoe.bench.measure import SEED, Contender, Result, Row, Runs
from grmoe.bench.models import ModelShape, olmoe, ours
from grmoe.bench.run import Benchmark, Plan
from grmoe.probe.timing import Ratio, Times
from grmoe.serve.answer_text import AnswerText
from grmoe.serve.batching import BatchGenerator, Sequence
from grmoe.serve.engine import Engine, Failed, Finished, Job
from grmoe.serve.graphs import GraphGenerator
from grmoe.serve.sampling import Sampling, TokenSampler
from grmoe.terminal import Progress, Steps, silent

CLIENTS = (1, 8, 32)
GRAPHS, EAGER, PEER = "ours, CUDA graphs", "ours, without graphs", "Olmoe, continuous batching"
NAMES = (GRAPHS, EAGER, PEER)
FIRST, ANSWER = "first token", "answer"
FACTS = {"tokens/s": ",.0f", "ms per token": ".3f"}
# Asks a server for answers: (clients, prompt length, answers per client) → (ms to the first token, ms to the last).
Ask = Callable[[int, int, int], "Seen"]


def benchmark() -> Benchmark[ModelShape]:
    return Benchmark(
        name="serve",
        contenders=lambda shape, device, dtype, _: [
            Contender(name, lambda: Runs({}), *(("peer", "transformers") if name == PEER else ()))
            for name in NAMES
        ],
        compare=compare,
        facts=FACTS,
    )


@dataclass
class Seen:
    """What the clients saw: milliseconds to the first token and to the last, of each answer."""

    first: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """From the first request to the last answer."""


def run(plan: Plan[ModelShape], progress: Progress = silent, *, tokens: int, answers: int) -> list[Result]:
    """Every contender at every number of clients (the shapes' `batch`). results.json is written after each."""
    checks.positive_int("tokens", tokens, at_least=2)
    checks.positive_int("answers", answers)
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
    most = max(shape.batch for shape in rows)
    built = Row(name, "ours", "grmoe")
    with built.catching():
        ask, close = (_peer if name == PEER else _own)(name, plan, plan.shapes[0], most, tokens)
    report(f"{name}: built")
    for shape, row in rows.items():
        row.failure = built.failure
        if row.failure is None:
            with row.catching():
                ask(shape.batch, shape.length, 1)  # compiles and captures
                seen = ask(shape.batch, shape.length, answers)
                row.times = {FIRST: Times([seen.first]), ANSWER: Times([seen.answer])}
                if not seen.first:
                    del row.times[FIRST]
                row.facts["tokens/s"] = len(seen.answer) * tokens / seen.seconds
                row.facts["ms per token"] = row.times[ANSWER].median / tokens
        report(f"{name}: {shape.batch} clients")
    if built.failure is None:
        close()


def _model(plan: Plan[ModelShape], build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(SEED)
    with torch.device(plan.device):
        model = build().eval()
        nn.Module.to(model, plan.dtype)  # routers stay in fp32
    return model


def _prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    draw = random.Random(SEED)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


# -- ours ------------------------------------------------------------------------------------------------------


class NoText(AnswerText):
    """In place of a tokenizer: an answer without text."""

    def __init__(self) -> None:
        super().__init__(None, [])

    def add(self, tokens: list[int], last: bool) -> tuple[str, bool]:
        return "", False


def _own(
    name: str, plan: Plan[ModelShape], shape: ModelShape, most: int, tokens: int
) -> tuple[Ask, Callable[[], None]]:
    model = _model(plan, lambda: ours(shape.config("grassmann")))
    generator = GraphGenerator(model, most) if name == GRAPHS else BatchGenerator(model, together=True)
    generator.repeat_ties = False
    engine = Engine(generator, concurrency=most, queue=most)
    engine.ends = set()  # answers have a fixed length
    engine.start()
    numbers = tuple(model.config.layer_numbers(None))

    def answer(prompt: list[int], seen: Seen) -> None:
        """One request: returns when its answer is complete."""
        events: queue.Queue[Any] = queue.Queue()
        job = Job(
            request=object(),
            sequence=Sequence(prompt=prompt, numbers=numbers, sampler=TokenSampler(Sampling())),
            text=NoText(),
            max_tokens=tokens,
            stream=True,
            deliver=events.put,
        )
        start, first = perf_counter(), None
        engine.submit([job])
        while not isinstance(event := events.get(), Finished):
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            first = first or perf_counter()
        assert first is not None
        seen.first.append(1e3 * (first - start))
        seen.answer.append(1e3 * (perf_counter() - start))

    def ask(clients: int, length: int, answers: int) -> Seen:
        seen, failures = Seen(), []

        def client(prompts: list[list[int]]) -> None:
            try:
                for prompt in prompts:
                    answer(prompt, seen)
            except Exception as error:
                failures.append(error)

        prompts = _prompts(clients * answers, length, model.config.vocab_size)
        threads = [threading.Thread(target=client, args=(prompts[i::clients],)) for i in range(clients)]
        start = perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen.seconds = perf_counter() - start
        if failures:
            raise failures[0]
        return seen

    return ask, engine.stop


# -- transformers ----------------------------------------------------------------------------------------------


def _peer(
    name: str, plan: Plan[ModelShape], shape: ModelShape, most: int, tokens: int
) -> tuple[Ask, Callable[[], None]]:
    from transformers import GenerationConfig

    model = _model(plan, lambda: olmoe(shape.config(), "sdpa"))
    # No token ends an answer.
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def ask(clients: int, length: int, answers: int) -> Seen:
        seen, vocabulary = Seen(), model.config.vocab_size
        begun = perf_counter()
        for turn in range(answers):
            prompts = _prompts(clients * answers, length, vocabulary)[turn::answers]
            start = perf_counter()
            found = model.generate_batch(prompts, generation_config=config, persistent_manager=True)
            seen.answer += [1e3 * (perf_counter() - start)] * clients
            short = [len(each.generated_tokens) for each in found.values()]
            if short != [tokens] * clients:
                raise RuntimeError(f"answers of {short} tokens, not {tokens}")
        seen.seconds = perf_counter() - begun
        return seen

    def close() -> None:
        model.destroy_cached_continuous_batching_manager()

    return ask, close


def compare(shape: ModelShape, rows: list[Row]) -> Result:
    """Tokens/s of ours over the others'."""
    result = Result(shape, rows)
    rates = {row.name: row.facts["tokens/s"] for row in rows if "tokens/s" in row.facts}
    for other in (EAGER, PEER):
        if GRAPHS in rates and other in rates:
            result.ratios.append(Ratio(f"tokens/s, {GRAPHS} over {other}", rates[GRAPHS] / rates[other]))
    return result
