"""Batches and windows of prepared tokens."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_corpus import make_documents, write_jsonl

from grmoe.data import TokenDataset, prepare, unigram_perplexity
from grmoe.data.dataset import epoch_order

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dataset")
    write_jsonl(root / "a.jsonl", make_documents(200))
    prepare([root / "a.jsonl"], root / "out", tokenizer="bpe:300", validation=0.2, shard_tokens=700)
    return root / "out"


@given(st.integers(1, 500), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = epoch_order(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(100, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    # written out: a checkpoint of today must find the same order in later versions
    assert epoch_order(8, 0, 0).tolist() == [1, 4, 2, 6, 0, 7, 3, 5]


def test_reading_crosses_shards(folder: Path) -> None:
    data = TokenDataset(folder)
    shards = sorted(folder.glob("train-*.bin"))
    assert len(shards) > 3
    whole = np.concatenate([np.fromfile(path, dtype="<u2") for path in shards])
    np.testing.assert_array_equal(data.read(0, data.tokens), whole)
    np.testing.assert_array_equal(data.read(650, 2200), whole[650:2200])


def test_every_window_once_an_epoch(folder: Path) -> None:
    data = TokenDataset(folder)
    length, size = 16, 3
    count = data.num_windows(length)
    stream = data.read(0, count * length + 1)
    rows = itertools.chain.from_iterable(data.batches(size, length, seed=5))
    first, second = (torch.stack(list(itertools.islice(rows, count))) for _ in range(2))
    wanted = Counter(tuple(stream[w * length : (w + 1) * length + 1].tolist()) for w in range(count))
    for epoch in (first, second):
        assert epoch.dtype == torch.int64
        assert Counter(tuple(row.tolist()) for row in epoch) == wanted
    assert not torch.equal(first, second)


def test_a_restart_goes_on_exactly(folder: Path) -> None:
    data = TokenDataset(folder)
    straight = list(itertools.islice(data.batches(8, 32, seed=1), 120))
    assert 2 * data.num_windows(32) < 120 * 8  # over two epochs and more
    for start in (0, 1, 57, 119):
        again = itertools.islice(TokenDataset(folder).batches(8, 32, seed=1, start_step=start), 120 - start)
        assert all(torch.equal(a, b) for a, b in zip(again, straight[start:], strict=True))


def test_ranks_share_the_batch_of_one(folder: Path) -> None:
    data = TokenDataset(folder)
    alone = data.batches(6, 32, seed=2)
    ranks = [data.batches(2, 32, seed=2, rank=rank, world_size=3) for rank in range(3)]
    for _ in range(20):
        assert torch.equal(next(alone), torch.cat([next(rank) for rank in ranks]))


def test_less_than_a_batch_is_refused(folder: Path) -> None:
    data = TokenDataset(folder)
    with pytest.raises(ValueError, match=r"0 windows of 1000000, less than one batch of 4"):
        data.batches(4, 1_000_000)
    with pytest.raises(ValueError, match=r"less than one batch of 8000"):
        data.batches(4000, 32, world_size=2)
    with pytest.raises(ValueError, match="rank must be below world_size"):
        data.batches(1, 32, rank=2, world_size=2)


@pytest.mark.parametrize("length", [7, 64, 100_000])
def test_validation_windows_predict_every_token_once(folder: Path, length: int) -> None:
    data = TokenDataset(folder, "validation")
    for domain in (None, *data.domains):
        parts = [tokens for name, tokens in data.iter_documents() if domain in (None, name)]
        stream = np.concatenate(parts)
        windows = [row for batch in data.windows(length, 3, domain) for row in batch]
        assert all(len(row) == length + 1 for row in windows[:-1])
        assert torch.cat([row[1:] for row in windows]).tolist() == stream[1:].tolist()
        assert torch.cat([row[:-1] for row in windows]).tolist() == stream[:-1].tolist()
    with pytest.raises(ValueError, match="domain must be one of"):
        data.windows(length, 3, "physics")


def test_unigram_perplexity_against_a_plain_loop(folder: Path) -> None:
    train, validation = TokenDataset(folder), TokenDataset(folder, "validation")
    counts = Counter(train.read(0, train.tokens).tolist())
    total = train.tokens + train.vocab_size
    for domain in (None, "code"):
        held_out = [t for name, doc in validation.iter_documents() if domain in (None, name) for t in doc]
        loss = -sum(math.log((counts[t] + 1) / total) for t in held_out) / len(held_out)
        # a few thousand double-precision logarithms, summed
        assert unigram_perplexity(validation, domain) == pytest.approx(math.exp(loss), rel=1e-12)


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("name", ["train-00001.bin", "train-00001.idx"])
def test_damage_is_refused_by_name(folder: Path, tmp_path: Path, name: str) -> None:
    path = copy(folder, tmp_path / "copy") / name
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        TokenDataset(path.parent)
    path.write_bytes(whole[:-2])
    with pytest.raises(
        ValueError, match=rf"{name} is damaged: {len(whole) - 2} bytes, {len(whole)} expected"
    ):
        TokenDataset(path.parent)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for verify in (False, True):
        with pytest.raises(ValueError, match=f"{name} is damaged: its checksum"):
            TokenDataset(path.parent, verify=verify)
    TokenDataset(path.parent, "validation", verify=True)


def test_foreign_headers_and_versions_are_refused(folder: Path, tmp_path: Path) -> None:
    copied = copy(folder, tmp_path / "copy")
    index = json.loads((copied / "index.json").read_text())
    path = copied / "train-00000.idx"
    path.write_bytes(b"\0" * 8 + path.read_bytes()[8:])
    with pytest.raises(ValueError, match=r"train-00000.idx is damaged: its header"):
        TokenDataset(copied)
    (copied / "index.json").write_text(json.dumps(index | {"version": 99}))
    with pytest.raises(ValueError, match="has version 99, this grmoe reads 1 and 2"):
        TokenDataset(copied)
    (copied / "index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index.json is damaged"):
        TokenDataset(copied)
    (copied / "index.json").unlink()
    with pytest.raises(ValueError, match="no prepared data, or an unfinished preparation"):
        TokenDataset(copied)
