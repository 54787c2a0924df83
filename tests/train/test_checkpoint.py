"""Checkpoints are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from grmoe.train import checkpoint as checkpoint_module
from grmoe.train.checkpoint import META, TEMPORARY, CheckpointError, Checkpoints


def state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((3, 4), value), "nested": {"step": int(value), "name": "x"}}


def test_save_and_load_give_the_same_bits(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.latest() is None
    saved = state(1.0)
    saved["weight"] = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    checkpoints.save(7, saved, {"metric": 2.5, "note": "ä"})
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.metric, latest.meta["note"]) == (7, 2.5, "ä")
    loaded = checkpoints.load(latest, state(0.0))
    assert torch.equal(loaded["weight"], saved["weight"])
    assert loaded["nested"] == saved["nested"]


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step, metric in [(1, 5.0), (2, 3.0), (3, 4.0), (4, 4.5), (5, None)]:
        checkpoints.save(step, state(step), {} if metric is None else {"metric": metric})
    assert [c.step for c in checkpoints.all()] == [2, 4, 5]
    best = checkpoints.best()
    assert best is not None
    assert best.step == 2
    assert not list(tmp_path.glob(f"{TEMPORARY}*"))


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))
    checkpoints.save(1, state(2.0))
    latest = checkpoints.latest()
    assert latest is not None
    assert torch.equal(checkpoints.load(latest, state(0.0))["weight"], torch.full((3, 4), 2.0))


def test_a_full_disk_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))

    def full(*args: Any, **kwargs: Any) -> None:
        (tmp_path / f"{TEMPORARY}step-00000002" / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "save", full)
    with pytest.raises(
        CheckpointError, match=r"No space left on device.*the last whole one is .*step-00000001"
    ):
        checkpoints.save(2, state(2.0))
    monkeypatch.undo()
    assert [c.step for c in checkpoints.all()] == [1]
    assert not list(tmp_path.glob(f"{TEMPORARY}*"))
    checkpoints.save(2, state(2.0))
    assert [c.step for c in checkpoints.all()] == [1, 2]


def test_half_a_checkpoint_is_not_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))
    checkpoints.save(2, state(2.0))
    (tmp_path / "step-00000002" / META).write_text('{"step": 2')
    (tmp_path / "step-00000009").mkdir()
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 1


def test_damage_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    saved = checkpoints.save(3, state(1.0))
    for file in saved.path.glob("*.distcp"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"could not read checkpoint .*step-00000003"):
        checkpoints.load(saved, state(0.0))


WRITER = """
import sys, torch
from pathlib import Path
from grmoe.train.checkpoint import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]), keep_last=2)
print("ready", flush=True)
latest = checkpoints.latest()
step = latest.step if latest else 0
while True:
    step += 1
    checkpoints.save(step, {"weight": torch.full((256, 256), float(step))})
"""


def test_killed_at_any_moment_the_latest_is_whole(tmp_path: Path) -> None:
    """Four times SIGKILL at a random moment of a loop that does nothing but save."""
    rng = random.Random(0)
    checkpoints, before = Checkpoints(tmp_path, keep_last=2), 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, env=environment
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.05 + 0.3 * rng.random())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        latest = checkpoints.latest()
        step = 0 if latest is None else latest.step
        assert step >= before
        before = step
        if latest is not None:
            loaded = checkpoints.load(latest, {"weight": torch.zeros(256, 256)})
            assert (loaded["weight"] == step).all()
    assert before > 0
