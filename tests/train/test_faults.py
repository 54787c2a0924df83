"""Nothing is lost, and each fault has its message: kills, full disks, broken shards, NaN on one process of two.

Preparing is killed in tests/data. What a single process does with NaN and with changed settings is in test_loop.py.
"""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes
from runs import assert_same, state_of, story
from torch import Tensor
from torch.distributed.tensor import DTensor

from grmoe.cli import main
from grmoe.config import to_yaml
from grmoe.train import checkpoint, loop
from grmoe.train.config import TrainConfig
from grmoe.train.loop import TrainingStopped, train
from grmoe.train.record import checkpoints_of
from grmoe.train.setup import Session
from grmoe.train.step import train_step

Settings = Callable[..., TrainConfig]
Action = Callable[..., None]


def at_step(number: int, action: Callable[[Session], None]) -> None:
    """Something happens before a step, counted from zero, for the rest of this process."""

    def watched(session: Session, step: int, batch_BS: Tensor) -> Any:
        if step == number:
            action(session)
        return train_step(session, step, batch_BS)

    loop.train_step = watched


def kept(config: TrainConfig) -> list[int]:
    return [c.step for c in checkpoints_of(Path(config.out), config).all()]


# -- the command line ------------------------------------------------------------------------------------------


def _command(said: Path, arguments: list[str], fault: Action | None, step: int, args: tuple[Any, ...]) -> None:
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if fault is not None:
        at_step(step, lambda session: fault(*args))
    sys.argv = ["grmoe", *arguments]
    main()


def grmoe_train(
    config: TrainConfig, *arguments: str, fault: Action | None = None, step: int = 0, args: tuple[Any, ...] = ()
) -> tuple[int, str]:
    """(exit status, the last line) of `grmoe train` as a process of its own, in which `fault(*args)` comes at a step."""
    path, said = (Path(config.out).with_suffix(suffix) for suffix in (".yaml", ".txt"))
    path.write_text(to_yaml(config))
    [status] = Processes(1, _command, said, ["train", str(path), *arguments], fault, step, args).join()
    text = said.read_text()
    assert "Traceback" not in text, text
    assert status is not None, text
    return status, text.strip().splitlines()[-1] if text.strip() else ""


# -- kill -9 ---------------------------------------------------------------------------------------------------


def _train_telling(config: TrainConfig, steps: Connection) -> None:
    """Go on with the run; says when it begins a step."""

    def telling(session: Session, step: int, batch_BS: Tensor) -> Any:
        steps.send(step)
        return train_step(session, step, batch_BS)

    loop.train_step = telling
    train(config, resume=True)


def test_killed_twenty_times_is_straight_to_the_bit(settings: Settings) -> None:
    """SIGKILL at random moments: of starting, of loading, of steps and, with a checkpoint every other, of saving."""
    options: dict[str, Any] = {"steps": 60, "log": {"every": 1}, "validation": {"every": 5}}
    straight = settings("straight", **options)
    Processes(1, train, straight).answers()
    draw = random.Random(0)
    broken, reached, hit = settings("broken", **options, checkpoint={"every": 2}), set(), 0
    for death in range(20):
        background = replace(broken.checkpoint, background=death % 2 == 1)
        ours, theirs = multiprocessing.get_context("forkserver").Pipe(duplex=False)
        run = Processes(1, _train_telling, replace(broken, checkpoint=background), theirs)
        theirs.close()
        steps = draw.randrange(5)  # as many begin; with none, it dies while it starts
        for _ in range(steps):
            reached.add(ours.recv())
        time.sleep(draw.uniform(0, 0.02 if steps else 0.2))
        run.kill()
        assert run.join() == [-signal.SIGKILL]
        hit += any((Path(broken.out) / "checkpoints").glob(".writing-step*"))
    print(f"reached step {max(reached)}, {hit} while a checkpoint was written")
    assert 5 < max(reached) < 59  # it went on from death to death, and none came too late
    assert hit > 0
    Processes(1, train, broken, True).answers()
    assert_same(broken, straight, steps=[60])


def _die_while_writing(config: TrainConfig) -> None:
    """In the second checkpoint, when some of it is on the disk."""
    write = checkpoint.save

    def deadly(state: dict[str, Any], checkpoint_id: Path, **options: Any) -> None:
        write(state, checkpoint_id=checkpoint_id, **options)
        if checkpoint_id.name.endswith("8"):
            loop.train_step = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # training goes on meanwhile
            time.sleep(60)

    checkpoint.save = deadly  # type: ignore[assignment]
    train(config)


def test_killed_while_a_thread_writes_leaves_the_previous_one(settings: Settings) -> None:
    options: dict[str, Any] = {"log": {"every": 1}, "checkpoint": {"every": 4, "background": True}}
    straight, broken = settings("straight", **options), settings("broken", **options)
    train(straight)
    assert Processes(1, _die_while_writing, broken).join() == [-signal.SIGKILL]
    assert kept(broken) == [4]
    assert (Path(broken.out) / "checkpoints" / ".writing-step-00000008").is_dir()
    train(broken, resume=True)
    assert_same(broken, straight)


# -- a full disk -----------------------------------------------------------------------------------------------


class Disk:
    """A folder on a disk that can be filled up to `room` bytes, and emptied."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, room: int) -> None:
        raise NotImplementedError

    def empty(self) -> None:
        raise NotImplementedError


class SmallDisk(Disk):
    """A file system of 8 MB."""

    number, reason = errno.ENOSPC, "No space left on device"

    def fill(self, room: int) -> None:
        status = os.statvfs(self.folder)
        (self.folder / "filler").write_bytes(bytes(max(0, status.f_bavail * status.f_frsize - room)))

    def empty(self) -> None:
        (self.folder / "filler").unlink()


class SmallFiles(Disk):
    """No file may grow beyond `room`: what any user can ask for, of one process."""

    number, reason = errno.EFBIG, "File too large"

    def fill(self, room: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def empty(self) -> None:
        pass


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "limit":
        yield SmallFiles(folder)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield SmallDisk(folder)
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_at_a_checkpoint(background: bool, disk: Any, settings: Settings) -> None:
    straight = settings("straight")
    train(straight)
    options: dict[str, Any] = {"checkpoint": {"every": 5, "background": background}}
    config = replace(settings(**options), out=str(disk.folder / "run"))
    status, said = grmoe_train(config, fault=disk.fill, step=8, args=(100_000,))
    assert status == 1
    folder = Path(config.out) / "checkpoints"
    assert said == (
        f"error: could not write checkpoint {folder}/step-00000010: [Errno {disk.number}] {disk.reason}; "
        f"the last whole one is {folder}/step-00000005"
    )
    assert [p.name for p in folder.iterdir()] == ["step-00000005"]
    disk.empty()
    assert grmoe_train(config, "--resume")[0] == 0
    assert_same(config, straight)


def test_a_full_disk_at_the_log(disk: Any, settings: Settings) -> None:
    options: dict[str, Any] = {"log": {"every": 1}, "checkpoint": {"every": 10}}
    straight = settings("straight", **options)
    train(straight)
    config = replace(settings(**options), out=str(disk.folder / "run"))
    # A log of ten lines has some 10 kB.
    status, said = grmoe_train(config, fault=disk.fill, step=10, args=(0 if disk.reason.startswith("No") else 12_000,))
    assert status == 1
    assert said == f"error: cannot write {config.out}/log.jsonl: {disk.reason}"
    assert kept(config) == [10]
    disk.empty()
    assert grmoe_train(config, "--resume")[0] == 0
    assert_same(config, straight)
