"""What kind of token each piece of a text is: the heuristics of the paper's appendix "Token-Level Routing Details".

The appendix types entries of the vocabulary, but a piece alone does not tell (" class" is a noun or a keyword). Here a
text is cut into words first. Each word is typed in its place, and a piece has the type of its word.

The appendix's classes overlap, and it gives no order. This is ours:

    code         everything in a line of code except numbers and comments; identifiers with an underscore, braces and
                 indentation anywhere
    number/math  a word that contains a digit, with its sign, currency and percent; a mathematical sign (category Sm)
    punctuation  Unicode categories P*; in a line of code it is code
    function     one of 150 words in any case, also in "don't" and "it's"
    proper noun  a capital that the position does not require, see `_is_name`
    common noun  every other word, verbs and adjectives included: the appendix's "remainder"
    other        the rest: line ends, spaces, end of text, other symbols
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grmoe.probe.words import CODE, COMMON, FUNCTION, FUNCTION_WORDS, NUMBER, OTHER, PROPER, PUNCTUATION

# A piece that covers several words (")." or "1," with some tokenizers) has the first of its types in this order.
_PRECEDENCE = (CODE, NUMBER, PROPER, FUNCTION, COMMON, PUNCTUATION, OTHER)
_RANK = np.argsort(_PRECEDENCE)

_WORD = re.compile(
    r"(?P<number>(?:(?<!\w)[-−+])?[$€£]?(?:\d+(?:[.,:/–-]\d+)*%?\w*|[^\W\d_]+\d\w*))"
    r"|(?P<operator>(?<=\d )[-*/^%](?= \d))"
    r"|(?P<identifier>\w*_\w*)"
    r"|(?P<word>[^\W\d_]+(?:['’][^\W\d_]+)*)"
    r"|(?P<sign>\S)"
)

# A line of code by its syntax. Keywords alone do not decide, because "class" and "import" are English too.
_CODE_LINE = re.compile(
    r"""
      ^\s*(?:async\s+)?(?:def|class)\s+\w+\s*[(:]            # def f(    class A:
    | ^\s*(?:import\s+[\w.]+(?:\s+as\s+\w+)?(?:,\s*[\w.]+)*\s*;?$ | from\s+[\w.]+\s+import\b)
    | ^\s*(?:if|elif|else|for\b.*\bin|while|with|try|except|finally)\b[^?!]*:\s*(?:\#.*)?$
    | ^\s*(?:return|raise|yield|assert|del|global|nonlocal)\b(?:\s+[\w.]+)?\s*(?:[-+*/%<>=(\[{"'\#].*)?;?$
    | ^\s*(?:pass|break|continue|else|try)\s*;?$
    | ^\s*(?:@\w[\w.]*(?:\(.*\))?\s*$|\#include\b|\#define\b|</?\w+[^>]*>)  # a decorator, C, a tag
    | ^\s*(?:public|private|static|const|let|var|fn|func|function)\s+[\w<>\[\]]+\s*[\w(=:{]
    | ^\s*[\w.\[\]'"]+(?:\s*,\s*[\w.\[\]'"]+)*\s*(?::\s*[\w.\[\]| ]+)?[-+*/|&]?=(?!=)\s*\S   # an assignment
    | [{}]\s*$ | ^\s*[)\]}]+[,;:]?\s*$
    """,
    re.VERBOSE,
)
# Signs of code that prose may quote: operators, a call (but not "word(s)" or "Smith(2004)"), a final semicolon.
_SIGN_OF_CODE = re.compile(r"==|!=|\+=|-=|->|=>|::|&&|\|\||:=|</\w|[\w\]]\((?!e?s\)|\d)|[(=\[\]{}].*;\s*$")
# Four plain words in a row, outside quotes and comments, are prose nevertheless.
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|(?:#|//)\s.*$")
_PROSE = re.compile(r"\b[A-Za-z]?[a-z]+(?: [a-z]{2,}){3}\b")
_FENCE = re.compile(r"^\s*(?:```|~~~)")
_COMMENT = re.compile(r"(?:^|\s)(?:#(?=\s|$)|//(?=\s|$))")
_BRACES = frozenset("{}`")
_OPENING = frozenset("\"'“‘«([{*-•#>_–— \t\r")
_QUOTES = frozenset('"“‘«')
_ENDS = frozenset(".!?:…\n")


@dataclass(frozen=True)
class _Found:
    """A capitalised word. Its type depends on the rest of the text."""

    start: int
    end: int
    stem: str
    due: bool
    """The position requires the capital: a sentence starts, or the whole line is in capitals."""


def token_types(text: str, offsets: Sequence[tuple[int, int]]) -> NDArray[np.int8]:
    """The type (place in `words.TYPES`) of each piece text[start:end]. A leading space belongs to the word after it.

    A piece that covers several words has the first of their types in `_PRECEDENCE`. An empty piece (start = end, the
    end of text) is "other".
    """
    types_C = _character_types(text)
    ranks_C = _RANK[types_C]
    space_C = np.fromiter((c.isspace() for c in text), dtype=bool, count=len(text))
    out = np.full(len(offsets), OTHER, dtype=np.int8)
    for place, (start, end) in enumerate(offsets):
        if start >= end:
            continue
        ranks = ranks_C[start:end]
        solid = ~space_C[start:end]
        # Spaces count only in a piece of nothing but spaces: indentation is code.
        out[place] = _PRECEDENCE[(ranks[solid] if solid.any() else ranks).min()]
    return out


def _character_types(text: str) -> NDArray[np.int8]:
    """The type of the word that each character belongs to."""
    types_C = np.full(len(text), OTHER, dtype=np.int8)
    capitalised: list[_Found] = []
    inside, lower = set(), set()
    fenced, at = False, 0
    for line in text.splitlines(keepends=True):
        fence = bool(_FENCE.match(line))
        code = fenced or fence or _is_code(line.rstrip("\r\n"))
        fenced ^= fence
        comment = _COMMENT.search(line)
        code_until = (comment.end() if comment else len(line)) if code else 0
        _type_indentation(line, at, types_C)
        loud = line.isupper()
        for match in _WORD.finditer(line):
            start, end = match.span()
            kind, word = match.lastgroup, match.group()
            if start < code_until:
                found = NUMBER if kind == "number" and not word[0].isalpha() else CODE
            elif kind in ("number", "operator"):
                found = NUMBER
            elif kind == "identifier":
                found = CODE if any(c.isalnum() for c in word) else PUNCTUATION
            elif kind == "sign":
                found = _sign(word)
            else:
                found = _plain_word(word)
                stem = _stem(word)
                if found == COMMON and stem[:1].isupper():
                    due = loud or _starts_sentence(text, at + start)
                    capitalised.append(_Found(at + start, at + end, stem, due))
                    if not due:
                        inside.add(stem)
                elif found == COMMON:
                    lower.add(stem)
            types_C[at + start : at + end] = found
        at += len(line)
    for name in capitalised:
        if _is_name(name, inside, lower):
            types_C[name.start : name.end] = PROPER
    return types_C


def _is_code(line: str) -> bool:
    if _CODE_LINE.search(line):
        return True
    return bool(_SIGN_OF_CODE.search(line)) and not _PROSE.search(_QUOTED.sub("", line))


def _type_indentation(line: str, at: int, types_C: NDArray[np.int8]) -> None:
    """Two spaces or a tab before text are indentation. The words after them may still be prose."""
    body = line.lstrip()
    width = len(line) - len(body)
    if body and (width >= 2 or "\t" in line[:width]):
        types_C[at : at + width] = CODE


def _sign(sign: str) -> int:
    if sign in _BRACES:
        return CODE
    category = unicodedata.category(sign)
    return NUMBER if category == "Sm" else PUNCTUATION if category[0] == "P" else OTHER


def _stem(word: str) -> str:
    """Without the ending after an apostrophe: "John's" is about John."""
    return re.split("['’]", word)[0]


def _plain_word(word: str) -> int:
    lowered = word.lower().replace("’", "'")
    # A word that ends in n't is an auxiliary, and its stem ("ca", "wo") is not a word.
    if lowered in FUNCTION_WORDS or lowered.endswith("n't") or _stem(lowered) in FUNCTION_WORDS:
        return FUNCTION
    return COMMON


def _starts_sentence(text: str, start: int) -> bool:
    """Whether a capital is due: at the start of the text, a line or a quotation, or after a full stop."""
    at = start - 1
    while at >= 0 and text[at] in _OPENING:
        if text[at] in _QUOTES:
            return True
        at -= 1
    return at < 0 or text[at] in _ENDS


def _is_name(word: _Found, inside: set[str], lower: set[str]) -> bool:
    """A word with a capital that is not due. Where a capital is due, the rest of the text decides:

    the word is a name if it has a capital inside a sentence elsewhere, and never occurs in small letters.
    """
    if not word.due:
        return True
    return word.stem in inside and word.stem.lower() not in lower
