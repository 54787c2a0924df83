"""What docs/model.md shows works as shown."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.model import PRESETS, count, preset
from grmoe.model.count import short

PAGE = (Path(__file__).parents[2] / "docs" / "model.md").read_text()


def test_the_python_of_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    own = next(block for block in blocks if "LlamaForCausalLM" in block)
    assert len(own.splitlines()) < 20
    torch.manual_seed(0)
    names: dict[str, object] = {"folder": str(tmp_path)}
    for block in blocks:
        exec(block, names)
    assert (tmp_path / "grmoe_routing.py").is_file()
    assert names["yours"].model.layers[1].mlp.router.alpha == 2.0  # type: ignore[attr-defined]


def test_the_table_of_presets_is_counted() -> None:
    for name in PRESETS:
        cost = count(preset(name))
        (row,) = re.findall(rf"^\| `{re.escape(name)}` \|.*$", PAGE, re.MULTILINE)
        assert f"| {short(cost.total)} | {short(cost.active)} |" in row


def test_the_output_of_info_is_what_it_prints() -> None:
    printed = CliRunner().invoke(app, ["info", "350m"]).output
    for line in printed.splitlines():
        assert line.rstrip() in PAGE
