"""Sources, formats, and rows that are no documents."""

from __future__ import annotations

import gzip
import json
import lzma
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grmoe.data.documents import Document, Position, Reader, Skipped
from grmoe.data.sources import STDLIB, find_units, fingerprint, optional
from grmoe.data.splitting import Split

START = Position()
ROWS = [{"text": f"document {i}, 東京"} for i in range(20)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(data: bytes) -> bytes:
    compressor = pytest.importorskip("zstandard").ZstdCompressor()
    half = len(data) // 2  # two frames, as parallel compressors write them
    return bytes(compressor.compress(data[:half]) + compressor.compress(data[half:]))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def reader(*sources: str | Path, strict: bool = False, **options: Any) -> Reader:
    units = find_units(sources)
    return Reader(units, [None] * len(units), strict=strict, **options)


def read(*sources: str | Path, start: Position = START, strict: bool = False) -> list[Document]:
    rows = reader(*sources, strict=strict).read(start)
    return [row for row in rows if isinstance(row, Document)]


def test_a_file_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    for name in "ab":
        (books / f"{name}.jsonl").write_bytes(LINES)
    (tmp_path / "link.jsonl").symlink_to(books / "b.jsonl")
    for more in ([books / "a.jsonl"], [tmp_path / "books" / ".." / "books"], [tmp_path / "link.jsonl"]):
        assert [unit.name for unit in find_units([books, *more])] == ["a.jsonl", "b.jsonl"]
    assert len(find_units([books / "b.jsonl", books])) == 2


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_jsonl_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"news.jsonl{suffix}"
    path.write_bytes(COMPRESSORS[suffix](LINES))
    documents = read(path)
    assert [d.text for d in documents] == [row["text"] for row in ROWS]
    assert {d.domain for d in documents} == {"news"}
    assert documents[3].size == len(ROWS[3]["text"].encode())
    # and from any row on
    assert [d.text for d in read(path, start=Position(0, 15))] == [row["text"] for row in ROWS[15:]]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_compressed_file_that_was_cut_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"news.jsonl{suffix}"
    path.write_bytes(COMPRESSORS[suffix](LINES * 50)[:-20])
    with pytest.raises(ValueError, match=r"news.jsonl.* is damaged after row"):
        read(path)


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"document {i}" for i in range(3000)]
    domains = ["even" if i % 2 == 0 else None for i in range(3000)]
    path = tmp_path / "part.parquet"
    parquet.write_table(
        arrow.table({"text": texts, "domain": domains, "more": texts}), path, row_group_size=700
    )
    documents = read(path)
    assert [d.text for d in documents] == texts
    assert [d.domain for d in documents[:2]] == ["even", "part"]
    assert [d.text for d in read(path, start=Position(0, 2500))] == texts[2500:]
    parquet.write_table(arrow.table({"body": texts}), path)
    with pytest.raises(ValueError, match="no column 'text'; its columns are body"):
        read(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"part.parquet is damaged"):
        read(path)


def test_text_files_folders_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "poem.txt").write_bytes(b"\xef\xbb\xbfroses\r\nare red\n")
    (tmp_path / "b.jsonl").write_bytes(LINES)
    (tmp_path / "README.md").write_text("not a source")
    (tmp_path / ".hidden.txt").write_text("hidden")
    assert [u.name for u in find_units([tmp_path])] == ["b.jsonl", "deep/poem.txt"]
    (poem,) = read(str(tmp_path / "**" / "*.txt"))
    assert (poem.text, poem.domain) == ("roses\r\nare red\n", "deep")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "neither a file, nor a folder, nor a pattern"),
        ("*.md", "matches .*README.md, which does not end in"),
        ("README.md", r"must end in .txt, .jsonl"),
        ("empty", "holds no file that can be read"),
        ("hf:", "names no dataset"),
        ("hf:empty", "hf:empty is on this machine; give it without hf:"),
    ],
)
def test_sources_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").write_text("not a source")
    with pytest.raises(ValueError, match=message):
        find_units([source])


