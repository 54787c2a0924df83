"""Token types on text made by hand."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from grmoe.probe.pieces import Pieces
from grmoe.probe.token_types import token_types
from grmoe.probe.words import (
    AUXILIARIES,
    CONJUNCTIONS,
    DETERMINERS,
    FUNCTION_WORDS,
    PREPOSITIONS,
    PRONOUNS,
    TYPES,
)

SHORT = {"punctuation": ".", "function word": "f", "code": "c", "number/math": "#", "proper noun": "P"}
SHORT |= {"common noun": "n", "other": "_"}


def typed(text: str) -> str:
    """One letter per word, number, sign or run of several spaces."""
    spans = [m.span() for m in re.finditer(r"\w+(?:['’]\w+)?|[^\w\s]|\n| {2,}", text)]
    return "".join(SHORT[TYPES[k]] for k in token_types(text, spans))


def test_there_are_150_function_words() -> None:
    lists = (DETERMINERS, PRONOUNS, PREPOSITIONS, CONJUNCTIONS, AUXILIARIES)
    assert len(FUNCTION_WORDS) == sum(len(words.split()) for words in lists) == 150


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("The cat sat on the mat.", "fnnffn."),
        ("We went to Paris; Mary's dog didn't.", "fnfP.Pnf."),
        ("It's WILL, not will.", "ff.ff."),
        ("“Stop,” she said — quietly…", ".n..fn.n."),
        ("in 1999 he paid $3.50, or 10% more", "f#fn####.f##f"),
        ("the 3rd of B2B", "f#f#"),
        ("so 2 * 3 < π and -5", "f####nf##"),
        ("a well-known e-mail", "fn.nn.n"),
        ("20€ and ☃ and £", "#_f_f_"),
    ],
)
def test_prose(text: str, types: str) -> None:
    assert typed(text) == types


def test_a_capital_where_one_is_due_says_nothing_unless_the_text_says_it_elsewhere() -> None:
    # "London" starts a sentence and is a name inside another; "Rain" is not.
    assert typed("London is wet. Rain fell. He likes London.") == "Pfn.nn.fnP."
    # Seen in small letters, too: no name.
    assert typed("Rain fell. The Rain Man saw rain.") == "nn.fPPnn."
    assert typed('he said: "Stop" to Bob') == "fn..n.fP"
    assert typed("ALL IN CAPITALS\nand NASA") == "ffn_fP"


def test_code_is_told_by_its_line() -> None:
    assert typed("def add(a, b=2):") == "ccccccc#cc"
    assert typed("In class, we import goods.") == "fn.fnn."
    assert typed("import os") == "cc"
    assert typed("from os import path") == "cccc"
    assert typed("x += 1;") == "ccc#c"
    assert typed("if (a && b) {") == "c" * 8
    assert typed("for each of them, wait:") == "ffff.n."
    assert (
        typed("if not, then that:") == "cccccc"
    )  # a heading with the syntax of a statement: known to be wrong
    assert typed("read my_file twice") == "ncn"
    assert typed("the word(s) of Smith(2004)") == "fn.n.fP.#."
    assert typed("you may then call run() twice") == "fffnn..n"


def test_indentation_is_code_and_the_prose_behind_it_is_not() -> None:
    assert typed("    return a + b  # the sum of Alice") == "ccccc_cfnfP"
    assert typed("    The sum of the parts.") == "cfnffn."
    assert typed("a  b\n") == "f_n_"


def test_fences_make_code_of_what_they_enclose() -> None:
    assert typed("```\nsome thing\n```\nsome thing") == "ccc_cc_ccc_fn"


def test_pieces_have_the_type_of_their_word_and_spaces_do_not_matter() -> None:
    text = "He met Nabokov, twice"
    cuts = [(0, 2), (2, 6), (6, 9), (9, 12), (12, 14), (14, 15), (15, 18), (18, 21)]
    names = [TYPES[k] for k in token_types(text, cuts)]
    assert names == [
        "function word", "common noun", "proper noun", "proper noun", "proper noun", "punctuation", "common noun",
        "common noun",
    ]  # fmt: skip
    # Over two words the one that says more; without any character nothing.
    assert [TYPES[k] for k in token_types("so, 5", [(0, 3), (2, 5), (3, 3)])] == [
        "function word",
        "number/math",
        "other",
    ]


def test_offsets_of_a_byte_level_tokenizer_cover_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = Pieces(tokenizer)
    text = "Anna paid 3 € — naïve 𝔘nicode 雪\n"
    ids = np.array(tokenizer(text).input_ids)
    decoded, spans = pieces.spans(ids)
    assert decoded == text
    assert spans[0][0] == 0
    assert spans[-1][1] == len(text)
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end - 1 <= start <= end  # the same character where its bytes are several tokens
    # Cut inside a character: still a span for every token.
    cut, spans = pieces.spans(ids[5:-2])
    assert len(spans) == len(ids) - 7
    assert spans[-1][1] == len(cut)


def test_documents_are_typed_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = Pieces(tokenizer)
    first, second = (np.array(tokenizer(t).input_ids) for t in ("the sea and Rain", "Rain fell"))
    end = np.array([tokenizer.eos_token_id])
    together = pieces.types(np.concatenate([first, end, second]))
    assert together.tolist() == [*pieces.types(first), TYPES.index("other"), *pieces.types(second)]
    assert pieces.show(end) == ["<|endoftext|>"]
