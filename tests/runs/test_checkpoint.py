"""Checkpoints are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import errno
import math
import multiprocessing
import random
import resource
import shutil
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes

from grmoe.runs import checkpoint as checkpoint_module
from grmoe.runs.checkpoint import CheckpointError, Checkpoints
from grmoe.runs.meta import META, TEMPORARY


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


def test_a_loss_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    for step, metric in enumerate((math.nan, 2.0, 3.0)):
        checkpoints.save(step, state(step), {"metric": metric})
    assert [c.step for c in checkpoints.all()] == [1, 2]


def test_the_best_is_one_of_those_measured_on_the_text_of_the_last(tmp_path: Path) -> None:
    """Another text may be easier, so that its losses do not compare."""
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    for step, (metric, text) in enumerate([(2.0, 500), (1.0, 500), (4.0, None), (3.0, None), (3.5, None)]):
        checkpoints.save(step, state(step), {"metric": metric, "measured_on": text})
    assert [c.step for c in checkpoints.all()] == [3, 4]
    checkpoints.save(5, state(5), {"measured_on": 500})  # not measured
    best = checkpoints.best()
    assert best is not None
    assert best.step == 3
    old = Checkpoints(tmp_path / "old", keep_last=9)
    old.save(0, state(0), {"metric": 2.0})  # of an older version: what it was measured on is not known
    old.save(1, state(1), {"metric": 3.0, "measured_on": 500})
    best = old.best()
    assert best is not None
    assert best.step == 0


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
        CheckpointError, match=r"No space left on device.*the last complete one is .*step-00000001"
    ):
        checkpoints.save(2, state(2.0))
    monkeypatch.undo()
    assert [c.step for c in checkpoints.all()] == [1]
    assert not list(tmp_path.glob(f"{TEMPORARY}*"))
    checkpoints.save(2, state(2.0))
    assert [c.step for c in checkpoints.all()] == [1, 2]


def test_a_full_disk_is_named_wherever_it_ends(tmp_path: Path) -> None:
    """In the middle of a tensor, of an archive, of the index: PyTorch says different things."""
    draw = torch.Generator().manual_seed(0)
    content = {str(size): torch.randn(size, size, generator=draw) for size in (200, 50, 40, 30, 20)}
    checkpoints = Checkpoints(tmp_path)
    saved = checkpoints.save(1, content)
    size = max(file.stat().st_size for file in saved.path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in range(0, size, size // 40):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(CheckpointError) as refused:
                checkpoints.save(2, content)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert f"step-00000002: [Errno {errno.EFBIG}] File too large; the last" in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing waits for this event."""
    go_on, write = threading.Event(), checkpoint_module.save

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert go_on.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(checkpoint_module, "save", slow)
    return go_on


def test_in_the_background_it_is_what_it_was_when_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is changed before a byte is written; views and other dtypes too, and the tree itself."""
    base = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    state: dict[str, Any] = {
        "view": base[1::2, 1:3],
        "parameter": torch.nn.Parameter(base.clone()),
        "deep": {"a": {"half": base.bfloat16(), "step": torch.tensor(3.0)}, "list": [base.clone(), "x"]},
        "number": 7,
    }
    before, behind = Checkpoints(tmp_path / "before"), Checkpoints(tmp_path / "behind", keep_last=1)
    saved = before.save(1, state)
    behind.save(1, state)
    go_on = held_up(monkeypatch)
    promised = behind.save(2, state, {"metric": 0.5}, background=True)
    with torch.no_grad():
        for tensor in (base, state["parameter"], *state["deep"]["a"].values(), state["deep"]["list"][0]):
            tensor.add_(1)
    state["number"] = 8
    state["deep"]["list"][1] = "y"
    assert [c.step for c in behind.all()] == [1]  # until it is whole
    go_on.set()
    behind.wait()
    assert behind.all() == [promised]  # and then the older one goes
    assert not list(behind.folder.glob(f"{TEMPORARY}*"))
    wanted = {file.name: file.read_bytes() for file in saved.path.glob("*.distcp")}
    assert {file.name: file.read_bytes() for file in promised.path.glob("*.distcp")} == wanted


def test_one_in_the_background_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    go_on = held_up(monkeypatch)
    checkpoints.save(1, state(1.0), background=True)
    threading.Timer(0.2, go_on.set).start()
    checkpoints.save(2, state(2.0), background=True)  # waits for the first
    assert checkpoints.all()[0].step == 1
    checkpoints.wait()
    assert [c.step for c in checkpoints.all()] == [1, 2]


@pytest.mark.parametrize("told", ["wait", "save"])
def test_a_failure_in_the_background_is_told_once(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save", full)
        checkpoints.save(2, state(2.0), background=True)
        while not checkpoints.failed:
            time.sleep(0.001)
    with pytest.raises(CheckpointError, match=r"step-00000002.*No space left on device.*step-00000001"):
        checkpoints.wait() if told == "wait" else checkpoints.save(3, state(3.0))
    assert not checkpoints.failed
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    checkpoints.save(3, state(3.0), background=True)
    checkpoints.wait()
    assert [c.step for c in checkpoints.all()] == [1, 3]


def test_what_a_crash_between_two_renames_left_is_no_obstacle(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    saved = checkpoints.save(1, state(1.0))
    shutil.copytree(saved.path, saved.path.with_name(f"{saved.path.name}.replaced"))
    checkpoints.save(1, state(2.0))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


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


def _save_forever(folder: Path, ready: Connection) -> None:
    checkpoints = Checkpoints(folder, keep_last=2)
    ready.send("ready")
    latest = checkpoints.latest()
    step = latest.step if latest else 0
    while True:
        step += 1
        checkpoints.save(step, {"weight": torch.full((256, 256), float(step))})


def test_killed_at_any_moment_the_latest_is_whole(tmp_path: Path) -> None:
    """Four times SIGKILL at a random moment of a loop that does nothing but save."""
    rng = random.Random(0)
    checkpoints, before = Checkpoints(tmp_path, keep_last=2), 0
    for _ in range(4):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        writer = Processes(1, _save_forever, tmp_path, theirs)
        theirs.close()
        ours.recv()
        time.sleep(0.05 + 0.3 * rng.random())
        writer.kill()
        latest = checkpoints.latest()
        step = 0 if latest is None else latest.step
        assert step >= before
        before = step
        if latest is not None:
            loaded = checkpoints.load(latest, {"weight": torch.zeros(256, 256)})
            assert (loaded["weight"] == step).all()
    assert before > 0
