"""From files to documents: decode and parse. Every row becomes a document or a reason to skip it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grmoe.data.columns import Row, column_rows
from grmoe.data.conversations import conversation_text
from grmoe.data.cutting import cut_tail
from grmoe.data.decompression import DAMAGE, TooMuch, decompress, read_lines
from grmoe.data.problems import BAD_JSON, BINARY, EMPTY, NO_TEXT, NOT_UTF8, TOO_LONG, Bad, not_utf8, too_long
from grmoe.data.sources import Unit, is_compressed, optional
from grmoe.data.splitting import Split

MAX_DOCUMENT = 64 * 2**20  # bytes
_MUCH = 4  # documents of the longest kind: what too long rows of a compressed file may always unpack to
_RATIO = 100  # and this many times the file, which is more than text does
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
                if isinstance(content, Bad):
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

    def _rows(self, number: int, first: int) -> Iterator[tuple[int, _Content | Bad, int]]:
        """(row, content or a reason, bytes of the unit read so far) from row `first` on."""
        unit = self.units[number]
        if unit.kind in ("parquet", "arrow", "hub"):
            names = (self.text_field, self.domain_field)
            rows = (
                _hub_rows(unit, self.revisions[number], first, names)
                if unit.kind == "hub"
                else column_rows(unit, first, names, self.max_document)
            )
            for row, fields, consumed in rows:
                yield row, fields if isinstance(fields, Bad) else self._document(unit, fields), consumed
            return
        row = 0
        try:
            with open(unit.location, "rb") as raw, decompress(raw, unit.location) as stream:
                if unit.kind == "text":
                    if first == 0:
                        yield 0, self._decode(unit, stream.read(self.max_document + 1)), unit.size
                    return
                for line in read_lines(stream, self.max_document, self._patience(unit)):
                    content = line.removeprefix(_BOM) if line and row == 0 else line
                    if row >= first and (content is None or content.strip()):  # a blank line is not a row
                        yield row, self._parse(unit, content), raw.tell()
                    row += (
                        1 if line is None else max(1, line.count(b"\n"))
                    )  # blank lines come several at once
        except TooMuch:
            if row >= first:
                words = f"unpack from {unit.size:,} bytes to more than {self._patience(unit):,}"
                detail = f"rows that are too long or blank {words}; the rest of the file is not read"
                yield row, Bad(TOO_LONG, detail), unit.size
        except DAMAGE as error:
            raise ValueError(f"{unit.location} is damaged after row {row}: {error}") from error

    def _patience(self, unit: Unit) -> float:
        """Bytes of too long rows to read on through, to the rows after them. A small file may unpack to terabytes."""
        return _MUCH * self.max_document + _RATIO * unit.size if is_compressed(unit) else math.inf

    def _decode(self, unit: Unit, raw: bytes) -> _Content | Bad:
        """A .txt file."""
        if self.chat:
            return Bad(NO_TEXT, "conversations are read from .jsonl, .parquet and .arrow")
        if len(raw) > self.max_document:
            return too_long(self.max_document, 0 if is_compressed(unit) else unit.size)
        content = raw.removeprefix(_BOM)
        if raw.startswith(_UTF16):
            return Bad(NOT_UTF8, "it begins like UTF-16")
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            return not_utf8(error, len(raw) - len(content))
        if (zero := raw.find(0)) != -1:
            return Bad(BINARY, f"a zero byte at position {zero:,}")
        return (text, unit.domain, content) if text.strip() else Bad(EMPTY if not content else NO_TEXT)

    def _parse(self, unit: Unit, line: bytes | None) -> _Content | Bad:
        if line is None:
            return too_long(self.max_document)
        try:
            fields = json.loads(line.decode())
        except UnicodeDecodeError as error:
            return not_utf8(error)
        except json.JSONDecodeError as error:
            return Bad(BAD_JSON, f"{error.msg.removesuffix(' at')} at position {error.pos:,}")
        except (ValueError, RecursionError):  # a number of thousands of digits, or nested too deeply
            return Bad(BAD_JSON)
        return self._document(unit, fields)

    def _document(self, unit: Unit, fields: Any) -> _Content | Bad:
        if not isinstance(fields, dict):
            return Bad(NO_TEXT, "not an object")
        text, domain = fields.get(self.text_field), fields.get(self.domain_field)
        if self.chat:
            text = conversation_text(text)
        if not isinstance(text, str) or not text.strip():
            missing = self.text_field not in fields
            wrong = "is missing" if missing else "holds no conversation" if self.chat else "holds no text"
            return Bad(NO_TEXT, f"field {self.text_field!r} {wrong}")
        name = unit.domain if domain is None or domain == "" else str(domain)
        try:
            name.encode()
            raw = text.encode()
        except UnicodeEncodeError:  # JSON can write it, UTF-8 cannot
            return Bad(NOT_UTF8, "half of a surrogate pair")
        return (text, name, raw) if len(raw) <= self.max_document else too_long(self.max_document)


def _hub_rows(unit: Unit, revision: str | None, first: int, fields: tuple[str, str]) -> Iterator[Row]:
    datasets = optional("datasets")
    name, _, config = unit.location.partition(":")
    stream = datasets.load_dataset(name, config or None, split="train", streaming=True, revision=revision)
    for row, values in enumerate(stream.skip(first), start=first):
        if row == first and fields[0] not in values:
            raise ValueError(f"dataset {name} has no field {fields[0]!r}; its fields are {', '.join(values)}")
        yield row, values, 0
