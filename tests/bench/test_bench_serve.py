"""`grmoe bench serve`: every client gets its answers, and a contender that fails says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_scale import MICRO
from typer.testing import CliRunner

from grmoe.bench import serve as bench
from grmoe.bench.measure import Row
from grmoe.bench.models import ModelShape
from grmoe.cli import app
from grmoe.model import PRESETS


@pytest.fixture(autouse=True)
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "micro", MICRO)


def run(out: Path, *options: str) -> list[dict[str, Any]]:
    command = ["bench", "serve", "--preset", "micro", "--device", "cpu", "--length", "4", "--tokens", "5"]
    result = CliRunner().invoke(app, [*command, *options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    return json.loads((out / "results.json").read_text())["shapes"]  # type: ignore[no-any-return]


def test_command(tmp_path: Path) -> None:
    shapes = run(tmp_path, "--clients", "1", "--clients", "3", "--answers", "2", "--contender", "ours")
    for shape, clients in zip(shapes, (1, 3), strict=True):
        assert [row["contender"] for row in shape["rows"]] == [bench.GRAPHS, bench.EAGER]
        for row in shape["rows"]:
            assert row["failure"] is None
            (answers,) = row["times"][bench.ANSWER]["rounds_ms"]
            (first,) = row["times"][bench.FIRST]["rounds_ms"]
            assert len(answers) == len(first) == 2 * clients
            # All tokens over the time of all answers, which is no shorter than the longest one.
            assert 0 < row["tokens/s"] <= 1.001e3 * 5 * 2 * clients / max(answers)
        (ratio,) = shape["ratios"]
        assert ratio["value"] == pytest.approx(shape["rows"][0]["tokens/s"] / shape["rows"][1]["tokens/s"])


def test_a_failure_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(bench.GraphGenerator, "_compute", out_of_memory)
    (shape,) = run(tmp_path, "--clients", "1", "--answers", "1", "--contender", "ours, CUDA graphs")
    assert shape["rows"][0]["failure"] == "RuntimeError: MemoryError: no room"
    assert not shape["rows"][0]["times"]


def test_ratios_over_the_peer() -> None:
    shape = ModelShape("micro", 1, 4, "silu")
    rows = [
        Row(name, "ours", "grmoe", facts={"tokens/s": rate})
        for name, rate in zip(bench.NAMES, (6.0, 3.0, 2.0), strict=True)
    ]
    assert [ratio.value for ratio in bench.compare(shape, rows).ratios] == [2.0, 3.0]
