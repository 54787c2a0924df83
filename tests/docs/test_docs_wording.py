"""Plain English: no long sentences in README and the how-to pages, no phrase that needs a second reading anywhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from doc_pages import NAMES, ROOT, all_pages, sentences

LONGEST = 40  # words; past 30 a sentence is worth another look
READ_ALOUD = [n for n in NAMES if n in ("README.md", "docs/index.md", "docs/quickstart.md") or "/howto/" in n]
BANNED = [
    r"\b(experts|tokens|loss|nats|steps|line|row|column|FLOPs|active|seeds?|bytes) a "
    r"(token|step|second|layer|run|method|seed|row|request|process|GPU)\b(?! (gets?|can|may|is|has|have|leads)\b)",
    r"\bto the (bit|byte)\b",
    r"\bsoftware for that\b",
    r"\bwhose time follows\b",
    r"\bgoes on with `--resume`",
    r"\bgoes with specialisation\b",
    r"\bthe paper has it\b|\bhas it that\b",
    r"\bwhoever\b",
    r"\bwhat we cannot tell\b",
    r"\bit is no margin\b|\bsome (twenty|sixty)\b",
    r"\bis another run\b|\bmeets the same step\b",
    r"\bin which no tag can begin\b",
    r"\bmakes more of it\b",
    r"\bso many\b",
    r", of which (?!model)|\bof which (it|there|he|they)\b",
    r"\bunless said\b|\bas said\b",
    r"\bas good as none\b|\bcounts as none\b",
    r"\bwhat (?:\w+ ){1,3}(?:is|was|are|were|has to be) told\b",
    r"\banew\b|\bthereof\b|\bwherein\b|\bhence\b|\bere\b",
]  # fmt: skip


@pytest.mark.parametrize("name", READ_ALOUD)
def test_sentences_are_short(name: str) -> None:
    long = [s for s in sentences(all_pages()[name]) if len(s.split()) > LONGEST]
    assert not long, "\n".join(f"{len(s.split())} words: {s}" for s in long)


def banned(text: str) -> list[str]:
    flat = " ".join(text.split())
    return [
        flat[max(0, m.start() - 40) : m.end() + 20]
        for phrase in BANNED
        for m in re.finditer(phrase, flat, re.I)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_pages_are_free_of_banned_phrases(name: str) -> None:
    found = banned(all_pages()[name].replace("“", "").replace('"Per token", not "a token"', ""))
    assert not found, "\n".join(found)


def test_the_source_is_free_of_banned_phrases() -> None:
    """Docstrings, comments and messages: everything in the files but the words of other people's text."""
    found = {}
    for file in sorted((ROOT / "src").rglob("*.py")):
        if file.name != "words.py":
            hits = banned(source_prose(file))
            if hits:
                found[file.relative_to(ROOT).as_posix()] = hits
    count = sum(map(len, found.values()))
    report = "\n".join(f"{name}: {hit}" for name, hits in found.items() for hit in hits)
    assert not found, f"{count} in {len(found)} files:\n{report}"


def source_prose(file: Path) -> str:
    """Strings and comments of a Python file."""
    text = file.read_text()
    strings = [
        n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    comments = [re.sub(r"^\s*#\s?", "", c) for c in re.findall(r"#.*$", text, re.MULTILINE)]
    return " ¶ ".join([*strings, " ".join(comments)])


def test_the_checks_see_what_they_look_for() -> None:
    assert banned("It computes 2 experts a token and goes on to the bit.")
    assert banned("2 experts\na token")
    assert not banned("The most experts a token can get.")
    assert not banned("It computes 2 experts per token and continues bit for bit.")
    assert len(sentences("One sentence. Another one.\n\n- A bullet\n  of two lines.\n\n| a | table |\n")) == 3
    assert not sentences("    grmoe train\n")
