"""Two trainings do not share a folder; a dead one does not keep it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from comparing import assert_same
from full_disk import largest_file
from processes import Command, Processes
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.config import to_yaml
from grmoe.parallel.world import World
from grmoe.runs.about import about
from grmoe.runs.config import TrainConfig
from grmoe.runs.lock import lock_folder, trained_by
from grmoe.train.loop import train

Settings = Callable[..., TrainConfig]
ALONE = World(0, 1, 0, torch.device("cpu"), None)


@pytest.fixture
def start() -> Iterator[Callable[[TrainConfig], Command]]:
    begun: list[Command] = []

    def run(config: TrainConfig) -> Command:
        settings, said = (Path(config.out).with_suffix(suffix) for suffix in (".yaml", ".txt"))
        settings.write_text(to_yaml(config))
        begun.append(Command(said, "train", str(settings)))
        return begun[-1]

    yield run
    for command in begun:
        command.kill()


def told(folder: Path) -> tuple[str, str]:
    """What `grmoe info` says of the steps, and the next command."""
    _, table, following = about(str(folder))
    assert table is not None
    return dict(table.rows)["trained"], following  # type: ignore[arg-type]


def test_a_second_training_is_stopped_and_a_killed_one_goes_on(
    settings: Settings, start: Callable[[TrainConfig], Command]
) -> None:
    options = {"steps": 30, "log": {"every": 1}, "checkpoint": {"every": 3, "keep_last": 100}}
    straight, config = settings("straight", **options), settings(**options)
    train(straight)
    first = start(config)
    first.wait_for("\nstep 5:")
    assert first.process.pid is not None
    os.kill(first.process.pid, signal.SIGSTOP)  # it holds the folder as long as this takes
    folder = Path(config.out)
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    for more in ([], ["--resume"]):
        second = CliRunner().invoke(app, ["train", str(folder.with_suffix(".yaml")), *more])
        assert second.exit_code == 2
        said = " ".join(second.output.split())
        assert f"error: {folder} is being trained by process {first.process.pid} on " in said
        assert "another folder (out=…)" in said
        assert "Traceback" not in said
    steps, following = told(folder)  # not --resume, which was just refused
    assert f" of 30 steps, being trained by process {first.process.pid} on " in steps
    assert following == f"grmoe curves {folder}"
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    first.kill()
    steps, following = told(folder)
    assert steps.endswith(" of 30 steps, not finished")
    assert following == f"grmoe train out={folder} --resume"
    resumed = CliRunner().invoke(app, ["train", str(folder.with_suffix(".yaml")), "--resume"])
    assert resumed.exit_code == 0, resumed.output
    assert_same(config, straight, steps=[30])
    assert told(folder) == ("30 of 30 steps, finished", f"grmoe dial {folder} --write")


def test_asking_who_trains_does_not_hold_the_folder(tmp_path: Path) -> None:
    assert trained_by(tmp_path / "nowhere") is None
    assert not (tmp_path / "nowhere").exists()
    with lock_folder(tmp_path, ALONE):
        assert trained_by(tmp_path) == f"process {os.getpid()} on {socket.gethostname()}"
    with (tmp_path / ".lock").open() as other:  # of one who asks at the same moment
        fcntl.flock(other, fcntl.LOCK_SH)
        assert trained_by(tmp_path) is None
    with lock_folder(tmp_path, ALONE):
        pass


def _refused(config: TrainConfig) -> str:
    try:
        train(config)
    except ValueError as error:
        return str(error)
    return ""


def test_all_processes_of_a_group_are_told_and_one_of_them_holds_it(settings: Settings) -> None:
    config = settings(steps=2, parallel={"fsdp": 2})
    with lock_folder(Path(config.out), ALONE):
        first, second = Processes(2, _refused, config).answers()
    assert first == second
    assert f"is being trained by process {os.getpid()} on " in first
    assert Processes(2, _refused, config).answers() == ["", ""]


def test_it_is_free_after_an_error(settings: Settings) -> None:
    config = settings(steps=2)
    with pytest.raises(KeyError), lock_folder(Path(config.out), ALONE):
        raise KeyError
    train(config)


def test_a_full_disk_does_not_hide_what_went_wrong(tmp_path: Path) -> None:
    with largest_file(0), pytest.raises(KeyError), lock_folder(tmp_path / "run", ALONE):
        raise KeyError


def test_a_file_is_no_folder_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("")
    with (
        pytest.raises(ValueError, match=r"out must be a folder for the run, but .*text\.txt is a file"),
        lock_folder(tmp_path / "text.txt", ALONE),
    ):
        pass