BAD = {
    b'{"text": "fine"}': None,
    b'{"title": "no text"}': "no text",
    b'{"text": ""}': "no text",
    b'{"text": 3}': "no text",
    b'["a list"]': "no text",
    b'{"text": "cut': "invalid JSON",
    b"\xff\xfe": "not UTF-8",
    b'{"text": "half a pair \\ud800"}': "not UTF-8",
    b"[" * 100_000: "invalid JSON",
    b'{"text": "fine too", "domain": ""}': None,
}


def test_bad_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n\n".join(BAD))
    rows = list(reader(path).read(Position()))
    assert [row.text for row in rows if isinstance(row, Document)] == ["fine", "fine too"]
    found = Counter(row.reason for row in rows if isinstance(row, Skipped))
    assert found == Counter(reason for reason in BAD.values() if reason)


def test_strict_names_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "cut\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, row 2: invalid JSON"):
        read(path, strict=True)
    (tmp_path / "latin.txt").write_bytes("über".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt: not UTF-8 \(byte 0xfc at position 0\)"):
        read(tmp_path / "latin.txt", strict=True)


def test_the_standard_library_is_a_source() -> None:
    units = find_units([STDLIB])
    names = [unit.name for unit in units]
    assert names == sorted(names)
    assert len(units) > 300
    assert {"ast.py", "asyncio/events.py"} <= set(names)
    assert not any(part in ("test", "tests", "site-packages") for name in names for part in name.split("/"))
    assert {unit.domain for unit in units} >= {"modules", "network", "concurrency"}


def test_a_fingerprint_follows_the_content_not_the_place(tmp_path: Path) -> None:
    prints = []
    for folder, content in (("one", "same"), ("two", "same"), ("three", "else")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(content)
        prints.append(fingerprint(find_units([tmp_path / folder])[0]))
    assert prints[0] == prints[1] != prints[2]


def test_a_missing_dependency_is_named_with_its_install_line() -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r'this needs no_such_module; install with: pip install "grmoe\[data\]"'
    ):
        optional("no_such_module")


def test_a_missing_reader_is_missed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    (tmp_path / "a.parquet").write_bytes(b"")
    for module, source in {
        "zstandard": tmp_path / "a.jsonl.zst",
        "pyarrow": tmp_path / "a.parquet",
        "datasets": "hf:owner/name",
    }.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ModuleNotFoundError, match=f"this needs {module}; install with"):
            find_units([source])


def test_a_hub_dataset_is_streamed_at_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, first: int) -> None:
            self.first = first

        def skip(self, count: int) -> Stream:
            return Stream(count)

        def __iter__(self) -> Iterator[dict[str, str]]:
            return iter(ROWS[self.first :])

    asked = []
    datasets, hub = types.ModuleType("datasets"), types.ModuleType("huggingface_hub")
    datasets.load_dataset = lambda *names, **options: (asked.append((names, options)), Stream(0))[1]  # type: ignore[attr-defined]
    info = types.SimpleNamespace(dataset_info=lambda name: types.SimpleNamespace(sha=f"sha of {name}"))
    hub.HfApi = lambda: info  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    (unit,) = find_units(["hf:owner/some-text:small"])
    revision = fingerprint(unit)["revision"]
    assert revision == "sha of owner/some-text"
    rows = Reader([unit], [revision]).read(Position(0, 18))
    assert [(row.text, row.domain) for row in rows if isinstance(row, Document)] == [
        (row["text"], "some-text") for row in ROWS[18:]
    ]
    assert asked == [
        (("owner/some-text", "small"), {"split": "train", "streaming": True, "revision": revision})
    ]


def test_the_held_out_share_is_the_share_asked_for() -> None:
    texts = [f"document {i}".encode() for i in range(20_000)]
    # 20,000 draws of a coin of 0.05: standard deviation 31
    assert abs(sum(map(Split(0.05).holds_out, texts)) - 1000) < 4 * 31
    # a document that is held out stays held out when the share grows
    assert all(map(Split(0.05).holds_out, filter(Split(0.01).holds_out, texts)))
