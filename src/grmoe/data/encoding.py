"""From documents to tokens: the one rule that every command uses, and its parallel form for `grmoe prepare`.

`DocumentEncoder` is the rule. `encode_documents` applies it in several processes. Batches return in the order they
were read, so the number of workers changes the time and nothing else. Only a few batches are in flight at once, so a
large corpus never has to fit into memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from grmoe.data.chat import ChatEncoder
from grmoe.data.cutting import PIECE, cut_text
from grmoe.data.documents import Document, Skipped
from grmoe.data.packing import Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH_BYTES = 2**19  # large enough to hide the cost of moving a batch between processes
_IN_FLIGHT_BYTES = 2**27  # of text given to workers: documents may be long
_GROUP = 2**20  # characters encoded at once
Row = Document | Skipped


class DocumentEncoder:
    """Turns the text of a document into tokens, and appends the end-of-text token.

    Special tokens inside the text are plain text: a document that quotes "<|endoftext|>" does not end there.

        encode = DocumentEncoder(tokenizer, end_of_text)
        ids = encode("Some text.")

    `tokenizer` is a `tokenizers.Tokenizer` (`.backend_tokenizer` of a fast tokenizer of transformers). It stays as it
    is: the encoder works on a copy. A text of more than 65,536 characters is encoded in pieces, cut between words,
    because a tokenizer takes a hundred bytes of memory per character.
    """

    def __init__(self, tokenizer: Tokenizer, end_of_text: int, dtype: DTypeLike = np.int64) -> None:
        self.tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.end_of_text = end_of_text
        self.dtype = np.dtype(dtype)

    def __call__(self, text: str) -> NDArray[Any]:
        return self.batch([text])[0]

    def batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of each text. Faster than one call per text."""
        found: list[list[NDArray[Any]]] = [[] for _ in texts]
        for group in _groups((i, piece) for i, text in enumerate(texts) for piece in cut_text(text, PIECE)):
            pieces = [piece for _, piece in group]
            encoded = self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
            for (i, _), encoding in zip(group, encoded, strict=True):
                found[i].append(np.array(encoding.ids, dtype=self.dtype))
        end = np.array([self.end_of_text], dtype=self.dtype)
        return [np.concatenate([*ids, end]) for ids in found]


def _groups(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    group: list[tuple[int, str]] = []
    size = 0
    for number, piece in pieces:
        group.append((number, piece))
        size += len(piece)
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


class Encoder(Protocol):
    """Turns texts into tokens, or into the reason why a text has none."""

    def batch(self, texts: Sequence[str]) -> Sequence[Tokens | str]: ...


@dataclass(frozen=True)
class EncoderFile:
    """What a worker process needs to build its own encoder."""

    folder: Path
    """Of the tokenizer."""
    end_of_text: int
    dtype: np.dtype[np.unsignedinteger]
    chat: bool = False

    def open(self) -> Encoder:
        if self.chat:
            return ChatEncoder(self.folder, self.end_of_text, self.dtype)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        return DocumentEncoder(tokenizer, self.end_of_text, self.dtype)


@dataclass(frozen=True)
class _InFlight:
    """A batch that a worker is encoding. `tokens` is None if the batch has no document."""

    rows: list[Row]
    size: int
    """Bytes of text."""
    tokens: Future[Sequence[Tokens | str]] | None

    def result(self) -> Iterator[tuple[Row, Tokens | str | None]]:
        return _pair(self.rows, [] if self.tokens is None else self.tokens.result())


def encode_documents(
    rows: Iterable[Row], encoder_file: EncoderFile, workers: int
) -> Iterator[tuple[Row, Tokens | str | None]]:
    """Yield every row with its tokens, in the order of `rows`. Skipped rows have no tokens (None).

    In place of tokens may be the reason why a document has none.
    """
    if workers == 1:
        encoder = encoder_file.open()
        for batch in _batches(rows):
            yield from _pair(batch, encoder.batch(_texts(batch)))
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(encoder_file,),
    )
    in_flight: deque[_InFlight] = deque()
    try:
        for batch in _batches(rows):
            texts = _texts(batch)
            tokens = pool.submit(_encode_in_worker, texts) if texts else None
            in_flight.append(_InFlight(batch, _size(batch), tokens))
            while len(in_flight) > 3 * workers or sum(b.size for b in in_flight) > _IN_FLIGHT_BYTES:
                yield from in_flight.popleft().result()
        while in_flight:
            yield from in_flight.popleft().result()
    except BrokenProcessPool as error:
        raise OSError(
            "a worker process died (killed, or out of memory); run the same command again to continue, "
            "with fewer --workers if memory is short"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += row.size if isinstance(row, Document) else 0
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(batch: list[Row]) -> int:
    return sum(row.size for row in batch if isinstance(row, Document))


def _texts(batch: list[Row]) -> list[str]:
    return [row.text for row in batch if isinstance(row, Document)]


def _pair(batch: list[Row], tokens: Sequence[Tokens | str]) -> Iterator[tuple[Row, Tokens | str | None]]:
    remaining = iter(tokens)
    for row in batch:
        yield row, next(remaining) if isinstance(row, Document) else None


# Each worker process builds its encoder once and keeps it between batches.
_worker_encoder: Encoder | None = None


def _start_worker(encoder_file: EncoderFile) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is already one process per core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker_encoder = encoder_file.open()


def _exit_with_parent() -> None:
    """Exit when the main process dies: a killed process cannot stop its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(texts: list[str]) -> Sequence[Tokens | str]:
    assert _worker_encoder is not None
    return _worker_encoder.batch(texts)
