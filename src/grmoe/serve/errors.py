"""How a request is refused: the message, its length, and OpenAI's form."""

from __future__ import annotations

import json
import reprlib
from typing import Any

MESSAGE = 300
"""Characters per error message. A message shows what was sent only in part, because a body can be a megabyte."""
_NAME = 64  # characters of a field's name

_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxlist, _repr.maxdict, _repr.maxstring, _repr.maxlong, _repr.maxother = (
    2,
    4,
    4,
    60,
    40,
    60,
)


class Invalid(Exception):
    """A bad request: HTTP status, message, and the field at fault."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        message = cut(message, MESSAGE)
        super().__init__(message)
        self.message, self.status, self.code = message, status, code
        self.param = None if param is None else cut(param, _NAME)


def shorten(value: Any) -> str:
    """A value for a message: its beginning, in time that does not grow with its size."""
    return cut(_repr.repr(value), 80)


def cut(text: str, length: int) -> str:
    """At most `length` characters on one line, with "…" where some are missing."""
    text = " ".join(text[: 4 * length].split()) if "\n" in text[: 4 * length] else text
    return text if len(text) <= length else f"{text[: length - 1]}…"


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": cut(message, MESSAGE), "type": kind, "param": param, "code": code}}


def to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
