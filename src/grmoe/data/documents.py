"""From files to documents: decode and parse. Every row becomes a document or a reason to skip it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grmoe.data.conversations import conversation_text
from grmoe.data.cutting import cut_tail
from grmoe.data.decompression import DAMAGE, decompress, read_lines
from grmoe.data.sources import Unit, is_compressed, optional
from grmoe.data.splitting import Split

EMPTY, NO_TEXT, BAD_JSON = "empty", "no text", "invalid JSON"
NOT_UTF8, BINARY, TOO_LONG = "not UTF-8", "binary", "too long"
MAX_DOCUMENT = 64 * 2**20  # bytes
_PARQUET_BATCH = 64 * 2**20  # bytes, about
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Position(NamedTuple):
    """A point in the sources."""

    unit: int = 0
    row: int = 0
    """In the unit, from 0."""
    token: int = 0
    """In the document of that row."""
    part: int = 0
    """1: the end of the row's text, where it is held out."""


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
    sentence: str
    """File, row, reason and what is wrong there."""


class _Bad(NamedTuple):
    """Why a row is not a document, before it is known which row it is."""

    reason: str
    detail: str = ""


_Content = tuple[str, str, bytes]  # text, domain, UTF-8


@dataclass(frozen=True)
class Reader:
    """All documents of `units`, in order, from any position."""

    units: Sequence[Unit]
    revisions: Sequence[str | None]
    """The commit of each unit that is a dataset of the hub."""
    split: Split = Split()  # noqa: RUF009  frozen
    """What is held out."""
    text_field: str = "text"
    domain_field: str = "domain"
    chat: bool = False
    """The text field holds a conversation. The text of a document is then the conversation as JSON."""
    strict: bool = False
    """Raise at the first row that is not a document."""
    max_document: int = MAX_DOCUMENT
    """Bytes. Longer rows of .jsonl and longer .txt files are skipped, and never in memory as a whole."""

    def read(self, start: Position = Position()) -> Iterator[Document | Skipped]:  # noqa: B008  immutable
        for number in range(start.unit, len(self.units)):
            unit = self.units[number]
            first = start.row if number == start.unit else 0
            for row, content, consumed in self._rows(number, first):
                at = Position(number, row)
                if isinstance(content, _Bad):
                    yield self.skip(at, *content)
                    continue
                for document in self._parts(unit, at, content, consumed):
                    if document.at >= start._replace(token=0):
                        yield document

    def skip(self, at: Position, reason: str, detail: str = "") -> Skipped:
        """Describe a row that is not a document."""
        unit = self.units[at.unit]
        line = "" if unit.kind == "text" else f", row {at.row + 1}"
        sentence = f"{line}: {reason}{f' ({detail})' if detail else ''}"
        if self.strict:
            raise ValueError(unit.location + sentence)
        return Skipped(reason, unit.name + sentence)

    def _parts(self, unit: Unit, at: Position, content: _Content, consumed: int) -> Iterator[Document]:
        """The document of a row: in two, where the end of every document is held out."""
        text, domain, raw = content
        if unit.held_out or not self.split.tail:
            held_out = unit.held_out or self.split.holds_out(raw)
            yield Document(at, text, domain, len(raw), "validation" if held_out else "train", consumed)
            return
        for part, (split, piece) in enumerate(
            zip(("train", "validation"), cut_tail(text, self.split.tail), strict=True)
        ):
            if piece.strip():
                yield Document(at._replace(part=part), piece, domain, len(piece.encode()), split, consumed)

    def _rows(self, number: int, first: int) -> Iterator[tuple[int, _Content | _Bad, int]]:
        """(row, content or a reason, bytes of the unit read so far) from row `first` on."""
        unit = self.units[number]
        if unit.kind in ("parquet", "hub"):
            rows = _parquet_rows if unit.kind == "parquet" else _hub_rows
            fields = (self.text_field, self.domain_field)
            for row, fields_of_row, consumed in rows(unit, self.revisions[number], first, fields):
                yield row, self._document(unit, fields_of_row), consumed
            return
        row = 0
        try:
            with open(unit.location, "rb") as raw, decompress(raw, unit.location) as stream:
                if unit.kind == "text":
                    if first == 0:
                        yield 0, self._decode(unit, stream.read(self.max_document + 1)), unit.size
                    return
                for line in read_lines(stream, self.max_document):
                    content = line.removeprefix(_BOM) if line and row == 0 else line
                    if row >= first and (content is None or content.strip()):  # a blank line is not a row
                        yield row, self._parse(unit, content), raw.tell()
                    row += 1
        except DAMAGE as error:
            raise ValueError(f"{unit.location} is damaged after row {row}: {error}") from error

    def _decode(self, unit: Unit, raw: bytes) -> _Content | _Bad:
        """A .txt file."""
        if self.chat:
            return _Bad(NO_TEXT, "conversations are read from .jsonl and .parquet")
        if len(raw) > self.max_document:
            return self._too_long(0 if is_compressed(unit) else unit.size)
        content = raw.removeprefix(_BOM)
        if raw.startswith(_UTF16):
            return _Bad(NOT_UTF8, "it begins like UTF-16")
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            return _not_utf8(error, len(raw) - len(content))
        if (zero := raw.find(0)) != -1:
            return _Bad(BINARY, f"a zero byte at position {zero:,}")
        return (text, unit.domain, content) if text.strip() else _Bad(EMPTY if not content else NO_TEXT)

    def _too_long(self, size: int = 0) -> _Bad:
        """size: bytes, if they are known."""
        if size:
            return _Bad(TOO_LONG, f"{size:,} bytes; --max-document-mb {-(-size // 2**20)} reads it")
        return _Bad(TOO_LONG, f"more than {self.max_document:,} bytes; see --max-document-mb")

    def _parse(self, unit: Unit, line: bytes | None) -> _Content | _Bad:
        if line is None:
            return self._too_long()
        try:
            fields = json.loads(line.decode())
        except UnicodeDecodeError as error:
            return _not_utf8(error)
        except json.JSONDecodeError as error:
            return _Bad(BAD_JSON, f"{error.msg} at position {error.pos:,}")
        except (ValueError, RecursionError):  # a number of thousands of digits, or nested too deeply
            return _Bad(BAD_JSON)
        return self._document(unit, fields)

    def _document(self, unit: Unit, fields: Any) -> _Content | _Bad:
        if not isinstance(fields, dict):
            return _Bad(NO_TEXT, "not an object")
        text, domain = fields.get(self.text_field), fields.get(self.domain_field)
        if self.chat:
            text = conversation_text(text)
        if not isinstance(text, str) or not text.strip():
            missing = self.text_field not in fields
            wrong = "is missing" if missing else "holds no conversation" if self.chat else "holds no text"
            return _Bad(NO_TEXT, f"field {self.text_field!r} {wrong}")
        name = unit.domain if domain is None or domain == "" else str(domain)
        try:
            name.encode()
            raw = text.encode()
        except UnicodeEncodeError:  # JSON can write it, UTF-8 cannot
            return _Bad(NOT_UTF8, "half of a surrogate pair")
        return (text, name, raw) if len(raw) <= self.max_document else self._too_long()


def _not_utf8(error: UnicodeDecodeError, before: int = 0) -> _Bad:
    place = error.start + before
    return _Bad(NOT_UTF8, f"byte 0x{error.object[error.start]:02x} at position {place:,}")


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
        groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
        rows = _PARQUET_BATCH * total // max(1, sum(group.total_byte_size for group in groups))
        for batch in file.iter_batches(batch_size=min(1024, max(1, rows)), columns=columns):
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
