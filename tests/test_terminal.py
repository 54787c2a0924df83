"""What commands print: lines that are not markup, progress for a terminal and for a log."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from rich.console import Console

from grmoe import terminal
from grmoe.cli.shell import fail
from grmoe.tables import Table
from grmoe.terminal import Steps, note, say, say_all, say_written, show_progress, silent, wrapped


def test_lines_keep_their_brackets_and_their_length(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[bold]α in [0, 1][/] " + "x" * 300
    say(text)
    note(text)
    assert capsys.readouterr() == (text + "\n", text + "\n")


@pytest.mark.parametrize("name", ["lr:100:warm", "runs\\", "[b]:x:[/]"])
def test_names_are_shown_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """To rich `:100:` is an emoji, and a backslash at the end was doubled."""
    table = Table("", ["model", name])
    table.add(name, "1")
    say_all([table, f"Next: grmoe serve {name}"])
    say_written(Model=Path(name))
    with pytest.raises(typer.Exit):
        fail(f"{name} is no model")
    shown = capsys.readouterr()
    assert [line.count(name) for line in shown.out.splitlines()] == [0, 1, 0, 1, 0, 1, 1]
    assert "\\\\" not in shown.out
    assert shown.err == f"error: {name} is no model\n"


def test_what_was_written_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    say_written(Figure=Path("runs/[a]/curves.png"), Checkpoint=Path("runs/step-1"))
    assert capsys.readouterr().out == "Figure:     runs/[a]/curves.png\nCheckpoint: runs/step-1\n"


def test_tables_and_lines_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("", ["name"])
    table.add("value")
    say_all(["before [x]", table, "after"])
    out = capsys.readouterr().out
    assert out.startswith("before [x]\n")
    assert out.index("value") < out.index("after")


def test_long_lines_of_a_terminal_break_between_words() -> None:
    """Before, the terminal broke them anywhere: "87.8" and "12" on the next line."""
    assert wrapped("Asked:  perplexity at most 1 %", 80) == "Asked:  perplexity at most 1 %"
    assert wrapped("Asked:  perplexity at most 1 %", 22) == "Asked:  perplexity at\n        most 1 %"
    assert wrapped("    load: CV 0.100", 12) == "    load: CV\n    0.100"
    assert wrapped(f"see {'x' * 30} there", 12) == f"see\n{'x' * 30}\nthere"


def test_without_a_terminal_each_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress() as progress:
        for stage, done, total in (
            ("reading", 0, 0),
            ("reading", 5, 0),
            ("timing [x]", 1, 4),
            ("timing [x]", 2, 4),
        ):
            progress(stage, done, total)
    assert capsys.readouterr() == ("", "reading\ntiming [x] (25% done)\n")


def test_on_a_terminal_there_is_a_bar_and_no_line_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def console(**options: bool) -> Console:
        return Console(**options, force_terminal=True, width=100)  # type: ignore[arg-type]

    monkeypatch.setattr(terminal, "Console", console)
    with show_progress() as progress:
        progress("reading [x]", 0, 0)  # the total is not known
        progress("timing [x]", 3, 4)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "timing [x]" in captured.err
    assert "75%" in captured.err


def test_steps_count_and_never_pass_the_whole() -> None:
    seen: list[tuple[str, int, int]] = []
    steps = Steps(lambda *report: seen.append(report), 2)
    for stage in "abc":
        steps(stage)
    assert seen == [("a", 1, 2), ("b", 2, 2), ("c", 3, 3)]
    silent("a", 1, 2)
