"""Files that store columns, .parquet and .arrow: all kinds of text, damage, and files that unpack to gigabytes.

They need the extra `data`: pip install "grmoe[data]".
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from grmoe.data.documents import Document, Position, Reader, Skipped
from grmoe.data.sources import find_units

pa = pytest.importorskip("pyarrow", reason="pip install 'grmoe[data]'")
pq = pytest.importorskip("pyarrow.parquet")
ipc = pytest.importorskip("pyarrow.ipc")

TEXTS = [f"document {i} " * (1 + i % 7) for i in range(60)]
LIMIT = 2**16


def rows_of(path: Path, start: int = 0, **options: Any) -> list[Document | Skipped]:
    reader = Reader(find_units([path]), [None] * 9, **{"max_document": LIMIT} | options)
    return list(reader.read(Position(0, start)))


def write_arrow(table: Any, path: Path, stream: bool = True) -> None:
    with (ipc.new_stream if stream else ipc.new_file)(path, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=25):
            writer.write_batch(batch)


@pytest.mark.parametrize("ending", ["parquet", "stream.arrow", "file.arrow"])
@pytest.mark.parametrize(
    "kind", ["string", "large_string", "string_view", "binary", "large_binary", "dictionary"]
)
def test_text_of_every_kind_is_read(tmp_path: Path, kind: str, ending: str) -> None:
    texts = pa.array([*TEXTS[:-1], None])
    column = texts.dictionary_encode() if kind == "dictionary" else texts.cast(getattr(pa, kind)())
    domains = pa.array(["even" if i % 2 == 0 else None for i in range(60)])
    table = pa.table({"text": column, "domain": domains, "more": texts})
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(table, path, row_group_size=25)
    else:
        write_arrow(table, path, stream=ending.startswith("stream"))
    found = rows_of(path)
    assert [row.text for row in found if isinstance(row, Document)] == TEXTS[:-1]
    assert [row.domain for row in found if isinstance(row, Document)][:2] == ["even", path.stem]
    assert isinstance(found[-1], Skipped)
    assert found[-1].sentence.endswith(", row 60: no text (field 'text' holds no text)")
    for start in (24, 25, 26, 59):
        assert rows_of(path, start) == found[start:]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_conversations_are_read(tmp_path: Path, kind: str) -> None:
    talk = [[{"role": "user", "content": t}, {"role": "assistant", "content": "yes"}] for t in TEXTS]
    path = tmp_path / f"a.{kind}"
    table = pa.table({"messages": talk})
    pq.write_table(table, path) if kind == "parquet" else write_arrow(table, path)
    found = rows_of(path, chat=True, text_field="messages")
    assert [row.text.count(TEXTS[i]) for i, row in enumerate(found) if isinstance(row, Document)] == [1] * 60


def test_a_row_that_is_not_utf8_is_skipped_and_named(tmp_path: Path) -> None:
    """Before, the whole command ended, without the name of the file."""
    raw = pa.array([b"good", b"a\xff", b"fine"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    good, bad, fine = rows_of(tmp_path / "a.parquet")
    assert isinstance(good, Document)
    assert bad == Skipped("not UTF-8", "a.parquet, row 2: not UTF-8 (byte 0xff at position 1)")
    assert isinstance(fine, Document)


def test_the_same_long_text_in_many_rows_is_in_memory_once(tmp_path: Path) -> None:
    """A dictionary of one text: before, a batch of rows was a thousand copies of it."""
    text = "b" * 2**20
    many = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array([text]))
    pq.write_table(pa.table({"text": many}), tmp_path / "a.parquet", compression="zstd")
    talk = [[{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]] * 300
    pq.write_table(pa.table({"messages": talk}), tmp_path / "chat.parquet", compression="zstd")
    del talk
    before = pa.total_allocated_bytes()
    largest = 0
    for path, options in (
        (tmp_path / "a.parquet", {}),
        (tmp_path / "chat.parquet", {"chat": True, "text_field": "messages"}),
    ):
        reader = Reader(find_units([path]), [None], max_document=2**18, **options)  # type: ignore[arg-type]
        for row in reader.read():
            assert isinstance(row, Skipped)
            largest = max(largest, pa.total_allocated_bytes() - before)
    assert row.sentence == "chat.parquet, row 300: too long (more than 262,144 bytes; see --max-document-mb)"
    assert largest < 40 * 2**20


def test_a_row_group_that_unpacks_to_too_much_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, two gigabytes of one letter took 8.5 GB of memory. The other row groups are read."""
    monkeypatch.setattr("grmoe.data.columns._GROUP", 2**20)
    schema = pa.schema([("text", pa.string())])
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        for texts in (["one", "two"], ["x", "a" * 2**22], ["three"]):
            writer.write_table(pa.table({"text": texts}))
    found = rows_of(path)
    assert [row.text for row in found if isinstance(row, Document)] == ["one", "two", "three"]
    assert isinstance(found[2], Skipped)
    assert found[2].sentence.startswith("a.parquet, row 3: too long (2 rows of 4,")
    assert found[2].sentence.endswith(f" in a file of {path.stat().st_size:,}, which is no text)")
    assert rows_of(path, 4) == found[3:]


@pytest.mark.parametrize("name", ["a.parquet", "checked.parquet", "stream.arrow", "file.arrow"])
def test_damage_is_one_line_that_names_the_file(tmp_path: Path, name: str) -> None:
    """Bits flipped and ends cut off: rows, or one line. Damage may also stay within the text, which nothing can see."""
    path = tmp_path / name
    table = pa.table({"text": TEXTS})
    if name.endswith("parquet"):
        pq.write_table(table, path, write_page_checksum=name.startswith("checked"))
    else:
        write_arrow(table, path, stream=name.startswith("stream"))
    whole, said = path.read_bytes(), list[str]()
    random_ = random.Random(0)
    for i in range(40):
        damaged = bytearray(whole)
        if i % 3 == 0:
            del damaged[random_.randrange(len(whole)) :]
        else:
            damaged[random_.randrange(len(whole))] ^= 1 << random_.randrange(8)
        path.write_bytes(damaged)
        try:
            rows_of(path)
        except ValueError as error:
            said.append(str(error))
    assert len(said) >= 10
    assert all(line.startswith(str(path)) and "\n" not in line for line in said)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{name} is damaged: "):
        rows_of(path)


def test_a_dataset_that_was_saved_is_a_source(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install 'grmoe[data]'")
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_dict({"text": TEXTS})
    saved.save_to_disk(tmp_path / "saved", num_shards=2)
    # `map` leaves its result in the folder. It is a copy of the text.
    datasets.load_from_disk(tmp_path / "saved").map(lambda row: {"text": row["text"].upper()})
    assert list((tmp_path / "saved").glob("cache-*.arrow"))
    found = rows_of(tmp_path / "saved")
    assert [row.text for row in found if isinstance(row, Document)] == TEXTS
    assert {row.domain for row in found if isinstance(row, Document)} == {"saved"}
