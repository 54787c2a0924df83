"""What the README shows works as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from typer.testing import CliRunner

from grmoe.cli import app

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_python_example_runs_and_the_entropy_is_inside_its_bounds() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(block, names)
    router, gate, bounds = names["router"], names["gate"], names["bounds"]
    assert router.alpha == 2.0  # type: ignore[attr-defined]
    entropy = -torch.xlogy(gate.probs, gate.probs).sum(-1)  # type: ignore[attr-defined]
    assert (bounds.lower.bound <= entropy + 1e-5).all()  # type: ignore[attr-defined]
    assert (entropy <= bounds.upper.bound + 1e-5).all()  # type: ignore[attr-defined]


def test_the_command_table_names_every_command() -> None:
    shown = set(re.findall(r"^\| `grmoe ([\w -]+)`", README, re.MULTILINE))
    assert shown == set(_commands(typer.main.get_command(app)))
    for name in shown:
        assert CliRunner().invoke(app, [*name.split(), "--help"]).exit_code == 0


def _commands(group: Any, prefix: str = "") -> Iterator[str]:
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "list_commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name


def test_help_starts_without_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from grmoe.cli import app; "
        "assert 'prepare' in CliRunner().invoke(app, ['--help']).output; "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_linked_file_exists() -> None:
    root = Path(__file__).parent.parent
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_of_the_docs_is_linked() -> None:
    pages = {f"docs/{page.name}" for page in (Path(__file__).parent.parent / "docs").glob("*.md")}
    assert pages <= set(re.findall(r"\]\(([^)#:]+)\)", README))
