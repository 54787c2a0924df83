"""A text as windows of one length.

Legend: W windows, S tokens per window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grmoe.checks import positive_int, require
from grmoe.probe.text import VALIDATION, Stream, open_stream
from grmoe.runs.open import LoadedModel

MIN_WINDOWS = 8  # with fewer, the standard error is not reliable


@dataclass(frozen=True)
class Text:
    """Windows of a text. Inputs are `rows_WS[:, :-1]`, targets `rows_WS[:, 1:]`."""

    name: str
    rows_WS: Tensor
    """int64, (windows, length + 1)."""
    domains_W: tuple[str, ...] = ()
    """The domain of most tokens of each window. Empty: not known."""

    @property
    def length(self) -> int:
        """Predicted tokens per window."""
        return self.rows_WS.shape[1] - 1

    @property
    def tokens(self) -> int:
        return len(self.rows_WS) * self.length

    @property
    def inputs_WS(self) -> Tensor:
        return self.rows_WS[:, :-1]

    def some(self, tokens: int) -> Text:
        """About `tokens` tokens, at least one window, spread evenly: the first windows may all be of one domain."""
        count = min(len(self.rows_WS), max(1, tokens // self.length))
        places = [i * len(self.rows_WS) // count for i in range(count)]
        return Text(
            self.name, self.rows_WS[places], tuple(self.domains_W[i] for i in places if self.domains_W)
        )

    def batches(self, device: torch.device) -> list[Tensor]:
        """Rows on the device, in batches that fit it."""
        # All in one copy: each copy waits until the device is done with what it was given before.
        return list(self.rows_WS.to(device).split(batch_rows(self.length, device)))


def batch_rows(length: int, device: torch.device) -> int:
    """Windows per forward pass: about 2,000 tokens on a CPU, 16,000 on a GPU."""
    return max(1, (16384 if device.type == "cuda" else 2048) // (length + 1))


def window_length(loaded: LoadedModel, length: int | None = None) -> int:
    """The requested length, or the one of training. Raises if it exceeds the model's context."""
    longest = loaded.model.config.max_position_embeddings
    length = loaded.length if length is None else positive_int("length", length)
    require(length <= longest, f"length must be at most the model's {longest}, got {length}")
    return length


def default_tokens(length: int, device: torch.device) -> int:
    """Tokens of each text: 8,192 on a CPU, 131,072 on a GPU, or eight windows where that is more."""
    return max(2**17 if device.type == "cuda" else 2**13, MIN_WINDOWS * length)


def window_starts(total: int, count: int, length: int) -> list[int]:
    """Where `count` windows begin, evenly spread over `total` tokens, or fewer if they do not fit.

    Spread, because neighbouring windows are similar.
    """
    places = total // length
    count = min(count, places)
    return [i * places // count * length for i in range(count)]


def read_windows(source: str | None, loaded: LoadedModel, length: int, tokens: int) -> Text:
    """`spread_windows` of a text. None is the validation split."""
    stream = open_stream([] if source is None else [source], loaded, tokens + 1)
    return spread_windows(source or VALIDATION, stream, length, tokens)


def spread_windows(name: str, stream: Stream, length: int, tokens: int) -> Text:
    """At most `tokens` tokens of a text, as windows spread evenly over it."""
    count = positive_int("tokens", tokens) // length
    starts = window_starts(stream.tokens - 1, count, length) if count else []
    advice = "give more --tokens" if count < MIN_WINDOWS else "give more text"
    require(
        len(starts) >= MIN_WINDOWS,
        f"text must hold at least {MIN_WINDOWS} windows of {length} tokens, got {len(starts)} from {name}: "
        f"{advice}, or a shorter --length",
    )
    return Text(name, cut_windows(stream, starts, length), window_domains(stream, starts, length))


def read_texts(
    sources: Sequence[str | None], loaded: LoadedModel, length: int | None, tokens: int | None
) -> list[Text]:
    """`read_windows` of several texts, with the model's own length and the default number of tokens for None."""
    length = window_length(loaded, length)
    tokens = default_tokens(length, loaded.model.device) if tokens is None else tokens
    return [read_windows(source, loaded, length, tokens) for source in sources]


def cut_windows(stream: Stream, starts: list[int], length: int) -> Tensor:
    """Rows (W, length + 1) that begin at `starts`."""
    return torch.from_numpy(np.stack([stream.read(start, start + length + 1) for start in starts]))


def window_domains(stream: Stream, starts: Sequence[int], length: int) -> tuple[str, ...]:
    """The domain of most predicted tokens of each window."""
    found = (np.bincount(stream.domains_of(start + 1, start + length + 1)).argmax() for start in starts)
    return tuple(stream.domain_names[number] for number in found)
