"""What the README shows works as shown."""

from __future__ import annotations

import re
from pathlib import Path

import torch
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
    groups = {"": app} | {f"{group.name} ": group.typer_instance for group in app.registered_groups}
    registered = {
        prefix + (command.name or command.callback.__name__)  # type: ignore[union-attr]
        for prefix, group in groups.items()
        for command in group.registered_commands  # type: ignore[union-attr]
    }
    assert shown == registered
    for name in shown:
        assert CliRunner().invoke(app, [*name.split(), "--help"]).exit_code == 0


def test_every_linked_file_exists() -> None:
    root = Path(__file__).parent.parent
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
