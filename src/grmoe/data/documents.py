"""From files to documents: decompress, decode and parse. Every row becomes a document or a reason to skip it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from grmoe.data.sources import Unit, optional

NO_TEXT, BAD_JSON, UNDECODABLE = "no text", "invalid JSON", "undecodable bytes"
_BUFFER = 2**20
_BOM = b"\xef\xbb\xbf"


class Position(NamedTuple):
    """A point in the sources: unit, row in it (from 0), token in the document of that row."""

    unit: int = 0
    row: int = 0
    token: int = 0


class Document(NamedTuple):
    at: Position
    text: str
    domain: str
    size: int  # bytes of UTF-8
    split: str
    consumed: int  # bytes of the unit read so far, compressed: for progress only


class Skipped(NamedTuple):
    """A row that is not a document, and why."""

    reason: str


@dataclass(frozen=True)
class Reader:
    """All documents of `units`, in order, from any position."""

    units: Sequence[Unit]
    revisions: Sequence[str | None]
    """The commit of each unit that is a dataset of the hub."""
    validation: float
    """Share of the documents to hold out."""
    text_field: str
    domain_field: str
    strict: bool
    """Raise at the first row that is not a document."""

    def read(self, start: Position) -> Iterator[Document | Skipped]:
        for number in range(start.unit, len(self.units)):
            unit = self.units[number]
            first = start.row if number == start.unit else 0
            for row, content, consumed in self._rows(number, first):
                if isinstance(content, Skipped):
                    if self.strict:
                        line = "" if unit.kind == "text" else f", row {row + 1}"
                        raise ValueError(f"{unit.location}{line}: {content.reason}")
                    yield content
                    continue
                text, domain, raw = content
                split = "validation" if unit.held_out or held_out(raw, self.validation) else "train"
                yield Document(Position(number, row), text, domain, len(raw), split, consumed)

    def _rows(self, number: int, first: int) -> Iterator[tuple[int, tuple[str, str, bytes] | Skipped, int]]:
        """(row, (text, domain, UTF-8) or a reason, bytes of the unit read so far) from row `first` on."""
        unit = self.units[number]
        if unit.kind in ("parquet", "hub"):
            rows = _parquet_rows if unit.kind == "parquet" else _hub_rows
            fields = (self.text_field, self.domain_field)
            for row, fields_of_row, consumed in rows(unit, self.revisions[number], first, fields):
                yield row, self._document(unit, fields_of_row), consumed
            return
        row = 0
        try:
            with open(unit.location, "rb") as raw, _decompress(raw, unit) as stream:
                if unit.kind == "text":
                    if first == 0:
                        yield 0, _decode_text(stream.read(), unit.domain), unit.size
                    return
                for line in stream:
                    content = line.removeprefix(_BOM) if row == 0 else line
                    if row >= first and content.strip():  # a blank line is not a row
                        yield row, self._parse(unit, content), raw.tell()
                    row += 1
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{unit.location} is damaged after row {row}: {error}") from error

    def _parse(self, unit: Unit, line: bytes) -> tuple[str, str, bytes] | Skipped:
        try:
            fields = json.loads(line.decode())
        except UnicodeDecodeError:
            return Skipped(UNDECODABLE)
        except (ValueError, RecursionError):
            return Skipped(BAD_JSON)
        return self._document(unit, fields)

    def _document(self, unit: Unit, fields: Any) -> tuple[str, str, bytes] | Skipped:
        if not isinstance(fields, dict):
            return Skipped(NO_TEXT)
        text, domain = fields.get(self.text_field), fields.get(self.domain_field)
        if not isinstance(text, str) or not text.strip():
            return Skipped(NO_TEXT)
        name = unit.domain if domain is None or domain == "" else str(domain)
        try:
            name.encode()
            return text, name, text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair: JSON can write it, UTF-8 cannot
            return Skipped(UNDECODABLE)


def held_out(raw: bytes, share: float) -> bool:
    """Whether a document is for validation. Depends on its text alone, so it stays the same when others are added."""
    digest = hashlib.blake2b(raw, digest_size=8, person=b"grmoe-validation").digest()
    return int.from_bytes(digest, "little") < share * 2**64


def _decode_text(raw: bytes, domain: str) -> tuple[str, str, bytes] | Skipped:
    raw = raw.removeprefix(_BOM)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return Skipped(UNDECODABLE)
    return (text, domain, raw) if text.strip() else Skipped(NO_TEXT)


def _decompress(raw: IO[bytes], unit: Unit) -> IO[bytes]:
    name = unit.location.lower()
    if name.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), buffer_size=_BUFFER)
    if name.endswith(".xz"):
        return io.BufferedReader(lzma.LZMAFile(raw), buffer_size=_BUFFER)
    if name.endswith(".zst"):
        return io.BufferedReader(_Zstd(raw), buffer_size=_BUFFER)
    return raw


class _Zstd(io.RawIOBase):
    """A .zst file of one or more frames. zstandard's own reader does not notice that a file was cut off."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.zstandard = optional("zstandard")
        self.raw, self.ready = raw, b""
        self.frame: Any = None  # the frame that is being read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            compressed = self.raw.read(_BUFFER)
            if not compressed:
                if self.frame is not None:
                    raise EOFError("it ends inside a compressed frame")
                return 0
            self.ready = self._decompress(compressed)
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count

    def _decompress(self, compressed: bytes) -> bytes:
        parts = []
        while compressed:
            if self.frame is None:
                self.frame = self.zstandard.ZstdDecompressor().decompressobj()
            try:
                parts.append(self.frame.decompress(compressed))
            except self.zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            if not self.frame.eof:
                break
            compressed, self.frame = self.frame.unused_data, None
        return b"".join(parts)


Rows = Iterator[tuple[int, dict[str, Any], int]]


def _parquet_rows(unit: Unit, revision: str | None, first: int, fields: tuple[str, str]) -> Rows:
    parquet, arrow = optional("pyarrow.parquet"), optional("pyarrow")
    try:
        file = parquet.ParquetFile(unit.location)
        text_field = fields[0]
        if text_field not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise ValueError(f"{unit.location} has no column {text_field!r}; its columns are {names}")
        columns = [name for name in fields if name in file.schema_arrow.names]
        total, row = file.metadata.num_rows, 0
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            if row + batch.num_rows > first:
                for offset, values in enumerate(batch.to_pylist()):
                    if row + offset >= first:
                        yield row + offset, values, unit.size * (row + offset + 1) // total
            row += batch.num_rows
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{unit.location} is damaged: {error}") from error


def _hub_rows(unit: Unit, revision: str | None, first: int, fields: tuple[str, str]) -> Rows:
    datasets = optional("datasets")
    name, _, config = unit.location.partition(":")
    stream = datasets.load_dataset(name, config or None, split="train", streaming=True, revision=revision)
    for row, values in enumerate(stream.skip(first), start=first):
        if row == first and fields[0] not in values:
            raise ValueError(f"dataset {name} has no field {fields[0]!r}; its fields are {', '.join(values)}")
        yield row, values, 0
