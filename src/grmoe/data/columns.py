"""Rows of files that store columns: .parquet, and the .arrow files that `datasets` saves.

Memory is bounded whatever a file holds. Text of .parquet is read as a dictionary, so the same text in a thousand rows
is in memory once. A value becomes a Python object only after its size is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grmoe.data.problems import TOO_LONG, Bad, not_utf8, too_long
from grmoe.data.sources import Unit, optional

_BATCH = 64 * 2**20  # bytes of a batch of rows, about
_GROUP = 2**28  # bytes that a row group may always unpack to
_RATIO = 100  # no text compresses that well

Row = tuple[
    int, dict[str, Any] | Bad, int
]  # number, fields or why it has none, bytes of the file read so far
_Batch = tuple[int, Any, int]  # number of its first row, Arrow's batch or why it is not read, bytes read


def column_rows(unit: Unit, first: int, fields: tuple[str, str], limit: int) -> Iterator[Row]:
    """The rows of a file from row `first` on. fields: text and domain. limit: bytes of a field."""
    arrow = optional("pyarrow")
    batches = _parquet_batches if unit.kind == "parquet" else _arrow_batches
    try:
        for start, batch, consumed in batches(unit, first, fields):
            if isinstance(batch, Bad):
                yield start, batch, consumed
                continue
            for i in range(max(0, first - start), batch.num_rows):
                yield start + i, _fields(batch, i, limit), consumed
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, not of the content
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{unit.location} is damaged: {reason}") from error


def _parquet_batches(unit: Unit, first: int, fields: tuple[str, str]) -> Iterator[_Batch]:
    parquet = optional("pyarrow.parquet")
    footer = parquet.read_metadata(unit.location)
    leaves = [footer.schema.column(i) for i in range(len(footer.schema))]
    leaves = [leaf for leaf in leaves if any(f"{leaf.path}.".startswith(f"{name}.") for name in fields)]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    with parquet.ParquetFile(
        unit.location, metadata=footer, read_dictionary=texts, page_checksum_verification=True
    ) as file:
        columns = _present(unit, file.schema_arrow.names, fields)
        row = 0
        for number in range(footer.num_row_groups):
            # Not its `column(i)`: on damage that ends the process.
            rows, unpacked = footer.row_group(number).num_rows, footer.row_group(number).total_byte_size
            end = row + rows
            if unpacked > max(_GROUP, _RATIO * unit.size):
                if row >= first:
                    words = (
                        f"{rows:,} rows of {unpacked:,} bytes in a file of {unit.size:,}, which is no text"
                    )
                    yield row, Bad(TOO_LONG, words), unit.size * end // footer.num_rows
            elif end > first:
                count = min(1024, max(1, _BATCH * rows // max(1, unpacked)))
                for batch in file.iter_batches(count, row_groups=[number], columns=columns):
                    yield row, batch, unit.size * (row + batch.num_rows) // footer.num_rows
                    row += batch.num_rows
            row = end


def _arrow_batches(unit: Unit, first: int, fields: tuple[str, str]) -> Iterator[_Batch]:
    arrow, ipc = optional("pyarrow"), optional("pyarrow.ipc")
    with arrow.memory_map(unit.location) as source:
        is_file = source.read(6) == b"ARROW1"  # the other form is a stream
        source.seek(0)
        opened = ipc.open_file(source) if is_file else ipc.open_stream(source)
        columns, row = _present(unit, opened.schema.names, fields), 0
        batches = (opened.get_batch(i) for i in range(opened.num_record_batches)) if is_file else opened
        for batch in batches:
            if row + batch.num_rows > first:
                chosen = batch.select(columns)
                chosen.validate(full=True)  # a wrong offset would read outside of the file
                yield row, chosen, source.tell()
            row += batch.num_rows


def _present(unit: Unit, names: list[str], fields: tuple[str, str]) -> list[str]:
    text = fields[0]
    if text not in names:
        raise ValueError(f"{unit.location} has no column {text!r}; its columns are {', '.join(names)}")
    return [name for name in dict.fromkeys(fields) if name in names]


class _TooLong(Exception):
    pass


def _fields(batch: Any, row: int, limit: int) -> dict[str, Any] | Bad:
    try:
        columns = zip(batch.schema.names, batch.columns, strict=True)
        return {name: _Value(limit).of(column[row]) for name, column in columns}
    except _TooLong:
        return too_long(limit)
    except UnicodeDecodeError as error:
        return not_utf8(error)


class _Value:
    """Turns one of Arrow's values into a Python object with at most `limit` bytes of text. Bytes are text as well."""

    def __init__(self, limit: int) -> None:
        self.left, self.types = limit, optional("pyarrow").types

    def of(self, scalar: Any) -> Any:
        types, kind = self.types, scalar.type
        if not scalar.is_valid:
            return None
        if types.is_dictionary(kind):
            return self.of(scalar.value)
        if hasattr(scalar, "as_buffer"):  # all kinds of strings and bytes
            buffer = scalar.as_buffer()
            self._take(buffer.size)
            return buffer.to_pybytes().decode()
        if types.is_struct(kind):
            return {name: self.of(value) for name, value in scalar.items()}
        if types.is_list(kind) or types.is_large_list(kind):
            self._take(len(scalar.values))
            return [self.of(value) for value in scalar.values]
        return None if types.is_nested(kind) else scalar.as_py()

    def _take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise _TooLong
