"""From documents to shards: a pure function of the documents and the size of a shard.

The sources are cut into *ranges*. A range has at most one shard of each split, train and validation. Both shards are
closed together, when one of them is full. So finished work is described by its ranges: their shards, and the position
where the next range starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from grmoe.data.documents import Document, Position, Skipped

SPLITS = ("train", "validation")
Tokens = NDArray[np.unsignedinteger]


@dataclass
class Tally:
    """Counts of one domain."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        self.documents += other.documents
        self.bytes += other.bytes
        self.tokens += other.tokens
        return self


@dataclass
class Shard:
    """Pieces of text. A piece is a document, or a part of a document that is longer than a shard."""

    pieces: list[Tokens] = field(default_factory=list)
    domains: list[int] = field(default_factory=list)
    """The domain of each piece."""
    tokens: int = 0
    continues: bool = False
    """The document of the last piece continues in the next shard."""
    tallies: dict[str, Tally] = field(default_factory=dict)
    """By domain. A document of several pieces counts where it ends."""


@dataclass
class Range:
    shards: dict[str, Shard]
    """By split."""
    skipped: Counter[str]
    """Number of rows that are not documents, by reason."""
    first_skipped: dict[str, str]
    """The first of them, as a sentence, by reason."""
    domains: list[str]
    """All domains found so far. The id of a domain is its index here."""
    end: Position | None
    """Where the next range starts. None: this is the last one."""


class Packer:
    """Puts documents into shards, and closes a range when a shard is full."""

    def __init__(self, shard_tokens: int, domains: list[str]) -> None:
        self.shard_tokens = shard_tokens
        self.ids = {name: i for i, name in enumerate(domains)}
        self._open()

    def _open(self) -> None:
        self.shards: dict[str, Shard] = {}
        self.skipped: Counter[str] = Counter()
        self.first_skipped: dict[str, str] = {}

    def _close(self, end: Position | None) -> Range:
        shards = {split: self.shards[split] for split in SPLITS if split in self.shards}
        closed = Range(shards, self.skipped, self.first_skipped, list(self.ids), end)
        self._open()
        return closed

    def skip(self, row: Skipped) -> None:
        self.skipped[row.reason] += 1
        self.first_skipped.setdefault(row.reason, row.sentence)

    def add(self, document: Document, tokens: Tokens, first: int = 0) -> Iterator[Range]:
        """Add a document (its tokens, with the end-of-text token) to the open range. Yields the ranges that are full.

        `first` is the first token to add: the tokens before it are in an earlier range.
        """
        shard = self.shards.get(document.split)
        if shard is not None and shard.tokens + len(tokens) - first > self.shard_tokens:
            yield self._close(document.at._replace(token=first))
        while len(tokens) - first > self.shard_tokens:
            stop = first + self.shard_tokens
            self._put(document, tokens[first:stop], ends=False)
            yield self._close(document.at._replace(token=stop))
            first = stop
        self._put(document, tokens[first:], ends=True)

    def _put(self, document: Document, piece: Tokens, ends: bool) -> None:
        shard = self.shards.setdefault(document.split, Shard())
        shard.pieces.append(piece)
        shard.domains.append(self.ids.setdefault(document.domain, len(self.ids)))
        shard.tokens += len(piece)
        shard.continues = not ends
        tally = shard.tallies.setdefault(document.domain, Tally())
        tally += Tally(int(ends), document.size if ends else 0, len(piece))

    def finish(self) -> Range:
        """The last range, which may be empty."""
        return self._close(None)
