"""`grmoe prepare` from the outside."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from small_corpus import folder_bytes
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.data.prepare import Progress
from grmoe.data.progress import Reporter

pytest.importorskip("tokenizers")


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prepare", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_table_skipped_rows_and_the_next_command(corpus: Path, tmp_path: Path) -> None:
    (corpus / "bad.jsonl").write_text('{"title": "no text"}\nnot JSON\n')
    out = tmp_path / "out"
    code, output = run(corpus, "--out", out, "--tokenizer", "bpe:300", "--validation", 0.1)
    assert code == 0
    for word in ("prose", "code", "maths", "bytes per token", "2 rows skipped (invalid JSON 1, no text 1)"):
        assert word in output
    assert f"Tokens: {out}" in output.replace("\n", "")
    before = folder_bytes(out)
    assert run(corpus, "--out", out, "--tokenizer", "bpe:300", "--validation", 0.1)[0] == 0
    assert folder_bytes(out) == before


def test_mistakes_are_one_line(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (corpus / "bad.jsonl").write_text("not JSON\n")
    options = ("--out", out, "--validation", 0.1, "--tokenizer")
    code, output = run(corpus, *options, "bpe:300", "--strict")
    assert code == 2
    assert "bad.jsonl, row 1: invalid JSON" in output.replace("\n", "")
    assert run(corpus, *options, "bpe:300")[0] == 0  # what --strict began goes on without
    code, output = run(corpus, *options, "bpe:400")
    assert code == 2
    assert "tokenizer: 'bpe:300' before, 'bpe:400' now" in output.replace("\n", "")


@pytest.mark.parametrize(
    ("given", "share"), [("5%", 0.05), ("0.2", 0.2), ("0", 0.0), ("0%", 0.0), (" 0.5 %", 0.005)]
)
def test_a_share_may_have_a_percent_sign(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, share: float
) -> None:
    asked: list[float] = []

    def stop(*_: object, validation: float, **__: object) -> None:
        asked.append(validation)
        raise ValueError("stopped here")

    monkeypatch.setattr(sys.modules["grmoe.data.prepare"], "prepare", stop)
    assert "stopped here" in run(tmp_path, "--validation", given)[1]
    assert asked == [share]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("5", "validation 5: 5% or 0.05? From 1 on, write the % sign"),
        ("20", "validation 20: 20%? From 1 on, write the % sign"),
        ("-1%", "validation must be at least 0 and finite, got '-1%'"),
        ("nan", "validation must be at least 0 and finite, got 'nan'"),
        ("half", "validation must be a number like 1%, got 'half'"),
        ("100%", "validation must be a share below 1, got 1.0"),
    ],
)
def test_a_share_that_is_none_is_refused(tmp_path: Path, given: str, said: str) -> None:
    (tmp_path / "one.txt").write_text("a single document")
    code, output = run(tmp_path / "one.txt", "--out", tmp_path / "out", "--validation", given)
    assert code == 2
    assert said in output


def test_without_validation_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a single document")
    options = ("--out", tmp_path / "out", "--tokenizer", "bpe:257", "--validation", 0)
    code, output = run(tmp_path / "one.txt", *options)
    assert code == 0
    assert "nothing is held out" in output
    assert "Next:" not in output  # nothing to train on would come of it


def test_progress_names_each_phase_and_now_and_then_the_tokens() -> None:
    """Without a terminal each new label is a line: a phase must not fill the log."""
    seen: list[tuple[str, int, int]] = []
    now = 0.0
    report = Reporter(lambda *shown: seen.append(shown), clock=lambda: now)
    for second in range(25):
        for tenth in range(100):
            now = second + tenth / 100
            report(Progress("tokenising", 10 * second, None, tokens=second * 10**6))
    report(Progress("writing the index", 250, 250))
    assert [*dict.fromkeys(label for label, _, _ in seen)] == [
        "tokenising", "tokenising, 10.0 M tokens", "tokenising, 20.0 M tokens", "writing the index",
    ]  # fmt: skip
    assert len(seen) < 260  # ten per second at most
    assert seen[0] == ("tokenising", 0, 0)
    assert seen[-1] == ("writing the index", 250, 250)


def test_ctrl_c_says_how_to_continue(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["grmoe.data.prepare"], "prepare", interrupted)
    code, output = run(corpus, "--out", tmp_path / "out")
    assert code == 130
    assert "interrupted; run the same command again to continue" in output
