"""Text that is learnt in seconds: counting in words, by ones or by threes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from grmoe.data import prepare

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write_corpus(path: Path, documents: int = 300, words: Sequence[str] = WORDS) -> Path:
    """JSON lines with their domain, "ones" or "threes"."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(documents):
            start, step = draw.randrange(10), draw.choice([1, 3])
            text = " ".join(words[(start + step * i) % 10] for i in range(draw.randint(20, 60)))
            file.write(json.dumps({"text": text, "domain": "ones" if step == 1 else "threes"}) + "\n")
    return path


def prepare_corpus(folder: Path, words: Sequence[str] = WORDS, validation: float = 0.2) -> Path:
    """The corpus as tokens, in folder/data."""
    corpus = write_corpus(folder / "corpus.jsonl", words=words)
    prepare([str(corpus)], folder / "data", tokenizer="bpe:280", validation=validation, workers=1)
    return folder / "data"
