"""The comparison of routers: runs that go on, means with intervals over seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.config import to_yaml
from grmoe.runs.config import TrainConfig
from grmoe.studies.quality import Run, cells, interval, read_run, rows

Settings = Callable[..., TrainConfig]


def run(method: str, seed: int, loss: float) -> Run:
    return Run(
        method=method,
        seed=seed,
        loss=loss,
        perplexity=10 * loss,
        load_cv=0.1,
        min_load=0.05,
        collapsed=False,
        collapsed_paper=False,
        entropy=1.0,
        experts=2.0,
        tokens=10**6,
    )


def test_intervals_are_students() -> None:
    # t of one degree of freedom at 97.5 % is 12.706; the deviation of (1, 3) over √2 is 1.
    assert interval([1.0, 3.0]) == pytest.approx(12.706, rel=1e-4)
    assert interval([1.0]) is None


def test_differences_are_seed_by_seed() -> None:
    ours, softmax = rows(
        [run("grmoe", 0, 3.0), run("softmax", 0, 3.5), run("grmoe", 1, 4.0), run("softmax", 1, 4.5)]
    )
    assert softmax["over_grmoe"] == pytest.approx(0.5)
    assert softmax["over_grmoe_interval"] == pytest.approx(0.0, abs=1e-12)
    assert cells(ours)[3] == "–"
    assert cells(softmax)[3] == "+0.5000 ± 0.0000"


def test_one_seed_has_no_interval() -> None:
    (only,) = rows([run("softmax", 0, 3.5)])
    assert cells(only)[1:4] == ["35.00", "3.5000", "–"]
    json.dumps(only, allow_nan=False)


def test_a_run_without_its_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"softmax-0 has lost its log; remove it"):
        read_run(tmp_path / "softmax-0", "softmax", 0)


def test_counts_have_intervals_and_old_logs_are_refused(tmp_path: Path) -> None:
    (row,) = rows([run("softmax", seed, 3.5) for seed in range(3)])
    assert cells(row)[6:8] == ["0/3 (0–56 %)", "0/3"]
    lines = [
        {"kind": "train", "step": 1, "tokens": 9},
        {"kind": "validation", "step": 1, "collapsed_layers": 0},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RuntimeError, match="was logged by an older version; remove it"):
        read_run(tmp_path, "softmax", 0)


def test_a_study_and_the_same_again(settings: Settings, tmp_path: Path) -> None:
    base = settings(steps=2)
    path, out = tmp_path / "base.yaml", tmp_path / "study"
    path.write_text(to_yaml(base))
    arguments = ["quality", str(path), "--method", "softmax", "--method", "softmax", "--out", str(out)]
    arguments += ["--seeds", "2", "--at-once", "2"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    found = json.loads((out / "results.json").read_text())
    assert [(r["method"], r["seed"]) for r in found["runs"]] == [("softmax", 0), ("softmax", 1)]
    assert (out / "curves.png").is_file()
    again = CliRunner().invoke(app, [*arguments, "optim.lr=1", "--at-once", "1"])
    assert again.exit_code == 2
    assert "optim.lr: 0.003 → 1.0" in again.output
    assert "another run" not in (out / "softmax-1.txt").read_text()  # after a failure no other is started
