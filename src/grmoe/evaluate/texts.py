"""Texts as token streams, one per domain, with the counts of words and bytes that make tokenizers comparable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from grmoe.checks import require
from grmoe.probe.text import document_encoder, read_documents
from grmoe.runs.open import LoadedModel
from grmoe.tables import counted
from grmoe.terminal import note


@dataclass(frozen=True, kw_only=True)
class DomainText:
    """The documents of one domain of a text."""

    text: str
    domain: str
    tokens: NDArray[np.int64]
    """End-of-text, then every document with its end-of-text.

    The first token is only context, so every token of the text is predicted once.
    """
    documents: int
    words: int
    """Split by whitespace."""
    bytes: int
    """Of UTF-8."""


@dataclass
class _Domain:
    """A domain while its documents are read."""

    ids: list[NDArray[np.int64]] = field(default_factory=list)
    tokens: int = 0
    words: int = 0
    bytes: int = 0


def read_domains(sources: Iterable[str], loaded: LoadedModel, limit: int | None = None) -> list[DomainText]:
    """The domains of all texts. limit: most tokens of each domain; None takes all.

    The domain of a row is its field "domain", or the name of its folder (of the file, if the text is one file). A .txt
    file is one document.
    """
    return [domain for source in dict.fromkeys(sources) for domain in _read_text(source, loaded, limit)]


def _read_text(source: str, loaded: LoadedModel, limit: int | None) -> list[DomainText]:
    encoder = document_encoder(loaded)
    domains: dict[str, _Domain] = {}
    skipped: list[str] = []
    for document in read_documents(source, loaded, skipped.append):
        domain = domains.setdefault(document.domain, _Domain())
        left = len(document.ids) if limit is None else limit - domain.tokens
        if left <= 0:
            continue
        ids, text = document.ids[:left], document.text
        if text is None or left < len(document.ids):  # prepared tokens, or a document that was cut
            inner = ids[:-1] if ids[-1] == encoder.end_of_text else ids
            text = encoder.tokenizer.decode(inner.tolist(), skip_special_tokens=False)
        domain.ids.append(ids)
        domain.tokens += len(ids)
        domain.words += len(text.split())
        domain.bytes += len(text.encode())
    if skipped:
        reasons = ", ".join(f"{skipped.count(reason)} {reason}" for reason in dict.fromkeys(skipped))
        note(f"{source}: skipped {counted(len(skipped), 'row')} ({reasons})")
    require(bool(domains), f"text {source} must hold a document, got none")
    start = np.array([encoder.end_of_text], dtype=np.int64)
    found = []
    for name, domain in domains.items():
        require(
            domain.tokens >= 2, f"text {source} ({name}) must hold at least two tokens, got {domain.tokens}"
        )
        found.append(
            DomainText(
                text=source,
                domain=name,
                tokens=np.concatenate([start, *domain.ids]),
                documents=len(domain.ids),
                words=domain.words,
                bytes=domain.bytes,
            )
        )
    return found
