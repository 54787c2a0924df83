"""Perplexity of token streams: by token, word and byte.

With NLL = −Σ log p(token | the tokens before it in its window), in nats, over all tokens of a stream, each document's
end-of-text among them:

    token perplexity  exp(NLL / tokens)
    word perplexity   exp(NLL / words)      words: split by whitespace
    byte perplexity   exp(NLL / bytes)      bytes: of UTF-8
    bits per byte     NLL / (bytes · ln 2)

The first depends on the tokenizer; the others have the text alone below the fraction, so models with different
tokenizers can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from grmoe.evaluate.texts import Stream
from grmoe.head import IGNORED
from grmoe.model import GrmoeForCausalLM


@dataclass(frozen=True)
class Perplexity:
    nll: float  # nats, the sum
    tokens: int
    words: int
    bytes: int
    documents: int

    @property
    def loss(self) -> float:
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        return _exp(self.nll / self.words) if self.words else math.nan

    @property
    def byte_perplexity(self) -> float:
        return _exp(self.nll / self.bytes) if self.bytes else math.nan

    @property
    def bits_per_byte(self) -> float:
        return self.nll / (self.bytes * math.log(2)) if self.bytes else math.nan

    def __add__(self, other: Perplexity) -> Perplexity:
        return Perplexity(
            self.nll + other.nll,
            self.tokens + other.tokens,
            self.words + other.words,
            self.bytes + other.bytes,
            self.documents + other.documents,
        )

    def numbers(self) -> dict[str, float]:
        """Everything above by name."""
        derived = ("loss", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
        return {name: getattr(self, name) for name in (*self.__dataclass_fields__, *derived)}


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def windows(
    tokens: NDArray[np.int64], length: int, stride: int, batch: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(inputs, targets), both (b, s), in order; every token but the first is a target exactly once.

    Window w holds the inputs w·stride … w·stride + length − 1. Where it overlaps the one before, its targets are
    left out: what is scored has length − stride tokens of context at least, but for the start of the stream. The last
    window may be shorter and comes alone.
    """
    targets = len(tokens) - 1
    begins = range(0, max(1, targets - length + stride), stride)
    full = [b for b in begins if b + length <= targets]
    groups = [full[i : i + batch] for i in range(0, len(full), batch)]
    for group in [*groups, *([b] for b in begins[len(full) :])]:
        rows = np.stack([tokens[b : b + length + 1] for b in group])
        inputs, wanted = rows[:, :-1], rows[:, 1:].copy()
        for row, begin in enumerate(group):
            if begin:
                wanted[row, : length - stride] = IGNORED
        yield inputs, wanted


def count_windows(stream: Stream, length: int, stride: int) -> int:
    return len(range(0, max(1, len(stream.tokens) - 1 - length + stride), stride))


@torch.no_grad()
def measure(
    model: GrmoeForCausalLM,
    stream: Stream,
    length: int,
    stride: int,
    batch: int,
    watch: Callable[[int], None] = lambda done: None,
) -> Perplexity:
    """`stream` in windows of `length` tokens. `watch` is told how many windows are done.

    Windows cut through documents, and attention sees across an end-of-text, as in training.
    """
    nll = torch.zeros((), dtype=torch.float64, device=model.device)
    done = 0
    for inputs, wanted in windows(stream.tokens, length, stride, batch):
        ids, targets = (torch.from_numpy(a).to(model.device) for a in (inputs, wanted))
        count = int((wanted != IGNORED).sum())
        loss: Any = model(
            input_ids=ids, labels=targets, shift_labels=targets, use_cache=False, skip_logits=True
        ).loss
        nll += loss.double() * count
        done += len(inputs)
        watch(done)
    return Perplexity(nll.item(), len(stream.tokens) - 1, stream.words, stream.bytes, stream.documents)
