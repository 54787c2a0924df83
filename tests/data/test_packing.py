"""Packing and the shard files, on arbitrary sequences of documents."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmoe.data.documents import Document, Position
from grmoe.data.packing import Packer, Range
from grmoe.data.shards import check_shard, read_pieces, token_dtype, verify_shard, write_shard

START = Position()
Drawn = list[tuple[int, str, str]]
documents = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from(["train", "validation"]), st.sampled_from("abc")),
    max_size=40,
)


def as_document(number: int, drawn: tuple[int, str, str]) -> tuple[Document, np.ndarray]:
    length, split, domain = drawn
    tokens = np.full(length, number + 1, dtype=np.uint16)
    tokens[-1] = 0
    return Document(Position(0, number), "", domain, length, split, 0), tokens


def pack(drawn: Drawn, limit: int, start: Position = START, domains: list[str] | None = None) -> list[Range]:
    packer = Packer(limit, domains or [])
    ranges = []
    for number in range(start.row, len(drawn)):
        document, tokens = as_document(number, drawn[number])
        ranges += packer.add(document, tokens, start.token if number == start.row else 0)
    return [*ranges, packer.finish()]


def stream(ranges: list[Range], split: str) -> np.ndarray:
    pieces = [p for r in ranges if split in r.shards for p in r.shards[split].pieces]
    return np.concatenate([np.empty(0, dtype=np.uint16), *pieces])


@given(documents, st.integers(2, 30))
def test_nothing_is_lost_and_no_shard_is_too_long(drawn: Drawn, limit: int) -> None:
    ranges = pack(drawn, limit)
    for split in ("train", "validation"):
        wanted = [as_document(i, d)[1] for i, d in enumerate(drawn) if d[1] == split]
        np.testing.assert_array_equal(
            stream(ranges, split), np.concatenate([np.empty(0, np.uint16), *wanted])
        )
        for shard in (r.shards[split] for r in ranges if split in r.shards):
            assert 0 < shard.tokens == sum(map(len, shard.pieces)) <= limit
            # only the last piece may be without its end, and then the shard holds nothing else
            assert all(piece[-1] == 0 for piece in shard.pieces[:-1])
            assert shard.continues == (shard.pieces[-1][-1] != 0)
            assert not shard.continues or len(shard.pieces) == 1
    tallies = [t for r in ranges for shard in r.shards.values() for t in shard.tallies.values()]
    assert sum(t.documents for t in tallies) == len(drawn)
    assert sum(t.bytes for t in tallies) == sum(d[0] for d in drawn) == sum(t.tokens for t in tallies)


@given(documents, st.integers(2, 30), st.data())
def test_packing_goes_on_from_the_end_of_any_range(drawn: Drawn, limit: int, data: st.DataObject) -> None:
    ranges = pack(drawn, limit)
    done = data.draw(st.integers(1, len(ranges)))
    last = ranges[done - 1]
    if last.end is None:
        assert done == len(ranges)
        return
    again = ranges[:done] + pack(drawn, limit, last.end, last.domains)
    assert len(again) == len(ranges)
    for a, b in zip(again, ranges, strict=True):
        assert (a.domains, a.end, list(a.shards)) == (b.domains, b.end, list(b.shards))
        for split in a.shards:
            assert a.shards[split].domains == b.shards[split].domains
            assert a.shards[split].tallies == b.shards[split].tallies
            assert list(map(list, a.shards[split].pieces)) == list(map(list, b.shards[split].pieces))


@given(documents, st.integers(2, 30))
def test_files_hold_what_was_packed(drawn: Drawn, limit: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shard in (s for r in pack(drawn, limit) for s in r.shards.values()):
            record = write_shard(folder, "train-00000", shard, np.dtype("<u2"))
            check_shard(folder, record, np.dtype("<u2"))
            verify_shard(folder, record)
            offsets, domains, continues = read_pieces(folder / "train-00000.idx", 3)
            tokens = np.fromfile(folder / "train-00000.bin", dtype="<u2")
            assert domains.tolist() == shard.domains
            assert continues == shard.continues
            for start, stop, piece in zip(offsets[:-1], offsets[1:], shard.pieces, strict=True):
                np.testing.assert_array_equal(tokens[start:stop], piece)


@pytest.mark.parametrize(("vocabulary", "name"), [(65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_the_smallest_integer_that_holds_the_vocabulary(vocabulary: int, name: str) -> None:
    dtype = token_dtype(vocabulary)
    assert dtype.name == name
    assert np.array([vocabulary - 1]).astype(dtype)[0] == vocabulary - 1
