"""Input that would take all memory or all time, and input that is not text. Before, a line of 50 MB took 6.6 GB, 20 MB
without a space never ended, and an .xz file of 305 kB took 23 GB."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import re
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import grmoe.data.decompression as decompression
from grmoe.cli import app
from grmoe.data import prepare
from grmoe.data.cutting import PIECE, cut_runs, cut_text
from grmoe.data.decompression import read_lines
from grmoe.data.documents import Document, Reader, Skipped
from grmoe.data.encoding import DocumentEncoder
from grmoe.data.sources import find_units
from grmoe.data.tokenizer import train

pytest.importorskip("tokenizers")
LIMIT = 2**16
GOOD = b'{"text": "a good row"}\n'


@contextmanager
def at_most(megabytes: float) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < megabytes * 2**20
    finally:
        tracemalloc.stop()


def rows_of(path: Path, **options: Any) -> list[Document | Skipped]:
    return list(Reader(find_units([path]), [None], **{"max_document": LIMIT} | options).read())


def xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=0)


def zstd(data: bytes, **options: Any) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="pip install 'grmoe[data]'")
    parameters = zstandard.ZstdCompressionParameters.from_level(3, **options)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return bytes(writer.compress(data) + writer.flush())


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": lambda data: gzip.compress(data, 1), ".xz": xz, ".zst": zstd,
}  # fmt: skip


@pytest.mark.parametrize("suffix", PACK)
def test_a_row_or_file_that_is_too_long_is_skipped_and_never_in_memory(tmp_path: Path, suffix: str) -> None:
    words = b"".join(b"%x " % (i * 2654435761 % 2**32) for i in range(1_300_000))  # compresses like text
    packed = PACK[suffix](GOOD + b'{"text": "' + words + b'"}\n' + GOOD)
    assert len(words) > 11e6
    for name in ("rows.jsonl", "file.txt"):
        (tmp_path / f"{name}{suffix}").write_bytes(packed)
    del words, packed
    with at_most(9):
        rows = rows_of(tmp_path / f"rows.jsonl{suffix}")
        file = rows_of(tmp_path / f"file.txt{suffix}")
    assert [type(row) for row in rows] == [Document, Skipped, Document]
    sentence = f"rows.jsonl{suffix}, row 2: too long (more than 65,536 bytes; see --max-document-mb)"
    assert rows[1] == Skipped("too long", sentence)
    assert [type(row) for row in file] == [Skipped]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_small_file_that_unpacks_to_gigabytes_is_given_up(tmp_path: Path, suffix: str) -> None:
    """Before, it was unpacked to its end: minutes for a file of 130 kB."""
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(PACK[suffix](GOOD + b'{"text": "' + b"a" * 2**25 + b'"}\n' + GOOD))
    with at_most(40):
        first, last = rows_of(path)
    assert isinstance(first, Document)
    size = path.stat().st_size
    limit = 4 * LIMIT + 100 * size
    assert limit < 2**24
    sentence = (
        f"rows that are too long or blank unpack from {size:,} bytes to more than {limit:,}; "
        "the rest of the file is not read"
    )
    assert last == Skipped("too long", f"rows.jsonl{suffix}, row 2: too long ({sentence})")


def test_a_zst_file_that_asks_for_too_much_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt.zst").write_bytes(zstd(b"text " * 100, window_log=28))
    with pytest.raises(
        ValueError, match=r"a.txt.zst is .*: it needs more than 128 MiB to unpack \(zstd --long\)"
    ):
        rows_of(tmp_path / "a.txt.zst")


def test_an_xz_file_that_asks_for_too_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"text " * 100, preset=6))  # needs 9 MiB
    monkeypatch.setattr(decompression, "_XZ_MEMORY", 2**20)
    with pytest.raises(
        ValueError, match=r"a.txt.xz is damaged after row 0: it needs more than 1 MiB to unpack"
    ):
        rows_of(tmp_path / "a.txt.xz")


def test_xz_files_of_several_streams_and_padding_are_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt.xz").write_bytes(xz(b"one ") + b"\0" * 8 + xz(b"two") + b"\0" * 4)
    (row,) = rows_of(tmp_path / "a.txt.xz")
    assert isinstance(row, Document)
    assert row.text == "one two"


def stream(content: bytes, buffer: int = 2**20) -> io.BufferedReader:
    return io.BufferedReader(cast(Any, io.BytesIO(content)), buffer_size=buffer)


@given(st.text("x \r\n").map(str.encode), st.integers(1, 10), st.integers(1, 12))
def test_bounded_lines_are_the_lines(content: bytes, limit: int, buffer: int) -> None:
    """Blank lines come several at once, in whole lines."""
    found: list[bytes | None] = []
    for line in read_lines(stream(content, buffer), limit):
        found += [line] if line is None else re.findall(rb"[^\n]*\n|[^\n]+", line)
    wanted = re.findall(rb"[^\n]*\n|[^\n]+", content)
    for line, whole in zip(found, wanted, strict=True):
        if len(whole.removesuffix(b"\n")) <= limit or (
            whole.isspace() and line
        ):  # blank after other blank ones
            assert line == whole
        else:
            assert line is None


def test_blank_lines_are_read_together_and_counted(tmp_path: Path) -> None:
    """Before, one by one: 8 kB of .zst unpack to 268 million of them, two minutes."""
    many = 2**22
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(GOOD + b" \n" * 3 + b"\n" * many + GOOD + b"\n" * many, 1))
    assert [row.at.row for row in rows_of(packed, max_document=2**26)] == [0, 4 + many]
    assert len(list(read_lines(stream(GOOD + b"\n" * many), LIMIT))) < 10
    first, last = rows_of(packed)
    assert isinstance(last, Skipped), first
    assert "too long (rows that are too long or blank unpack from" in last.sentence


def test_text_without_spaces_is_tokenised_in_pieces() -> None:
    """BPE on one word of megabytes takes all memory; training on it never ends: the time grew with its square."""
    draw = random.Random(0)
    text = "".join(draw.choices("etaoinshrdlu", k=400_000))
    documents = [Document(None, text, "", len(text), "train", 0)]  # type: ignore[arg-type]
    start = time.process_time()
    trained = train(300, documents).tokenizer
    assert time.process_time() - start < 15  # 48 s before; here about 0.5
    encode = DocumentEncoder(trained, 0)
    with at_most(40):
        ids = encode(text)
    assert trained.decode(ids[:-1].tolist()) == text
    assert max(map(len, cut_runs(text, 1000))) == 1000


@given(st.text(alphabet="ab .\n", max_size=300), st.integers(1, 40))
def test_pieces_are_the_text(text: str, limit: int) -> None:
    pieces = list(cut_text(text, limit))
    assert "".join(pieces) == text == "".join(cut_runs(text, limit))
    assert all(len(piece) <= limit for piece in pieces)
    assert all(pieces[:-1])


def test_pieces_of_a_long_text_have_the_tokens_of_the_whole() -> None:
    text = "".join(f"def f{n}(x):\n    return [x, {n}]  # über n't, 東京\n\n" for n in range(3000))
    assert len(text) > 2 * PIECE
    documents = [Document(None, text, "", len(text), "train", 0)]  # type: ignore[arg-type]
    trained = train(400, documents).tokenizer
    assert (
        DocumentEncoder(trained, 0)(text)[:-1].tolist() == trained.encode(text, add_special_tokens=False).ids
    )
    for before, after in pairwise(cut_text(text, PIECE)):
        assert not before[-1].isspace()
        assert after[0] == " "


BAD_FILES = {
    "latin.txt": ("grüße".encode("latin-1"), "latin.txt: not UTF-8 (byte 0xfc at position 2)"),
    "bom.txt": (b"\xef\xbb\xbfab\xff", "bom.txt: not UTF-8 (byte 0xff at position 5)"),
    "wide.txt": ("grüße".encode("utf-16"), "wide.txt: not UTF-8 (it begins like UTF-16)"),
    "program.txt": (b"MZ\x01\x00\x02", "program.txt: binary (a zero byte at position 3)"),
    "empty.txt": (b"", "empty.txt: empty"),
    "blank.txt": (b" \n\t\n", "blank.txt: no text"),
    "rows.jsonl": (b'{"text": "\xff"}', "rows.jsonl, row 1: not UTF-8 (byte 0xff at position 10)"),
    "cut.jsonl": (
        b'{"text": "a',
        "cut.jsonl, row 1: invalid JSON (Unterminated string starting at position 9)",
    ),
    "none.jsonl": (b"", "none.jsonl is empty"),
    "other.jsonl": (b'{"body": "x"}', "other.jsonl, row 1: no text (field 'text' is missing)"),
    "number.jsonl": (b'{"text": 3}', "number.jsonl, row 1: no text (field 'text' holds no text)"),
    "digits.jsonl": (b'{"text": ' + b"1" * 10_000 + b"}", "digits.jsonl, row 1: invalid JSON"),
    "long.txt": (b"words " * 400, "long.txt: too long (2,400 bytes; --max-document-mb 1 reads it)"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_input_that_is_not_text_is_named_with_its_reason(tmp_path: Path, name: str) -> None:
    content, sentence = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    limit = ["--max-document-mb", "0.001"] if name == "long.txt" else []
    command = ["prepare", str(tmp_path / name), "--out", str(tmp_path / "out"), *limit]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert f"error: the sources hold no document to train on; {sentence}" in result.output.replace("\n", "")
    assert not (tmp_path / "out").exists()


def test_a_validation_source_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    (tmp_path / "latin.txt").write_bytes(BAD_FILES["latin.txt"][0])
    message = r"no document is left to validate on; latin.txt: not UTF-8 \(byte 0xfc at position 2\)"
    with pytest.raises(ValueError, match=message):
        prepare(
            [tmp_path / "good.jsonl"], tmp_path / "out", tokenizer="bpe:257", workers=1,
            validation_source=tmp_path / "latin.txt",
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_bad_files_among_good_ones_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(GOOD * 20 + b'{"text": "cut\n' * 3)
    for name in ("latin.txt", "program.txt"):
        (tmp_path / name).write_bytes(BAD_FILES[name][0])
    index = prepare([tmp_path], tmp_path / "out", tokenizer="bpe:257", validation=0, workers=1)
    assert index["skipped"] == {"binary": 1, "invalid JSON": 3, "not UTF-8": 1}
    assert index["first_skipped"]["not UTF-8"] == BAD_FILES["latin.txt"][1]
    assert index["first_skipped"]["invalid JSON"].startswith("rows.jsonl, row 21: invalid JSON")
    assert json.loads((tmp_path / "out" / "index.json").read_text()) == index
