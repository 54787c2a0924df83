"""The text of an answer while its tokens arrive: what can be shown already, and where a stop string ends it."""

from __future__ import annotations

from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a byte-level tokenizer makes of half a character


class Text:
    """Shows the pieces of `tokenizer.decode(tokens)`, which is decoded anew each time: joined they are that text."""

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.shown = 0

    def add(self, tokens: list[int], last: bool) -> tuple[str, bool]:
        """(the next piece, whether a stop string came) after all tokens so far; `last`: nothing follows."""
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            text = text[: min(found)]
        elif not last:
            text = text.rstrip(UNFINISHED)
            text = text[: len(text) - self._begun(text)]
        piece, self.shown = text[self.shown :], max(self.shown, len(text))
        return piece, bool(found)

    def _begun(self, text: str) -> int:
        """Characters at the end that may become a stop string."""
        for length in range(max(map(len, self.stops), default=1) - 1, 0, -1):
            if any(text.endswith(stop[:length]) for stop in self.stops if len(stop) > length):
                return length
        return 0
