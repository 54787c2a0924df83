"""A small corpus, and a configuration small enough to train in a second: see `small_runs`."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_corpus import make_documents, write_jsonl
from small_runs import make_settings, prepared, settings

__all__ = ["make_settings", "prepared", "settings"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two files, 200 documents, three domains."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", make_documents(120, seed=1))
    write_jsonl(folder / "b.jsonl", make_documents(80, seed=2))
    return folder
