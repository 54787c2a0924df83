"""A turned budget compiles nothing and captures no CUDA graph, in training steps and in prefill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from grmoe.cli import app

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_turning_the_budget(tmp_path: Path) -> None:
    sizes = ["--preset", "tiny", "--batch", "8", "--length", "128", "--rounds", "2", "--steps", "3"]
    result = CliRunner().invoke(app, ["bench", "elastic", "--device", "cuda", "--out", str(tmp_path), *sizes])
    assert result.exit_code == 0, result.output
    (found,) = json.loads((tmp_path / "results.json").read_text())["shapes"]
    assert [row["failure"] for row in found["rows"]] == [None] * 3
    assert all(row["contender"].endswith(", CUDA graphs") for row in found["rows"])
    for name, counts in found["turning"].items():
        assert (counts["recompiles"], counts["captures"]) == (0, 0), name
    for name in ("training", "prefill"):
        experts = {each["experts_per_token"] for each in found["turning"][name]["settings"]}
        assert (min(experts), max(experts)) == (1.0, 2.0)
