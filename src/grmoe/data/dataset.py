"""Prepared tokens: batches for training, which depend on the step number alone, and windows for validation."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grmoe.checks import one_of, positive_int, require
from grmoe.data.index import MASKED, read_index
from grmoe.data.packing import SPLITS, Tokens
from grmoe.data.shards import INDEX, check_shard, context_bit, read_pieces, token_dtype, verify_shard

_VERIFIED_WHEN_OPENED = 2**28  # bytes: a fraction of a second
_CHUNK = 2**20  # tokens read at once, because a document may have any length


class TokenDataset:
    """The tokens of one split of a prepared folder, as one stream over all its shards.

    Opening checks the index, the size and the header of every shard, and the checksums of up to 256 MiB of shards,
    spread over the split. `batches` checks the rest in the background. `verify=True` checks all of them at once. Every
    read checks that tokens lie in the vocabulary. A shard is mapped into memory when it is first read.
    """

    def __init__(self, folder: str | Path, split: str = "train", verify: bool = False) -> None:
        self.folder = Path(folder)
        self.split = one_of("split", split, SPLITS)
        self.index = read_index(self.folder)
        self.vocab_size: int = self.index["tokenizer"]["vocab_size"]
        self.end_of_text: int = self.index["tokenizer"]["end_of_text"]
        self.tokenizer_folder = self.folder / self.index["tokenizer"]["folder"]
        self.masked: bool = self.index["version"] == MASKED
        """Whether a loss counts on some tokens only: those that an assistant says in a conversation."""
        self._dtype = token_dtype(self.vocab_size, self.masked)
        content = self.index["splits"][split]
        self.tokens: int = content["tokens"]
        self.documents: int = content["documents"]
        self.domain_tokens: dict[str, int] = {
            name: tally["tokens"] for name, tally in content["domains"].items()
        }
        self.domains = list(self.domain_tokens)
        self._shards = content["shards"]
        for shard in self._shards:
            check_shard(self.folder, shard, self._dtype)
        self._check_tokenizer()
        self._unverified: list[dict[str, Any]] = self._shards
        self._damage: ValueError | None = None
        self.verify(None if verify else _VERIFIED_WHEN_OPENED)
        self._starts = np.cumsum([0, *(shard["tokens"] for shard in self._shards)])
        self._maps: dict[int, np.memmap[tuple[int], np.dtype[np.unsignedinteger]]] = {}

    @property
    def domain_names(self) -> list[str]:
        """Names of the numbers that `domains_of` returns: all domains of the folder, in either split."""
        return list(self.index["domains"])

    def verify(self, limit: int | None = None) -> None:
        """Compare shards with their checksums: all, or about `limit` bytes. Raises with the name of a damaged one."""
        total = self.tokens * self._dtype.itemsize
        every = 1 if limit is None else max(1, -(-total // limit))
        for shard in self._shards[::every]:
            verify_shard(self.folder, shard)
        self._unverified = [shard for number, shard in enumerate(self._shards) if number % every]

    def _check_tokenizer(self) -> None:
        path, wanted = self.tokenizer_folder / "tokenizer.json", self.index["tokenizer"].get("sha256")
        if wanted is not None and path.is_file():
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            require(found == wanted, f"{path} is damaged: its checksum does not match {INDEX}")

    def _verify_in_background(self, rank: int, world_size: int) -> None:
        """Check what opening left out, each process its part. `_batches` raises what it finds."""
        mine, self._unverified = self._unverified[rank::world_size], []

        def work() -> None:
            try:
                for shard in mine:
                    verify_shard(self.folder, shard)
            except (ValueError, OSError) as error:
                self._damage = ValueError(str(error))

        if mine:
            threading.Thread(target=work, name="verify shards", daemon=True).start()

    def _map(self, number: int) -> Tokens:
        if number not in self._maps:
            shard = self._shards[number]
            # Again, because the dataset may have been opened days ago.
            check_shard(self.folder, shard, self._dtype)
            path = self.folder / (shard["name"] + ".bin")
            self._maps[number] = np.memmap(path, dtype=self._dtype, mode="r")
        return self._maps[number]

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start` to `stop` of the stream, which may span several shards."""
        ids = self.read_rows(start, stop)
        return np.where(ids < 0, ~ids, ids) if self.masked else ids

    def read_rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """The same for training: in a masked folder, a token that no loss counts on is −1 − its id."""
        require(0 <= start <= stop <= self.tokens, f"no tokens {start} to {stop} among {self.tokens}")
        out = np.empty(stop - start, dtype=np.int64)
        at = start
        while at < stop:
            number = int(np.searchsorted(self._starts, at, side="right")) - 1
            first = int(self._starts[number])
            end = min(stop, int(self._starts[number + 1]))
            out[at - start : end - start] = self._ids(number, self._map(number)[at - first : end - first])
            at = end
        return out

    def _ids(self, number: int, stored: Tokens) -> NDArray[np.int64]:
        """Stored tokens of a shard, checked."""
        ids = stored.astype(np.int64)
        is_context = None
        if self.masked:
            bit = context_bit(self._dtype)
            is_context, ids = ids >= bit, ids % bit
        if len(ids) and ids.max() >= self.vocab_size:
            path = self.folder / (self._shards[number]["name"] + ".bin")
            raise ValueError(
                f"{path} is damaged: it holds a token outside the vocabulary of {self.vocab_size}"
            )
        return ids if is_context is None else np.where(is_context, ~ids, ids)

    @cached_property
    def _pieces(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """(start in the stream, domain id, whether a document ends here) of every piece. One more start is the end."""
        starts, domains, ends = [], [], []
        for first, shard in zip(self._starts, self._shards, strict=False):
            path = self.folder / (shard["name"] + ".idx")
            offsets, ids, continues = read_pieces(path, len(self.index["domains"]))
            starts.append(offsets[:-1] + first)
            domains.append(ids)
            ends.append(np.ones(len(ids), dtype=bool))
            ends[-1][-1] = not continues
        starts.append(self._starts[-1:])
        return np.concatenate(starts), np.concatenate(domains), np.concatenate(ends)

    def domains_of(self, start: int, stop: int) -> NDArray[np.int64]:
        """The domain of tokens `start` to `stop`, as an index into `index["domains"]`."""
        require(0 <= start <= stop <= self.tokens, f"no tokens {start} to {stop} among {self.tokens}")
        starts, domains, _ = self._pieces
        piece = np.searchsorted(starts, np.arange(start, stop), side="right") - 1
        return domains[piece].astype(np.int64)

    def iter_documents(self) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """(domain, tokens) of every document, the end-of-text token last."""
        if not self._shards:
            return
        starts, domains, ends = self._pieces
        first = 0
        for piece, ends_here in enumerate(ends):
            if ends_here:
                name = self.index["domains"][domains[piece]]
                yield name, self.read(int(starts[first]), int(starts[piece + 1]))
                first = piece + 1

    def num_windows(self, sequence_length: int) -> int:
        """Number of windows of `sequence_length` tokens that `batches` shuffles. The rest of the stream is not used."""
        return max(0, self.tokens - 1) // positive_int("sequence_length", sequence_length)

    def batches(
        self,
        batch_size: int,
        sequence_length: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        start_step: int = 0,
    ) -> Iterator[Tensor]:
        """Endless batches from step `start_step` on: int64, (batch_size, sequence_length + 1), read with `read_rows`.

        Window w holds the tokens wS … wS + S of the stream, so inputs `[:, :-1]` and targets `[:, 1:]` predict each
        token once. Every epoch visits all windows in its own order. The batch of a step and a rank depends on the
        arguments alone, so a resumed run passes its step. The batches of all ranks together, in order, are the batch
        of a single process with `world_size` times the batch size.
        """
        positive_int("batch_size", batch_size)
        positive_int("world_size", world_size)
        positive_int("rank", rank, at_least=0)
        positive_int("start_step", start_step, at_least=0)
        require(rank < world_size, f"rank must be below world_size = {world_size}, got {rank}")
        windows, together = self.num_windows(sequence_length), batch_size * world_size
        if windows < together:
            raise ValueError(
                f"{self.folder} ({self.split}) holds {self.tokens} tokens: {windows} windows of {sequence_length}, "
                f"less than one batch of {together}; use more data, a smaller batch or shorter sequences"
            )
        self._verify_in_background(rank, world_size)
        return self._batches(batch_size, sequence_length, seed, rank, together, start_step)

    def _batches(
        self, batch_size: int, length: int, seed: int, rank: int, together: int, step: int
    ) -> Iterator[Tensor]:
        windows = self.num_windows(length)
        orders: dict[int, NDArray[np.int64]] = {}
        while True:
            first = step * together + rank * batch_size
            batch = np.empty((batch_size, length + 1), dtype=np.int64)
            for row in range(batch_size):
                epoch, place = divmod(first + row, windows)
                if epoch not in orders:
                    # A batch spans at most two epochs.
                    orders = {e: o for e, o in orders.items() if e == epoch - 1}
                    orders[epoch] = epoch_order(windows, seed, epoch)
                start = int(orders[epoch][place]) * length
                batch[row] = self.read_rows(start, start + length + 1)
            if self._damage is not None:
                raise self._damage
            yield torch.from_numpy(batch)
            step += 1

    def windows(self, sequence_length: int, batch_size: int, domain: str | None = None) -> Iterator[Tensor]:
        """One pass over the split, or over the documents of one domain, in order: int64, (b, s + 1), as `read_rows`.

        Every token but the first is a target exactly once. After the full batches come a smaller batch and one
        shorter window. With a domain, documents of other domains are left out.
        """
        positive_int("sequence_length", sequence_length)
        positive_int("batch_size", batch_size)
        if domain is not None:
            one_of("domain", domain, self.domains)
        return self._windows(sequence_length, batch_size, domain)

    def _windows(self, length: int, batch_size: int, domain: str | None) -> Iterator[Tensor]:
        rest = np.empty(0, dtype=np.int64)
        span = length * batch_size
        for chunk in self._chunks(domain):
            rest = np.concatenate([rest, chunk])
            while len(rest) > span:
                yield _as_windows(rest[: span + 1], length)
                rest = rest[span:]
        full = max(0, len(rest) - 1) // length * length
        if full:
            yield _as_windows(rest[: full + 1], length)
        if len(rest) > full + 1:
            yield torch.from_numpy(rest[full:].copy())[None]

    def _chunks(self, domain: str | None) -> Iterator[NDArray[np.int64]]:
        spans = [(0, self.tokens)]
        if domain is not None:
            starts, ids, _ = self._pieces
            pieces = np.flatnonzero(ids == self.index["domains"].index(domain))
            spans = [(int(starts[i]), int(starts[i + 1])) for i in pieces]
        for start, stop in spans:
            for at in range(start, stop, _CHUNK):
                yield self.read_rows(at, min(stop, at + _CHUNK))

    def token_counts(self, domain: str | None = None) -> NDArray[np.int64]:
        """Number of occurrences of each token of the vocabulary; in a masked folder without context."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for chunk in self._chunks(domain):
            counts += np.bincount(chunk[chunk >= 0], minlength=self.vocab_size)
        return counts


def _as_windows(tokens: NDArray[np.int64], length: int) -> Tensor:
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
    return torch.from_numpy(windows.copy())


def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A random order of `count` windows: sorted by a hash of (seed, epoch, window).

    Not numpy's shuffle, because numpy may change it between versions, and a run may resume under another version.
    """
    key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    with np.errstate(over="ignore"):  # splitmix64 computes modulo 2⁶⁴
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.frombuffer(key, dtype="<u8")
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return np.argsort(z, kind="stable")


def unigram_perplexity(dataset: TokenDataset, domain: str | None = None) -> float:
    """Perplexity of `dataset` (usually the validation split) under a unigram model of the training split.

    A language model must be better than this. Every count is raised by one, so that a token that does not occur in
    training has a finite cost.
    """
    train = TokenDataset(dataset.folder, "train").token_counts() + 1
    counts = dataset.token_counts(domain)
    require(counts.sum() > 0, f"{dataset.folder} ({dataset.split}) holds no tokens")
    log_probs = np.log(train) - np.log(train.sum())
    return float(np.exp(-(counts * log_probs).sum() / counts.sum()))
