"""The comparison of routers: runs that go on, means with intervals over seeds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import Command
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.config import to_yaml
from grmoe.runs.config import TrainConfig
from grmoe.studies import quality
from grmoe.studies.quality import Plan, Run, StudyError, read_run, rows, table

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
        experts_per_token=2.0,
        tokens=10**6,
    )


def test_differences_are_seed_by_seed() -> None:
    runs = [run("grmoe", 0, 3.0), run("softmax", 0, 3.5), run("grmoe", 1, 4.0), run("softmax", 1, 4.5)]
    _, softmax = rows(runs)
    assert softmax["over_grmoe"] == pytest.approx(0.5)
    assert softmax["over_grmoe_interval"] == pytest.approx(0.0, abs=1e-12)
    assert [row[3] for row in table(runs).rows] == ["–", "+0.5000 ± 0.0000"]


def test_one_seed_has_no_interval() -> None:
    runs = [run("softmax", 0, 3.5)]
    (cells,) = table(runs).rows
    assert cells[1:4] == ("35.00", "3.5000", "–")
    json.dumps(rows(runs), allow_nan=False)


def test_a_run_without_its_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"softmax-0 has lost its log; remove it"):
        read_run(tmp_path / "softmax-0", "softmax", 0)


def test_counts_have_intervals_and_old_logs_are_refused(tmp_path: Path) -> None:
    (cells,) = table([run("softmax", seed, 3.5) for seed in range(3)]).rows
    assert cells[6:8] == ("0/3 (0–56 %)", "0/3")
    lines = [
        {"kind": "train", "step": 1, "tokens": 9, "loss": 3.5, "layers": [{"load": [1.0, 1.0]}]},
        {"kind": "validation", "step": 1, "loss": 3.5, "collapsed_layers": 0},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(StudyError, match="was logged by an older version; remove it"):
        read_run(tmp_path, "softmax", 0)


def test_an_unknown_method_is_refused_before_anything_is_trained(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"method must be one of 'grmoe', .*'vmf', got 'magic'"):
        Plan(base=settings(), out=tmp_path / "study", methods=("grmoe", "magic"))


def run_forked(command: list[str], stdout: Any, stderr: int, check: bool) -> Any:
    """`subprocess.run` of `python -m grmoe …`, without the seconds that its imports take."""
    assert command[1:3] == ["-m", "grmoe"]
    assert stderr == subprocess.STDOUT
    return subprocess.CompletedProcess(command, Command(Path(stdout.name), *command[3:]).wait())


def test_a_study_and_the_same_again(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "subprocess", SimpleNamespace(run=run_forked, STDOUT=subprocess.STDOUT))
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
    assert (out / "table.md").read_text().splitlines()[-1].startswith("| Softmax, no balancing |")
    assert first.stderr.splitlines()[0] == "training (0% done)"
    assert [line.split(":")[0] for line in first.stderr.splitlines()[1:]] == [
        "Softmax, no balancing, seed 0",
        "Softmax, no balancing, seed 1",
    ]
    again = CliRunner().invoke(app, [*arguments, "optim.lr=1", "--at-once", "1"])
    assert again.exit_code == 2
    assert "optim.lr: 0.003 → 1.0" in again.output
    assert "another run" not in (out / "softmax-1.txt").read_text()  # after a failure no other is started
