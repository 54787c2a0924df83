"""`grmoe prepare` from the outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_corpus import folder_bytes
from typer.testing import CliRunner

from grmoe.cli import app

pytest.importorskip("tokenizers")


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prepare", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_table_skipped_rows_and_the_next_command(corpus: Path, tmp_path: Path) -> None:
    (corpus / "bad.jsonl").write_text('{"title": "no text"}\nnot JSON\n')
    out = tmp_path / "out"
    code, output = run(corpus, "--out", out, "--tokenizer", "bpe:300", "--validation", 0.1)
    assert code == 0
    for word in ("prose", "code", "maths", "bytes/token", "2 rows skipped (invalid JSON 1, no text 1)"):
        assert word in output
    assert f"Tokens: {out}" in output.replace("\n", "")
    before = folder_bytes(out)
    assert run(corpus, "--out", out, "--tokenizer", "bpe:300", "--validation", 0.1)[0] == 0
    assert folder_bytes(out) == before


def test_mistakes_are_one_line(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (corpus / "bad.jsonl").write_text("not JSON\n")
    code, output = run(corpus, "--out", out, "--tokenizer", "bpe:300", "--strict")
    assert code == 2
    assert "bad.jsonl, row 1: invalid JSON" in output.replace("\n", "")
    assert run(corpus, "--out", out, "--tokenizer", "bpe:300")[0] == 0  # what --strict began goes on without
    code, output = run(corpus, "--out", out, "--tokenizer", "bpe:400")
    assert code == 2
    assert "tokenizer: 'bpe:300' before, 'bpe:400' now" in output.replace("\n", "")


def test_without_a_validation_document_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a single document")
    code, output = run(tmp_path / "one.txt", "--out", tmp_path / "out", "--tokenizer", "bpe:257")
    assert code == 0
    assert "No document is held out for validation" in output
