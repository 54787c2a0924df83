"""A small corpus, and tools to compare folders."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = [
    "the",
    "of",
    "expert",
    "subspace",
    "routes",
    "tokens",
    "über",
    "東京",
    "def",
    "x",
    "=",
    "1",
    "\n\n",
    "",
    "\t",
]


def make_documents(count: int, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)
    return [
        {
            "text": f"{number}: " + " ".join(draw.choices(WORDS, k=draw.randint(1, 60))),
            "domain": draw.choice(["prose", "code", "maths"]),
        }
        for number in range(count)
    ]


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
