"""Text to measure a model on. Every command reads and tokenises a text here, with the rule of `grmoe prepare`.

A text is named by a string: "validation" is the split a run was validated on; a folder of `grmoe prepare` is its
held-out split; anything else is a source of `grmoe prepare` (.txt, .jsonl, .parquet), tokenised on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from grmoe.checks import positive_int, require
from grmoe.data import TokenDataset
from grmoe.data.documents import Document, Reader
from grmoe.data.encoding import DocumentEncoder
from grmoe.data.shards import INDEX
from grmoe.data.sources import Unit, find_units
from grmoe.runs.open import LoadedModel

VALIDATION = "validation"


@dataclass(frozen=True)
class TokenDocument:
    domain: str
    ids: NDArray[np.int64]
    """End-of-text is the last token."""
    text: str | None
    """None for prepared tokens, which come without their text."""


class Stream(Protocol):
    """Tokens of documents one after another, each with its domain. `TokenDataset` is one."""

    @property
    def domain_names(self) -> list[str]: ...

    @property
    def tokens(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[np.int64]: ...
    def domains_of(self, start: int, stop: int) -> NDArray[np.int64]: ...


class MemoryStream:
    """A `Stream` of documents held in memory."""

    def __init__(self, documents: Sequence[TokenDocument]) -> None:
        names: dict[str, int] = {}
        domains = [np.full(len(d.ids), names.setdefault(d.domain, len(names))) for d in documents]
        self._ids = np.concatenate([d.ids for d in documents])
        self._domains = np.concatenate(domains).astype(np.int64)
        self.domain_names, self.tokens = list(names), len(self._ids)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        return self._ids[start:stop]

    def domains_of(self, start: int, stop: int) -> NDArray[np.int64]:
        return self._domains[start:stop]


def document_encoder(loaded: LoadedModel) -> DocumentEncoder:
    """The rule of `grmoe prepare` with the model's own tokenizer."""
    end = loaded.tokenizer.eos_token_id
    require(end is not None, f"the tokenizer of {loaded.path} has no end-of-text token (eos_token)")
    return DocumentEncoder(loaded.tokenizer.backend_tokenizer, int(end))


def _prepared_split(source: str | None, loaded: LoadedModel) -> TokenDataset | None:
    """Prepared tokens that `source` names; None where it names files to be tokenised.

    Of a prepared folder this is the held-out split, or all of it where nothing was held out.
    """
    if source is None or source == VALIDATION:
        data = loaded.held_out()
        require(data.tokens > 0, f"the data of {loaded.path} has no validation split: give --text FILE")
        return data
    if not (Path(source) / INDEX).is_file():
        return None
    held_out = TokenDataset(source, "validation")
    data = held_out if held_out.tokens else TokenDataset(source, "train")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(data.tokenizer_folder)
    require(
        tokenizer.get_vocab() == loaded.tokenizer.get_vocab(),
        f"{source} was prepared with another tokenizer than the model's: give the text files themselves",
    )
    return data


def read_documents(
    source: str | None, loaded: LoadedModel, skipped: Callable[[str], None] = lambda reason: None
) -> Iterator[TokenDocument]:
    """Every document of a text, in order. skipped: called with the reason for each row that is not a document."""
    data = _prepared_split(source, loaded)
    if data is not None:
        for domain, ids in data.iter_documents():
            yield TokenDocument(domain, ids, None)
        return
    assert source is not None
    yield from _read_units(find_units([source]), loaded, skipped)


def open_stream(sources: Sequence[str], loaded: LoadedModel, tokens: int) -> Stream:
    """Texts as one stream. No source means the validation split.

    Files are read up to about `tokens` tokens, an equal share of each file, so that no file crowds out the others. What
    short files lack is taken from longer ones.
    """
    positive_int("tokens", tokens)
    if len(sources) <= 1:
        data = _prepared_split(sources[0] if sources else None, loaded)
        if data is not None:
            return data
    documents = _equal_shares(find_units(list(sources)), loaded, tokens)
    require(bool(documents), f"text must hold a document, got none in {', '.join(sources)}")
    return MemoryStream(documents)


def _equal_shares(units: Sequence[Unit], loaded: LoadedModel, tokens: int) -> list[TokenDocument]:
    """Documents of about `tokens` tokens, by unit. Units that end before their share leave the rest to the others."""
    read: dict[int, list[TokenDocument]] = {}
    longer = list(range(len(units)))  # units that may hold more than was read
    missing = tokens
    while missing > 0 and longer:
        share = (missing + sum(_count(read.get(i, [])) for i in longer)) / len(longer)
        for i in list(longer):
            # From the start again: the files of many units cannot all stay open.
            read[i], found = [], 0
            for document in _read_units([units[i]], loaded):
                read[i].append(document)
                found += len(document.ids)
                if found >= share:
                    break
            else:
                longer.remove(i)
        missing = tokens - sum(map(_count, read.values()))
    return [document for i in range(len(units)) for document in read[i]]


def _count(documents: Sequence[TokenDocument]) -> int:
    return sum(len(document.ids) for document in documents)


def _read_units(
    units: list[Unit], loaded: LoadedModel, skipped: Callable[[str], None] = lambda reason: None
) -> Iterator[TokenDocument]:
    encode, size = document_encoder(loaded), loaded.model.config.vocab_size
    for row in Reader(units, [None] * len(units)).read():
        if isinstance(row, Document):
            ids = encode(row.text)
            require(ids.max() < size, f"token {ids.max()} is outside the model's vocabulary of {size}")
            yield TokenDocument(row.domain, ids, row.text)
        else:
            skipped(row.reason)
