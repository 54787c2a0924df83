"""A load on a server: clients that ask again as soon as their answer is complete. All servers get the same one.

Times are taken where tokens are computed, by one clock, so that they do not depend on how an answer is handed over.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import Protocol


@dataclass(frozen=True)
class Answer:
    """A complete answer. Times are those of `perf_counter`."""

    request: Hashable
    """What `Server.ask` returned."""
    first: float
    """When its first token was there."""
    last: float
    tokens: int


class Server(Protocol):
    """What is measured."""

    def prepare(self, clients: int, length: int, tokens: int) -> None:
        """Do what the first requests would otherwise wait for."""

    def ask(self, prompt: list[int], tokens: int) -> Hashable:
        """Queue a request, without waiting."""

    def answer(self) -> Answer:
        """Wait for the next complete answer, of any request. Raise what kept a request from being answered."""

    def close(self) -> None: ...


@dataclass
class Seen:
    """What the clients saw: milliseconds from the request to the first token and to the last, of each answer."""

    first: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    """From the first token to the last."""
    seconds: float = 0.0
    """From the first request to the last answer."""

    @property
    def at_once(self) -> int:
        """The most answers that were under way at the same time."""
        ends = [(end, -1) for _, end in self.spans]
        changes = sorted([(begin, 1) for begin, _ in self.spans] + ends)
        return max(accumulate(change for _, change in changes))


def prompts(clients: int, answers: int, length: int, vocabulary: int, seed: int) -> list[list[list[int]]]:
    """The prompts of each client."""
    draw = random.Random(seed)
    return [
        [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(answers)] for _ in range(clients)
    ]


def load(server: Server, asked: list[list[list[int]]], tokens: int) -> Seen:
    """Each client asks for its prompts, one after the other. One thread plays all clients: many would get in the way
    of the server's own."""
    seen, left = Seen(), [iter(prompts) for prompts in asked]
    waiting: dict[Hashable, tuple[int, float]] = {}  # the client, and when it asked

    def ask(client: int) -> None:
        prompt = next(left[client], None)
        if prompt is not None:
            start = perf_counter()
            waiting[server.ask(prompt, tokens)] = client, start

    begun = perf_counter()
    for client in range(len(asked)):
        ask(client)
    while waiting:
        done = server.answer()
        client, start = waiting.pop(done.request)
        ask(client)
        if done.tokens != tokens:
            raise RuntimeError(f"an answer has {done.tokens} tokens, not {tokens}")
        seen.first.append(1e3 * (done.first - start))
        seen.answer.append(1e3 * (done.last - start))
        seen.spans.append((done.first, done.last))
    seen.seconds = perf_counter() - begun
    return seen
