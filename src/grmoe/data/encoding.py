"""Documents to tokens, in several processes, in order.

Batches go out to the workers and come back in the order they were read, so the number of workers changes nothing but
the time. A few batches are under way at once, never the whole corpus.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from grmoe.data.documents import Document, Skipped
from grmoe.data.packing import Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_BYTES = 2**19  # large enough to hide the trip between processes
Row = Document | Skipped


@dataclass(frozen=True)
class Encoding:
    """How texts become tokens."""

    tokenizer_file: Path
    end_of_text: int
    dtype: np.dtype[np.unsignedinteger]

    def open(self) -> Tokenizer:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        # A document that quotes "<|endoftext|>" does not end there.
        tokenizer.encode_special_tokens = True
        return tokenizer

    def encode(self, tokenizer: Tokenizer, texts: list[str]) -> tuple[Tokens, NDArray[np.int64]]:
        """All tokens, each document closed by the end-of-text token, and the documents' lengths."""
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        end = np.array([self.end_of_text], dtype=self.dtype)
        pieces = [piece for e in encoded for piece in (np.array(e.ids, dtype=self.dtype), end)]
        lengths = np.array([len(e.ids) + 1 for e in encoded], dtype=np.int64)
        return np.concatenate(pieces), lengths


def batched(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += row.size if isinstance(row, Document) else 0
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encoded(rows: Iterable[Row], encoding: Encoding, workers: int) -> Iterator[tuple[Row, Tokens | None]]:
    """Every row with its tokens, None for those that are no documents, in the order of `rows`."""
    if workers == 1:
        tokenizer = encoding.open()
        for batch in batched(rows):
            texts = _texts(batch)
            yield from _unpack(batch, encoding.encode(tokenizer, texts) if texts else None)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(encoding,),
    )
    under_way: deque[tuple[list[Row], Future[tuple[Tokens, NDArray[np.int64]]] | None]] = deque()
    try:
        for batch in batched(rows):
            texts = _texts(batch)
            under_way.append((batch, pool.submit(_work, texts) if texts else None))
            if len(under_way) > 3 * workers:
                yield from _next(under_way)
        while under_way:
            yield from _next(under_way)
    except BrokenProcessPool as error:
        raise OSError(
            "a worker process died (killed by hand, or for want of memory); the same command goes on from here, "
            "perhaps with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _next(
    under_way: deque[tuple[list[Row], Future[tuple[Tokens, NDArray[np.int64]]] | None]],
) -> Iterator[tuple[Row, Tokens | None]]:
    batch, future = under_way.popleft()
    yield from _unpack(batch, None if future is None else future.result())


def _texts(batch: list[Row]) -> list[str]:
    return [row.text for row in batch if isinstance(row, Document)]


def _unpack(
    batch: list[Row], result: tuple[Tokens, NDArray[np.int64]] | None
) -> Iterator[tuple[Row, Tokens | None]]:
    starts = iter(()) if result is None else iter(np.cumsum(result[1]) - result[1])
    lengths = iter(()) if result is None else iter(result[1])
    for row in batch:
        if isinstance(row, Skipped) or result is None:
            yield row, None
        else:
            start = next(starts)
            yield row, result[0][start : start + next(lengths)]


# What a worker process keeps between batches.
_worker: tuple[Encoding, Tokenizer] | None = None


def _start_worker(encoding: Encoding) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core is parallel enough
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = encoding, encoding.open()


def _end_with_parent() -> None:
    """A main process that is killed cannot stop its workers: they watch for it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(texts: list[str]) -> tuple[Tokens, NDArray[np.int64]]:
    assert _worker is not None
    encoding, tokenizer = _worker
    return encoding.encode(tokenizer, texts)
