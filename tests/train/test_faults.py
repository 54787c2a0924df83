"""Nothing is lost, and each fault has its message: kills, full disks, broken shards, NaN on one process of two.

Preparing is killed in tests/data. What a single process does with NaN and with changed settings is in test_loop.py.
"""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_same, state_of
from processes import Processes, run_command
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.tensor import DTensor

from grmoe.config import to_yaml
from grmoe.runs import checkpoint
from grmoe.runs.checkpoint import CheckpointError, Checkpoints
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import checkpoints_of
from grmoe.train import loop
from grmoe.train.loop import TrainingStopped, train
from grmoe.train.setup import Trainer
from grmoe.train.step import train_step

Settings = Callable[..., TrainConfig]
Fault = Callable[[Trainer], None]


def at_step(number: int, fault: Fault) -> None:
    """In this process, something happens before a step; the first is 0."""

    def watched(trainer: Trainer, step: int, batch_BS: Tensor) -> Any:
        if step == number:
            fault(trainer)
        return train_step(trainer, step, batch_BS)

    loop.train_step = watched


@pytest.fixture(scope="module")
def straight(
    make_settings: Callable[[Path], Settings], tmp_path_factory: pytest.TempPathFactory
) -> TrainConfig:
    """Twenty steps to which nothing happens."""
    config = make_settings(tmp_path_factory.mktemp("straight"))(log={"every": 1})
    train(config)
    return config


def kept(config: TrainConfig) -> list[int]:
    return [c.step for c in checkpoints_of(Path(config.out), config).all()]


# -- the command line ------------------------------------------------------------------------------------------


def _command(said: Path, arguments: list[str], fault: Fault | None, step: int) -> None:
    if fault is not None:
        at_step(step, fault)
    run_command(said, arguments)


def grmoe_train(
    config: TrainConfig, *arguments: str, fault: Fault | None = None, step: int = 0
) -> tuple[int, list[str]]:
    """(exit status, lines but for progress) of `grmoe train` as a process of its own, with a fault before a step."""
    path, said = (Path(config.out).with_suffix(suffix) for suffix in (".yaml", ".txt"))
    path.write_text(to_yaml(config))
    said.unlink(missing_ok=True)
    [status] = Processes(1, _command, said, ["train", str(path), *arguments], fault, step).join()
    assert status is not None
    return status, [line for line in said.read_text().splitlines() if not line.startswith("step ")]


# -- kill -9 ---------------------------------------------------------------------------------------------------


def _train_telling(config: TrainConfig, steps: Connection) -> None:
    """Go on with the run; says when it begins a step."""

    def telling(trainer: Trainer, step: int, batch_BS: Tensor) -> Any:
        steps.send(step)
        return train_step(trainer, step, batch_BS)

    loop.train_step = telling
    train(config, resume=True)


def test_killed_ten_times_is_straight_to_the_bit(settings: Settings) -> None:
    """SIGKILL at random moments: of starting, of loading, of steps and, with a checkpoint every other, of saving."""
    options: dict[str, Any] = {
        "steps": 40,
        "log": {"every": 1},
        "validation": {"every": 5, "tokens": 500},
    }
    straight = settings("straight", **options)
    Processes(1, train, straight).answers()
    draw = random.Random(0)
    broken, reached, hit = settings("broken", **options, checkpoint={"every": 2}), set(), 0
    for death in range(10):
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
    assert 5 < max(reached) < 39  # it went on from death to death, and none came too late
    assert hit > 0
    Processes(1, train, broken, True).answers()
    assert_same(broken, straight, steps=[40])


def _die_while_writing(config: TrainConfig) -> None:
    """In the ninth step, while a thread has written some of the second checkpoint and is not done."""
    write, written = checkpoint.save, threading.Event()

    def slow(state: dict[str, Any], checkpoint_id: Path, **options: Any) -> None:
        write(state, checkpoint_id=checkpoint_id, **options)
        if checkpoint_id.name.endswith("8"):
            written.set()
            time.sleep(60)

    def die(trainer: Trainer) -> None:
        assert written.wait(30)  # a machine under load may write for longer than four steps take
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save = slow  # type: ignore[assignment]
    at_step(8, die)
    train(config)


def test_killed_while_a_thread_writes_leaves_the_previous_one(
    settings: Settings, straight: TrainConfig
) -> None:
    options: dict[str, Any] = {"log": {"every": 1}, "checkpoint": {"every": 4, "background": True}}
    broken = settings("broken", **options)
    assert Processes(1, _die_while_writing, broken).join() == [-signal.SIGKILL]
    assert kept(broken) == [4]
    assert (Path(broken.out) / "checkpoints" / ".writing-step-00000008").is_dir()
    train(broken, resume=True)
    assert_same(broken, straight)


# -- a full disk -----------------------------------------------------------------------------------------------


