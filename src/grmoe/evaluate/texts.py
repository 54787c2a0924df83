"""Texts as token streams, one a domain, with the counts that make tokenizers comparable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from grmoe.checks import require
from grmoe.data import TokenDataset
from grmoe.data.documents import Document, Position, Reader
from grmoe.data.sources import find_units

VALIDATION = "validation"  # as a text's name: the split a run was validated on


@dataclass(frozen=True)
class Stream:
    """The documents of one domain of a text: end-of-text, then each document closed by end-of-text.

    The first end-of-text is context alone, so that every token of the text is predicted once.
    """

    text: str
    domain: str
    tokens: NDArray[np.int64]
    documents: int
    words: int  # split by whitespace
    bytes: int  # of UTF-8


@dataclass
class _Domain:
    """A stream being collected."""

    pieces: list[NDArray[np.int64]] = field(default_factory=list)
    tokens: int = 0
    words: int = 0
    bytes: int = 0


class Streams:
    """Collects the documents of one text by domain, at most `most` tokens of each."""

    def __init__(self, name: str, tokenizer: Any, most: int | None = None) -> None:
        end = tokenizer.eos_token_id
        require(end is not None, "the model's tokenizer has no end-of-text token (eos_token)")
        self.name, self.end, self.most = name, int(end), most
        # A copy: the tokenizer itself stays as lm-evaluation-harness expects it.
        self.tokenizer: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        # A document that quotes "<|endoftext|>" does not end there.
        self.tokenizer.encode_special_tokens = True
        self.domains: dict[str, _Domain] = {}

    def add(self, domain: str, ids: NDArray[np.int64], text: str | None = None) -> None:
        """One document, its end-of-text last; `text` where it is at hand."""
        into = self.domains.setdefault(domain, _Domain())
        left = len(ids) if self.most is None else self.most - into.tokens
        if left <= 0:
            return
        if text is None or left < len(ids):
            ids = ids[:left]
            inner = ids[:-1] if ids[-1] == self.end else ids
            text = self.tokenizer.decode(inner.tolist(), skip_special_tokens=False)
        into.pieces.append(ids)
        into.tokens += len(ids)
        into.words += len(text.split())
        into.bytes += len(text.encode())

    def encode(self, text: str) -> NDArray[np.int64]:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return np.array([*ids, self.end], dtype=np.int64)

    def finished(self) -> list[Stream]:
        require(bool(self.domains), f"text {self.name} holds no document")
        start = np.array([self.end], dtype=np.int64)
        streams = []
        for name, domain in self.domains.items():
            require(domain.tokens >= 2, f"text {self.name} ({name}) must hold at least two tokens")
            tokens = np.concatenate([start, *domain.pieces])
            streams.append(Stream(self.name, name, tokens, len(domain.pieces), domain.words, domain.bytes))
        return streams


def from_files(
    source: str, tokenizer: Any, most: int | None = None, say: Callable[[str], None] = print
) -> list[Stream]:
    """Any source of `grmoe prepare` (a file or a folder of .txt and .jsonl, also .gz, .xz, .zst), by domain.

    A .txt file is one document. A row's domain is its field "domain"; without one, its file's name.
    """
    streams = Streams(source, tokenizer, most)
    units = find_units([source])
    reader = Reader(units, [None] * len(units), 0.0, "text", "domain", strict=False)
    skipped = 0
    for row in reader.read(Position()):
        if isinstance(row, Document):
            streams.add(row.domain, streams.encode(row.text), row.text)
        else:
            skipped += 1
    if skipped:
        say(f"{source}: {skipped} rows without a readable text left out")
    return streams.finished()


def from_run(data: TokenDataset, tokenizer: Any, most: int | None = None) -> list[Stream]:
    """A run's validation split; words and bytes are those of the tokens' own text."""
    streams = Streams(VALIDATION, tokenizer, most)
    for domain, ids in data.iter_documents():
        streams.add(domain, ids)
    return streams.finished()
