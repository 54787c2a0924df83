"""Perplexity of a text per token, word and byte.

NLL = −Σ log p(token | the tokens before it in its window), in nats. The sum runs over all tokens, the end-of-text of
each document included.

    token perplexity  exp(NLL / tokens)
    word perplexity   exp(NLL / words)      words: split by whitespace
    byte perplexity   exp(NLL / bytes)      bytes: of UTF-8
    bits per byte     NLL / (bytes · ln 2)

Token perplexity depends on the tokenizer. The others divide by properties of the text, so they compare models with
different tokenizers.

Legend: B windows per batch, S tokens per window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from grmoe.evaluate.texts import DomainText
from grmoe.head import IGNORED
from grmoe.model import GrmoeForCausalLM


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """A model's predictions of a text. NaN where there is nothing to divide by."""

    nll: float
    """The sum, nats."""
    tokens: int
    words: int
    bytes: int
    documents: int
    loss: float = field(init=False)
    """NLL / tokens."""
    perplexity: float = field(init=False)
    word_perplexity: float = field(init=False)
    byte_perplexity: float = field(init=False)
    bits_per_byte: float = field(init=False)

    def __post_init__(self) -> None:
        derived = {
            "loss": self.nll / self.tokens,
            "perplexity": _exp(self.nll / self.tokens),
            "word_perplexity": _exp(self.nll / self.words) if self.words else math.nan,
            "byte_perplexity": _exp(self.nll / self.bytes) if self.bytes else math.nan,
            "bits_per_byte": self.nll / (self.bytes * math.log(2)) if self.bytes else math.nan,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __add__(self, other: Perplexity) -> Perplexity:
        """Both texts as one."""
        counts = ("nll", "tokens", "words", "bytes", "documents")
        return Perplexity(**{name: getattr(self, name) + getattr(other, name) for name in counts})


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def windows(
    tokens: NDArray[np.int64], length: int, stride: int, batch: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield (inputs, targets), both (B, S), in order. Every token but the first is a target exactly once.

    Window w holds the inputs w·stride … w·stride + length − 1. Targets that the window before it has scored are
    ignored, so a scored token has at least length − stride tokens of context, except at the start of the text. The
    last window may be shorter; it is a batch of its own.
    """
    targets = len(tokens) - 1
    starts = range(0, max(1, targets - length + stride), stride)
    full = [start for start in starts if start + length <= targets]
    groups = [full[i : i + batch] for i in range(0, len(full), batch)]
    for group in [*groups, *([start] for start in starts[len(full) :])]:
        rows = np.stack([tokens[start : start + length + 1] for start in group])
        inputs, wanted = rows[:, :-1], rows[:, 1:].copy()
        for row, start in enumerate(group):
            if start:
                wanted[row, : length - stride] = IGNORED
        yield inputs, wanted


def count_windows(text: DomainText, length: int, stride: int) -> int:
    return len(range(0, max(1, len(text.tokens) - 1 - length + stride), stride))


@torch.no_grad()
def measure_text(
    model: GrmoeForCausalLM,
    text: DomainText,
    length: int,
    stride: int,
    batch: int,
    done: Callable[[int], None] = lambda windows: None,
) -> Perplexity:
    """Perplexity at the model's present setting. done: called with the number of windows of each batch.

    Windows cut through documents, and attention sees across an end-of-text, as in training.
    """
    nll = torch.zeros((), dtype=torch.float64, device=model.device)
    for inputs, wanted in windows(text.tokens, length, stride, batch):
        ids_BS, targets_BS = (torch.from_numpy(a).to(model.device) for a in (inputs, wanted))
        # With router logits, which a configuration may ask for, the loss would include the routers' own.
        loss: Any = model(
            input_ids=ids_BS, labels=targets_BS, shift_labels=targets_BS, use_cache=False, skip_logits=True,
            output_router_logits=False,
        ).loss  # fmt: skip
        nll += loss.double() * int((wanted != IGNORED).sum())
        done(len(inputs))
    return Perplexity(
        nll=nll.item(),
        tokens=len(text.tokens) - 1,
        words=text.words,
        bytes=text.bytes,
        documents=text.documents,
    )
