"""Which jobs the engine starts together, and what a failure costs."""

from __future__ import annotations

from typing import Any

import pytest
from small_model import make_model

from grmoe.serve.answer_text import AnswerText
from grmoe.serve.batching import BatchGenerator, Sequence
from grmoe.serve.engine import Engine, Event, Failed, Finished, Job
from grmoe.serve.sampling import Sampling, TokenSampler


class Recorder(BatchGenerator):
    """Takes up to three prompts at once. Notes who started together, and who took a step."""

    def __init__(self, bad: int | None = None, together_fails: bool = False) -> None:
        super().__init__(make_model(), together=True)
        self.bad, self.together_fails = bad, together_fails
        self.started: list[list[int]] = []
        self.stepped: list[int] = []

    def takes(self, sequences: list[Sequence]) -> bool:
        return len(sequences) <= 3

    def start(self, sequences: list[Sequence]) -> None:
        names = [s.prompt[0] for s in sequences]
        if self.bad in names or (self.together_fails and len(names) > 1):
            raise RuntimeError("out of memory")
        self.started.append(names)
        for sequence in sequences:
            sequence.tokens.append(1)
            sequence.started = True

    def step(self, sequences: list[Sequence]) -> None:
        self.stepped.append(len(sequences))
        for sequence in sequences:
            sequence.tokens.append(1)


def run(generator: Recorder, requests: list[int], concurrency: int = 4) -> dict[int, list[Event]]:
    """One job per number, of that request. All wait before the engine starts. Events by job."""
    engine = Engine(generator, concurrency=concurrency, queue=len(requests))
    events: dict[int, list[Event]] = {i: [] for i in range(len(requests))}
    jobs = [
        Job(
            request=requests[i],
            sequence=Sequence(prompt=[i], numbers=(), sampler=TokenSampler(Sampling())),
            text=AnswerText(Letters(), []),
            max_tokens=3,
            stream=False,
            deliver=events[i].append,
        )
        for i in range(len(requests))
    ]
    engine.waiting.extend(jobs)
    engine.start()
    while not all(any(isinstance(e, Finished | Failed) for e in found) for found in events.values()):
        assert engine.alive
    engine.stop()
    return events


class Letters:
    """A tokenizer with one letter per token."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "a" * len(tokens)


def test_waiting_prompts_start_together_up_to_the_limits() -> None:
    generator = Recorder()
    events = run(generator, [0, 1, 2, 3, 4])
    assert all(found[-1] == Finished("length") for found in events.values())
    # Three at once by the generator, then one more: four run at most. The fifth starts when one has ended.
    assert generator.started[:2] == [[0, 1, 2], [3]]
    assert generator.stepped[:2] == [3, 4]
    assert generator.started[2:] == [[4]]


def test_a_request_with_many_prompts_leaves_room() -> None:
    one, other = 1000, 2000
    generator = Recorder()
    run(generator, [one, one, one, other])
    assert generator.started[0] == [0, 3, 1]


@pytest.mark.parametrize("together_fails", [False, True])
def test_what_fails_together_is_tried_alone(together_fails: bool) -> None:
    generator = Recorder(bad=1, together_fails=together_fails)
    events = run(generator, [0, 1, 2])
    assert events[1] == [Failed(500, "RuntimeError: out of memory")]
    assert events[0][-1] == events[2][-1] == Finished("length")
    assert generator.started == [[0], [2]]
