"""Where a long text is cut: for tokenising in pieces of bounded size, and for holding out the end of a document."""

from __future__ import annotations

import re
from collections.abc import Iterator

PIECE = 2**16  # characters given to a tokenizer at once: it takes a hundred bytes of memory for each
_SEARCH = 4096  # characters before the wanted place in which a better one is looked for


def cut_text(text: str, limit: int) -> Iterator[str]:
    """`text` in pieces of at most `limit` characters. A piece begins at a space, where there is one."""
    start = 0
    while len(text) - start > limit:
        stop = _gap_before(text, start + 1, start + limit)
        yield text[start:stop]
        start = stop
    yield text[start:]


def cut_runs(text: str, limit: int) -> Iterator[str]:
    """`text`, cut where more than `limit` characters follow each other without white space."""
    start = 0
    for run in re.finditer(rf"\S{{{limit + 1},}}", text):
        for stop in range(run.start() + limit, run.end(), limit):
            yield text[start:stop]
            start = stop
    yield text[start:]


def cut_tail(text: str, share: float) -> tuple[str, str]:
    """(the text without its last `share`, the rest). The rest begins with a line, if one begins nearby."""
    at = int(len(text) * (1 - share))
    line = text.rfind("\n", max(0, at - _SEARCH), at)
    at = line + 1 if line != -1 else _gap_before(text, 1, at) if at > 0 else 0
    return text[:at], text[at:]


def _gap_before(text: str, first: int, last: int) -> int:
    """The last good place from `first` to `last` to cut a text. Looks back a few thousand characters.

    Best is before a single space between two words. Pre-tokenizers separate words there, so the pieces have the tokens
    of the whole.
    """
    first = max(first, last - _SEARCH)
    end = last + 1
    while (at := text.rfind(" ", first, end)) != -1:
        if not text[at - 1].isspace() and not text[at + 1 : at + 2].isspace():
            return at
        end = at
    at = max(text.rfind(space, first, last + 1) for space in "\n ")
    return last if at == -1 else at
