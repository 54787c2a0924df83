"""The text of an answer while its tokens arrive: what can be sent already, and where a stop string ends it."""

from __future__ import annotations

from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a byte-level tokenizer decodes half a character to


class AnswerText:
    """Cuts `tokenizer.decode(tokens)` into pieces. The pieces joined are that text."""

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.sent = 0  # characters

    def add(self, tokens: list[int], last: bool) -> tuple[str, bool]:
        """(next piece, whether a stop string was found). tokens: all so far. last: no more will come."""
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            text = text[: min(found)]
        elif not last:
            text = text.rstrip(_UNFINISHED)
            text = text[: len(text) - self._held_back(text)]
        piece, self.sent = text[self.sent :], max(self.sent, len(text))
        return piece, bool(found)

    def _held_back(self, text: str) -> int:
        """Characters at the end that may turn out to begin a stop string."""
        for length in range(max(map(len, self.stops), default=1) - 1, 0, -1):
            if any(text.endswith(stop[:length]) for stop in self.stops if len(stop) > length):
                return length
        return 0
