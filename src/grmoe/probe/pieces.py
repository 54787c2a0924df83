"""From token ids back to text, with the characters of each token."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grmoe.probe.token_types import token_types

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes. Printable bytes are their own letter, the others begin at U+0100."""
    printable = [b for first, last in ("!~", "¡¬", "®ÿ") for b in range(ord(first), ord(last) + 1)]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


@dataclass(frozen=True)
class Pieces:
    """The bytes of every token of a vocabulary. Supports byte-level BPE, and ▁ and <0x0A> of SentencePiece."""

    tokenizer: Any

    @cached_property
    def special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def table(self) -> list[bytes]:
        """Bytes by token id. Empty for special tokens, because they are not text."""
        names = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        letters = _byte_alphabet()
        byte_level = "ByteLevel" in str(self.tokenizer.backend_tokenizer.decoder)

        def spell(name: str) -> bytes:
            if byte_level and all(c in letters for c in name):
                return bytes(letters[c] for c in name)
            if match := _BYTE.fullmatch(name):
                return bytes([int(match[1], 16)])
            return name.replace("▁", " ").encode()

        return [b"" if i in self.special or n is None else spell(n) for i, n in enumerate(names)]

    def spans(self, ids: NDArray[np.int64]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the characters (start, end) of each token.

        A token with only some bytes of a character spans the whole character. Bytes that are not UTF-8, because a
        window cut a character in two, are one character each.
        """
        parts = [self.table[i] if i < len(self.table) else b"" for i in ids.tolist()]
        text = b"".join(parts).decode("utf-8", "surrogateescape")
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        width = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
        width[(points >= 0xDC80) & (points <= 0xDCFF)] = 1
        character_of_byte = np.repeat(np.arange(len(points)), width)
        ends = np.cumsum([len(part) for part in parts])
        spans = []
        for part, end in zip(parts, ends.tolist(), strict=True):
            first = end - len(part)
            places = (int(character_of_byte[first]), int(character_of_byte[end - 1]) + 1) if part else (0, 0)
            spans.append(places)
        return text, spans

    def types(self, ids: NDArray[np.int64]) -> NDArray[np.int8]:
        """`token_types` of a stream of tokens. Each document, up to its end-of-text token, is typed on its own."""
        out = []
        stops = [i + 1 for i, token in enumerate(ids.tolist()) if token in self.special]
        for start, stop in zip([0, *stops], [*stops, len(ids)], strict=True):
            out.append(token_types(*self.spans(ids[start:stop])))
        return np.concatenate(out)

    def show(self, ids: NDArray[np.int64]) -> list[str]:
        """Each token as text to look at. Part of a character is �, a special token is its name."""
        names = self.tokenizer.convert_ids_to_tokens(ids.tolist())
        return [
            self.table[i].decode("utf-8", "replace") if i < len(self.table) and self.table[i] else str(name)
            for i, name in zip(ids.tolist(), names, strict=True)
        ]
