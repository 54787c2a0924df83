"""Prepared data that was damaged is refused by name. Before, training went on to the end with a zeroed shard."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_corpus import make_documents, write_jsonl
from typer.testing import CliRunner

import grmoe.data.dataset as dataset
from grmoe.cli import app
from grmoe.data import TokenDataset, prepare

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damage")
    write_jsonl(root / "a.jsonl", make_documents(100))
    prepare(
        [root / "a.jsonl"], root / "out", tokenizer="bpe:300", validation=0.2, shard_tokens=700, workers=1
    )
    return root / "out"


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 4 * 2] ^= 1  # the lowest bit of a token, which stays in the vocabulary
    path.write_bytes(content)


def swapped(path: Path) -> None:
    """With a shard of the same size, made from the same bytes in another order."""
    tokens = np.fromfile(path, dtype="<u2")
    path.write_bytes(tokens[::-1].tobytes())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [zeroed, flipped, swapped, cut])
@pytest.mark.parametrize("name", ["train-00001.bin", "validation-00000.bin"])
def test_train_refuses_a_damaged_shard_in_one_line(
    copy: Path, tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    damage(copy / name)
    result = CliRunner().invoke(
        app,
        [
            "train",
            f"data.path={copy}",
            "data.sequence_length=16",
            "data.batch_size=2",
            f"out={tmp_path / 'run'}",
            "model.preset=tiny",
            "device=cpu",
            "steps=1",
        ],
        env={"COLUMNS": "300"},
    )
    assert result.exit_code == 2
    assert f"{copy / name} is damaged" in result.output.replace("\n", "")
    assert "Traceback" not in result.output


def test_large_data_is_sampled_at_once_and_checked_in_the_background(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "_VERIFIED_WHEN_OPENED", 3000)
    shards = sorted(copy.glob("train-*.bin"))
    assert len(shards) > 5
    flipped(copy / "train-00001.bin")
    data = TokenDataset(copy)  # a sample: shards 0, 3, 6, …
    with pytest.raises(ValueError, match=r"train-00001.bin is damaged: its checksum"):
        for _, _ in zip(range(100_000), data.batches(2, 16), strict=False):
            pass
    flipped(shards[0])
    with pytest.raises(ValueError, match=rf"{shards[0].name} is damaged: its checksum"):
        TokenDataset(copy)


def without_checksums(copy: Path) -> dict[str, Any]:
    """As an older version wrote it."""
    index: dict[str, Any] = json.loads((copy / "index.json").read_text())
    for key in ("sha256", "held_out", "first_skipped"):
        del index[key]
    for split in index["splits"].values():
        for shard in split["shards"]:
            del shard["sha256.bin"], shard["sha256.idx"]
    (copy / "index.json").write_text(json.dumps(index))
    return index


def test_data_without_checksums_opens_and_its_tokens_are_checked(folder: Path, copy: Path) -> None:
    without_checksums(copy)
    old, new = TokenDataset(copy), TokenDataset(folder)
    np.testing.assert_array_equal(old.read(0, old.tokens), new.read(0, new.tokens))
    path = copy / "train-00001.bin"
    path.write_bytes(b"\xff\xff" * (path.stat().st_size // 2))
    with pytest.raises(ValueError, match=r"train-00001.bin is damaged: .* outside the vocabulary of 300"):
        TokenDataset(copy).read(0, old.tokens)
    zeroed(copy / "train-00002.idx")
    with pytest.raises(ValueError, match=r"train-00002.idx is damaged: its header"):
        TokenDataset(copy)


def test_pieces_that_do_not_fit_are_refused(copy: Path) -> None:
    without_checksums(copy)
    path = copy / "train-00000.idx"
    values = np.fromfile(path, dtype="<i8")
    for place, value in ((6, -5), (-1, 99), (4, 7)):
        changed = values.copy()
        changed[place] = value
        changed.tofile(path)
        with pytest.raises(ValueError, match=r"train-00000.idx is damaged: its pieces"):
            TokenDataset(copy).domains_of(0, 10)


def test_another_tokenizer_is_refused(copy: Path) -> None:
    path = copy / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(ValueError, match=r"tokenizer.json is damaged: its checksum"):
        TokenDataset(copy)


def changed(index: dict[str, Any], draw: random.Random) -> Any:
    """An index with one value somewhere replaced, removed or of another type."""
    node: Any = index
    while True:
        key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if isinstance(node[key], dict | list) and node[key] and draw.random() < 0.85:
            node = node[key]
            continue
        if isinstance(node, dict) and draw.random() < 0.3:
            del node[key]
        else:
            node[key] = draw.choice([None, -1, 2**70, 1.5, "../../etc", "", [], {}, True, [[]], "x" * 100])
        return index


def test_a_damaged_index_is_one_line(folder: Path, copy: Path) -> None:
    """With its checksum every change is seen. Without, an index opens or is refused with a ValueError."""
    path = copy / "index.json"
    whole = path.read_text()
    draw = random.Random(0)
    for _ in range(40):
        index = changed(json.loads(whole), draw)
        if index == json.loads(whole) or "sha256" not in index:
            continue
        path.write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"index.json (is damaged|has version)"):
            TokenDataset(copy)
    path.write_text(whole)
    old = json.dumps(without_checksums(copy))
    messages = []
    for _ in range(60):
        path.write_text(json.dumps(changed(json.loads(old), draw)))
        try:
            for split in ("train", "validation"):
                data = TokenDataset(copy, split)
                data.read(0, data.tokens)
                list(data.iter_documents())
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 10
    assert all("\n" not in message and str(copy) in message for message in messages)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version": 1}']
)
def test_an_index_that_is_none_is_one_line_for_every_command(copy: Path, content: bytes) -> None:
    (copy / "index.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"index.json (is damaged|has version)"):
        TokenDataset(copy)
    corpus = copy.parent / "a.jsonl"
    write_jsonl(corpus, make_documents(20))
    with pytest.raises(ValueError, match=r"index.json is not the index of prepared data"):
        prepare([corpus], copy, tokenizer="bpe:300", validation=0.2, workers=1)
