"""Pieces of text: together they are the whole, and a stop string never shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_model import make_tokenizer

from grmoe.serve.answer_text import AnswerText

TOKENIZER = make_tokenizer()


def pieces(tokens: list[int], stops: list[str]) -> tuple[list[str], bool]:
    text, shown = AnswerText(TOKENIZER, stops), []
    for n in range(1, len(tokens) + 1):
        piece, stopped = text.add(tokens[:n], last=n == len(tokens))
        shown.append(piece)
        if stopped:
            return shown, True
    return shown, False


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_any_bytes_come_out_as_decoded(tokens: list[int]) -> None:
    """Bytes of half a character, or of none, included."""
    assert "".join(pieces(tokens, [])[0]) == TOKENIZER.decode(tokens)


def test_no_half_characters() -> None:
    tokens = TOKENIZER("añ€𝄞b").input_ids
    assert [piece for piece in pieces(tokens, [])[0] if piece] == ["a", "ñ", "€", "𝄞", "b"]


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings(text: str, stops: list[str]) -> None:
    """What is shown ends before the first of them, wherever the pieces are cut."""
    tokens = TOKENIZER(text + "c").input_ids
    shown, stopped = pieces(tokens, stops)
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    assert stopped == bool(found)
    if not found:
        assert "".join(shown) == text + "c"
        return
    # The first token that completes any of them ends the answer.
    first = min(at + len(s) for s in stops if (at := text.find(s)) >= 0)
    cut = min(at for s in stops if (at := text[:first].find(s)) >= 0)
    assert "".join(shown) == text[:cut]


@pytest.mark.parametrize(("stop", "whole"), [("\n\n", "a\nb"), ("xyz", "axyb")])
def test_a_beginning_that_becomes_nothing_is_shown(stop: str, whole: str) -> None:
    assert "".join(pieces(TOKENIZER(whole).input_ids, [stop])[0]) == whole
