"""Why a row is not a document."""

from __future__ import annotations

from typing import NamedTuple

EMPTY, NO_TEXT, BAD_JSON = "empty", "no text", "invalid JSON"
NOT_UTF8, BINARY, TOO_LONG = "not UTF-8", "binary", "too long"


class Bad(NamedTuple):
    """The reason, before it is known which row has it."""

    reason: str
    detail: str = ""


def not_utf8(error: UnicodeDecodeError, before: int = 0) -> Bad:
    """before: bytes in front of those that were decoded."""
    place = error.start + before
    return Bad(NOT_UTF8, f"byte 0x{error.object[error.start]:02x} at position {place:,}")


def too_long(limit: int, size: int = 0) -> Bad:
    """size: bytes, if they are known."""
    if size:
        return Bad(TOO_LONG, f"{size:,} bytes; --max-document-mb {-(-size // 2**20)} reads it")
    return Bad(TOO_LONG, f"more than {limit:,} bytes; see --max-document-mb")
