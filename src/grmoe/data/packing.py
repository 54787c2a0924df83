"""How documents fill shards: a pure function of the sequence of documents and the bound on a shard.

The sources are cut into *ranges*. A range has at most one shard of each split, train and validation; both are closed
together, when one of them is full. So a range is all there is to remember of finished work: its shards, and the
position where the next one starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from grmoe.data.documents import Document, Position

SPLITS = ("train", "validation")
Tokens = NDArray[np.unsignedinteger]


@dataclass
class Tally:
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
    """Documents side by side. A piece is a document, or the part of one that is longer than a shard."""

    pieces: list[Tokens] = field(default_factory=list)
    domains: list[int] = field(default_factory=list)  # of each piece
    tokens: int = 0
    continues: bool = False  # the last piece's document goes on in the next shard
    tallies: dict[str, Tally] = field(default_factory=dict)  # by domain; a cut document counts where it ends


@dataclass
class Range:
    shards: dict[str, Shard]
    skipped: Counter[str]  # rows that are no documents, by reason
    domains: list[str]  # all known so far: a domain's id is its place here
    end: Position | None  # where the next range starts; None: nowhere


class Packer:
    def __init__(self, shard_tokens: int, domains: list[str]) -> None:
        self.shard_tokens = shard_tokens
        self.ids = {name: i for i, name in enumerate(domains)}
        self._open()

    def _open(self) -> None:
        self.shards: dict[str, Shard] = {}
        self.skipped: Counter[str] = Counter()

    def _close(self, end: Position | None) -> Range:
        shards = {split: self.shards[split] for split in SPLITS if split in self.shards}
        closed = Range(shards, self.skipped, list(self.ids), end)
        self._open()
        return closed

    def skip(self, reason: str) -> None:
        self.skipped[reason] += 1

    def add(self, document: Document, tokens: Tokens, first: int = 0) -> Iterator[Range]:
        """Put a document (its tokens, the end-of-text token last) into the open range; yields the ranges it closes.

        `first` is the token to begin with: what comes before it is in an earlier range.
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
        """What is left when the sources are exhausted; may be empty."""
        return self._close(None)
