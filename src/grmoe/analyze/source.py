"""The text that is analysed: windows of tokens, spread evenly over a stream, with types and domains.

Windows are cut out of the packed stream as in training, documents behind one another: no padding, which routers that
look across tokens would see.

Legend: S tokens of a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from grmoe.checks import positive_int, require
from grmoe.data import TokenDataset
from grmoe.data.documents import Document, Position, Reader
from grmoe.data.sources import find_units
from grmoe.probe.pieces import Pieces

CONTEXT = 64  # tokens before and after a window that help to type it: its first piece may end a word


class Stream(Protocol):
    """Tokens of documents behind one another, each with its domain."""

    names: list[str]  # of the domains
    tokens: int

    def read(self, start: int, stop: int) -> NDArray[np.int64]: ...
    def domains_of(self, start: int, stop: int) -> NDArray[np.int64]: ...


class Prepared:
    """The held-out split a run was validated on."""

    def __init__(self, data: TokenDataset) -> None:
        require(data.tokens > 0, f"{data.folder} ({data.split}) holds no tokens; give a text (--text)")
        self.names: list[str] = list(data.index["domains"])
        self.tokens = data.tokens
        self.read, self.domains_of = data.read, data.domains_of


class Texts:
    """Text files, JSON lines or parquet as `grmoe prepare` reads them; of each file an equal share of `tokens`."""

    def __init__(self, sources: Sequence[str | Path], tokenizer: Any, tokens: int) -> None:
        units = find_units([str(source) for source in sources])
        end = tokenizer.eos_token_id
        names: dict[str, int] = {}
        ids, domains = [], []
        for unit in units:
            found = 0
            for document in Reader([unit], [None], 0.0, "text", "domain", False).read(Position()):
                if not isinstance(document, Document):
                    continue
                of_document = tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids
                of_document += [end] if end is not None else []
                ids.append(np.array(of_document, dtype=np.int64))
                domains.append(np.full(len(of_document), names.setdefault(document.domain, len(names))))
                found += len(of_document)
                if found * len(units) >= tokens:
                    break
        require(bool(ids), f"text must hold something to read, got {', '.join(map(str, sources))}")
        self._ids, self._domains = np.concatenate(ids), np.concatenate(domains).astype(np.int64)
        self.names, self.tokens = list(names), len(self._ids)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        return self._ids[start:stop]

    def domains_of(self, start: int, stop: int) -> NDArray[np.int64]:
        return self._domains[start:stop]


@dataclass(frozen=True)
class Window:
    ids_S: NDArray[np.int64]
    types_S: NDArray[np.int8]
    domains_S: NDArray[np.int64]


def starts(total: int, tokens: int, length: int) -> list[int]:
    """Where windows begin: as many as hold `tokens`, or as there are, at even distances."""
    positive_int("tokens", tokens)
    places = total // length
    if places == 0:
        return [0]  # the one window there is, shorter than asked for
    wanted = min(places, -(-tokens // length))
    return [i * places // wanted * length for i in range(wanted)]


def windows(stream: Stream, pieces: Pieces, tokens: int, length: int) -> Iterator[Window]:
    """`tokens` of the stream, rounded up to whole windows of `length`."""
    for start in starts(stream.tokens, tokens, length):
        stop = min(start + length, stream.tokens)
        first = max(0, start - CONTEXT)
        types = pieces.types(stream.read(first, min(stream.tokens, stop + CONTEXT)))
        yield Window(
            stream.read(start, stop), types[start - first : stop - first], stream.domains_of(start, stop)
        )