class SmallDisk:
    """A file system of 8 MB, filled but for so many bytes."""

    number, error = errno.ENOSPC, "No space left on device"
    log_room = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, room: int, trainer: Trainer) -> None:
        self.finish()
        status = os.statvfs(self.folder)
        (self.folder / "filler").write_bytes(bytes(status.f_bavail * status.f_frsize - room))

    def finish(self) -> None:
        """Until the checkpoint that a thread writes, which still finds room."""
        while any((self.folder / "run" / "checkpoints").glob(".writing*")):
            time.sleep(0.001)

    def empty(self) -> None:
        (self.folder / "filler").unlink()


class SmallFiles(SmallDisk):
    """No file may grow beyond so many bytes: what any user can ask for, of one process."""

    number, error = errno.EFBIG, "File too large"
    log_room = 12_000  # it has 10 kB after ten lines

    def fill(self, room: int, trainer: Trainer) -> None:
        self.finish()
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def empty(self) -> None:
        pass  # the next process may write


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
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
def test_a_full_disk_at_a_checkpoint(
    background: bool, disk: SmallDisk, settings: Settings, straight: TrainConfig
) -> None:
    options: dict[str, Any] = {"log": {"every": 1}, "checkpoint": {"every": 5, "background": background}}
    config = replace(settings(**options), out=str(disk.folder / "run"))
    status, said = grmoe_train(config, fault=partial(disk.fill, 100_000), step=8)
    assert status == 1
    folder = Path(config.out) / "checkpoints"
    assert said == [
        f"error: could not write checkpoint {folder}/step-00000010: [Errno {disk.number}] {disk.error}; "
        f"the last complete one is {folder}/step-00000005"
    ]
    assert [p.name for p in folder.iterdir()] == ["step-00000005"]
    disk.empty()
    assert grmoe_train(config, "--resume")[0] == 0
    assert_same(config, straight)


def test_a_full_disk_at_the_log(disk: SmallDisk, settings: Settings, straight: TrainConfig) -> None:
    options: dict[str, Any] = {"log": {"every": 1}, "checkpoint": {"every": 10}}
    config = replace(settings(**options), out=str(disk.folder / "run"))
    status, said = grmoe_train(config, fault=partial(disk.fill, disk.log_room), step=10)
    assert (status, said) == (1, [f"error: cannot write {config.out}/log.jsonl: {disk.error}"])
    assert kept(config) == [10]
    if isinstance(disk, SmallFiles):
        assert grmoe_train(config, "--resume")[0] == 0
    else:  # the files that say what the run is have to be written first, and are whole meanwhile
        status, said = grmoe_train(config, "--resume")
        assert status == 1
        assert len(said) == 1
        assert said[0].startswith(f"error: cannot write {config.out}/")
        disk.empty()
        assert grmoe_train(config, "--resume")[0] == 0
    assert_same(config, straight)


def _full_for_one(config: TrainConfig) -> tuple[str, int]:
    """The second process cannot write its part of the second checkpoint; (what is told, the last step)."""
    write, latest, last = FileSystemWriter.write_data, Checkpoints.latest, -1

    def full(self: FileSystemWriter, *args: Any) -> Any:
        if os.environ["RANK"] == "1" and str(self.path).endswith("40"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *args)

    def slow(self: Checkpoints) -> Any:
        if os.environ["RANK"] == "0":
            time.sleep(0.1)  # the first process notices some steps later
        return latest(self)

    def watched(trainer: Trainer, step: int, batch_BS: Tensor) -> Any:
        nonlocal last
        last = step
        return train_step(trainer, step, batch_BS)

    FileSystemWriter.write_data = full  # type: ignore[method-assign]
    Checkpoints.latest = slow  # type: ignore[method-assign]
    loop.train_step = watched
    try:
        train(config)
    except CheckpointError as error:
        return str(error), last
    return "", last


def test_a_disk_full_for_one_of_two_in_the_background(settings: Settings) -> None:
    """Both are told, long before the next one is due and at the same step: alone, one would wait for the other."""
    config = settings(steps=200, checkpoint={"every": 20, "background": True}, parallel={"fsdp": 2})
    (message, step), other = Processes(2, _full_for_one, config).answers()
    assert (message, step) == other
    assert "step-00000040: [Errno 28] No space left on device; the last complete one is" in message
    assert message.endswith("step-00000020")
    assert 40 <= step < 59
    assert kept(config) == [20]


# -- data and settings -----------------------------------------------------------------------------------------


