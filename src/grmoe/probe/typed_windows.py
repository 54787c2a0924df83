"""Windows of a text, with the type and the domain of every token.

Windows are cut from the packed stream, as in training: documents follow one another and nothing is padded. Padding
would change the gates of routers that look across tokens.

Legend: S tokens per window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grmoe.checks import positive_int
from grmoe.probe.pieces import Pieces
from grmoe.probe.text import Stream
from grmoe.probe.windows import window_starts

CONTEXT = 64  # tokens on either side that help to type a window: its first piece may end a word


@dataclass(frozen=True)
class TypedWindow:
    ids_S: NDArray[np.int64]
    types_S: NDArray[np.int8]
    """Places in `words.TYPES`."""
    domains_S: NDArray[np.int64]
    """Places in `Stream.domain_names`."""


def covering_starts(total: int, tokens: int, length: int) -> list[int]:
    """Where windows begin that hold at least `tokens` tokens together, at even distances over `total` tokens.

    A text shorter than `length` is one shorter window.
    """
    return window_starts(total, -(-positive_int("tokens", tokens) // length), length) or [0]


def typed_windows(
    stream: Stream, pieces: Pieces, starts: Sequence[int], length: int
) -> Iterator[TypedWindow]:
    """The windows of `length` tokens that begin at `starts`."""
    for start in starts:
        stop = min(start + length, stream.tokens)
        first = max(0, start - CONTEXT)
        types = pieces.types(stream.read(first, min(stream.tokens, stop + CONTEXT)))
        yield TypedWindow(
            stream.read(start, stop), types[start - first : stop - first], stream.domains_of(start, stop)
        )
