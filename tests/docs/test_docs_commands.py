"""Every `grmoe …` line of README and the pages parses: the command, its options and the configuration keys exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
from doc_pages import NAMES, all_pages, code_blocks, hook, without_code

from grmoe.config import load
from grmoe.runs.config import TrainConfig

COMMANDS: dict[str, Any] = dict(hook().commands())


def command_lines(text: str) -> list[str]:
    """`grmoe …` of code blocks and of inline code."""
    found = []
    for block in code_blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            start = re.match(r"(?:\$ )?(?:torchrun .*? -m )?(grmoe .*)", line.strip())
            if start:
                found.append(start[1])
    found += re.findall(r"`(grmoe [^`]*)`", without_code(text))
    return [line for line in found if "…" not in line and not re.search(r" [A-Z]{3,}", line)]


def split(line: str) -> tuple[str, list[str]]:
    """(command, arguments); what comes after a comment, `&&` or `|` is left out."""
    words = shlex.split(line, comments=True)[1:]
    for stop in ("&&", "|", "…"):
        words = words[: words.index(stop)] if stop in words else words
    for length in (2, 1):
        if " ".join(words[:length]) in COMMANDS:
            return " ".join(words[:length]), words[length:]
    assert words in ([], ["bench"], ["--help"]), f"there is no command in {line!r}"
    return "", []


def parse(name: str, arguments: list[str]) -> dict[str, Any]:
    """Parsed, not run: unknown options and missing values are errors."""
    command = COMMANDS[name]
    context = command.context_class(command, info_name=name)
    parsed, _, _ = command.make_parser(context).parse_args(args=list(arguments))
    return dict(parsed)


@pytest.mark.parametrize("name", NAMES)
def test_command_lines_parse(name: str) -> None:
    for line in command_lines(all_pages()[name]):
        command, arguments = split(line)
        if not command:
            continue
        try:
            parse(command, arguments)
        except Exception as error:
            pytest.fail(f"{name}: {line!r}: {error}")
        if command in ("train", "compare"):
            load(TrainConfig, None, [a for a in arguments if re.match(r"[\w.]+=", a)])


def test_the_check_sees_a_wrong_option_and_a_wrong_key() -> None:
    assert command_lines("    grmoe dial runs/first --write\n") == ["grmoe dial runs/first --write"]
    with pytest.raises(Exception, match="--nonsense"):
        parse("dial", ["runs/first", "--nonsense"])
    with pytest.raises(ValueError, match=r"optim\.lrr"):
        load(TrainConfig, None, ["optim.lrr=1"])


def test_examples_of_help_parse() -> None:
    for name, command in COMMANDS.items():
        examples = re.findall(r"\[bold\](grmoe .*?)\[/\]", command.help or "")
        assert examples, f"grmoe {name} --help has no example"
        for line in examples:
            parse(*split(line))


def test_the_readme_names_every_command() -> None:
    for name in COMMANDS:
        first = name.split()[0]
        assert re.search(rf"`{first}`|grmoe {first}\b", all_pages()["README.md"]), (
            f"README does not name {first}"
        )


def test_help_starts_without_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from grmoe.cli import app; "
        "assert 'prepare' in CliRunner().invoke(app, ['--help']).output; "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