def _stop(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_shard_that_is_broken_between_runs(
    settings: Settings, straight: TrainConfig, prepared: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    config = settings(log={"every": 1}, data={"path": str(data)})
    assert grmoe_train(config, fault=_stop, step=9)[0] == 128 + signal.SIGTERM
    shard = data / "train-00000.bin"
    content = shard.read_bytes()
    for damage in ("truncated", "missing"):
        if damage == "truncated":
            os.truncate(shard, len(content) // 2)
            problem = f"is damaged: {len(content) // 2} bytes, {len(content)} expected"
        else:
            shard.unlink()
            problem = "is missing"
        assert grmoe_train(config, "--resume") == (2, [f"error: {shard} {problem}"])
        assert kept(config) == [10]
        shard.write_bytes(content)
    status, said = grmoe_train(config, "--resume", "optim.lr=1")
    assert status == 2
    assert len(said) == 1
    assert said[0].endswith("cannot change on resume: optim.lr: 0.003 → 1.0")
    assert grmoe_train(config, "--resume")[0] == 0
    assert_same(config, straight)


def _truncate(path: Path, size: int, trainer: Trainer) -> None:
    os.truncate(path, size)


def test_a_shard_that_breaks_while_training(settings: Settings, prepared: Path, tmp_path: Path) -> None:
    """Of the validation text: it was whole when the run began, and is first read at step 10."""
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    config = settings(data={"path": str(data)}, validation={"every": 10}, checkpoint={"every": 5})
    shard = data / "validation-00000.bin"
    size = shard.stat().st_size
    status, said = grmoe_train(config, fault=partial(_truncate, shard, size // 2), step=7)
    assert (status, said) == (2, [f"error: {shard} is damaged: {size // 2} bytes, {size} expected"])
    assert kept(config) == [5]


# -- NaN -------------------------------------------------------------------------------------------------------


def _poison_output(trainer: Trainer) -> None:
    attention = trainer.model.model.layers[1].self_attn
    attention.register_forward_hook(lambda m, i, o: (o[0] * math.inf, *o[1:]))


def _poison_gradient(trainer: Trainer) -> None:
    router = trainer.model.model.layers[1].mlp.router
    router.frames.register_hook(lambda g: g * math.nan)


def _poison_weights(trainer: Trainer) -> None:
    weight = trainer.model.model.layers[1].self_attn.q_proj.weight
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        weight.to_local()[0, 0] = math.nan


POISONS = {
    "output": (_poison_output, "the output of model.layers.1.self_attn holds NaN or Inf"),
    "gradient": (
        _poison_gradient,
        "the forward pass is finite, the gradient of model.layers.1.mlp.router.frames",
    ),
    "weights": (_poison_weights, "the weights model.layers.1.self_attn.q_proj.weight hold NaN or Inf"),
}


def _train_poisoned(config: TrainConfig, kind: str) -> tuple[str, int]:
    at_step(6, lambda trainer: POISONS[kind][0](trainer) if trainer.world.rank == 1 else None)
    try:
        train(config)
    except TrainingStopped as stopped:
        return str(stopped), stopped.status
    return "", 0


@pytest.mark.parametrize("kind", POISONS)
@pytest.mark.parametrize("parallel", [{"fsdp": 2}, {"expert": 2}])
def test_nan_on_one_process_of_two(parallel: dict[str, int], kind: str, settings: Settings) -> None:
    """Both stop, both name the layer, which only the second has seen."""
    config = settings(parallel=parallel)
    for message, status in Processes(2, _train_poisoned, config, kind).answers():
        assert "at step 7: " in message
        assert POISONS[kind][1] in message
        assert status == 1
    if kind == "weights":  # NaN is never saved
        assert kept(config) == []
        return
    assert kept(config) == [6]
    state = state_of(config, 6)
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    assert all(t.isfinite().all() for moments in state["moments"].values() for t in moments.values())


def test_nan_on_the_command_line(settings: Settings) -> None:
    config = settings()
    status, said = grmoe_train(config, fault=_poison_output, step=6)
    assert status == 1
    assert said == [
        f"loss nan, gradient norm nan at step 7: {POISONS['output'][1]}. "
        f"The last good step is saved: {config.out}/checkpoints/step-00000006",
        "Resuming hits the same step. To change `optim.lr`, start a new run (`out=…`). "
        f"To resume anyway: grmoe train --resume out={config.out}",
    ]


def _poison_once(trainer: Trainer) -> None:
    """As a device does that computes something wrong now and then."""
    attention = trainer.model.model.layers[1].self_attn

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        hook.remove()
        return (output[0] * math.nan, *output[1:])

    hook = attention.register_forward_hook(spoil)


def test_nan_that_does_not_come_back(settings: Settings) -> None:
    """Resuming repeats a step that is finite then, so nothing speaks against it."""
    config = settings()
    status, said = grmoe_train(config, fault=_poison_once, step=6)
    assert status == 1
    assert said == [
        "loss nan, gradient norm nan at step 7: the same step, run once more, is finite. "
        f"The last good step is saved: {config.out}/checkpoints/step-00000006",
        f"To resume from it: grmoe train --resume out={config.out}",
    ]
