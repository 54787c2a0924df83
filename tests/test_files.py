"""Files and folders are whole or not there, whatever fails on the way."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from grmoe import files
from grmoe.files import PARTIAL, replace_files, replace_folder, write_file


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for content in (b"first", memoryview(b"second")):
        write_file(path, content)
        assert path.read_bytes() == bytes(content)
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    write_file(path, b"old")
    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(OSError, match=f"cannot write {path}: No space left on device"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]  # nothing half-written stays


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "log.jsonl"
    with pytest.raises(OSError, match=f"cannot write {path}: No such file or directory"):
        write_file(path, b"x")


def test_a_file_system_that_may_only_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses to remove what was never written, too. The error is of the file asked for."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "results.json.partial")

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match=f"cannot write {tmp_path / 'results.json'}: Read-only file system"):
        write_file(tmp_path / "results.json", b"x")


def _write_often(path: Path, letter: bytes) -> None:
    for length in range(1, 60):
        write_file(path, letter * 997 * length)


def test_processes_that_write_one_file_take_turns(tmp_path: Path) -> None:
    """Such as two dials of one run: each renamed the temporary file of the other, and one ended in an error."""
    path = tmp_path / "measurements.json"
    writers = [
        get_context("fork").Process(target=_write_often, args=(path, letter)) for letter in (b"a", b"b")
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        with contextlib.suppress(FileNotFoundError):
            found = path.read_bytes()
            assert len(set(found)) == 1, "two contents in one file"
            assert len(found) % 997 == 0, "a part of a content"
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["measurements.json"]


def _replace_files_often(out: Path, letter: str) -> None:
    for number in range(30):
        with replace_files(out, last="config") as new:
            for name in ("weights", "tokenizer", "config"):
                (new / name).write_text(f"{letter}{number}")
                time.sleep(0.001)


def test_processes_that_replace_one_folder_take_turns(tmp_path: Path) -> None:
    """Such as two dials with --write: one model had files of both, and one of the two ended in an error."""
    out = tmp_path / "model"
    writers = [
        get_context("fork").Process(target=_replace_files_often, args=(out, letter)) for letter in "ab"
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        with contextlib.suppress(FileNotFoundError):
            before = (out / "config").read_text()
            found = {path.read_text() for path in out.iterdir()}
            if (out / "config").read_text() == before:  # else it was replaced while it was read
                assert found == {before}, "files of two models in one folder"
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


class At:
    """Calls through to `real` until the call number `last`, which does something else."""

    def __init__(self, real: Callable[..., Any], last: int, instead: Callable[..., Any]) -> None:
        self.real, self.left, self.instead = real, last, instead

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        return self.instead() if self.left == 0 else self.real(*args)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_at(call: str, number: int, work: Callable[[Path], None], path: Path) -> None:
    setattr(files.os, call, At(getattr(os, call), number, _die))
    work(path)


def _write_new(path: Path) -> None:
    write_file(path, b"new" * 1000)


def _replace(path: Path, error: BaseException | None = None) -> None:
    with replace_folder(path) as new:
        (new / "model").write_text("new")
        if error is not None:
            raise error


def killed(call: str, number: int, work: Callable[[Path], None], path: Path) -> None:
    """SIGKILL in place of a call: the first, second … of its name."""
    process = get_context("fork").Process(target=_killed_at, args=(call, number, work, path))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_crash_leaves_the_old_file_and_the_next_write_works(call: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_file(path, b"old")
    killed(call, 1, _write_new, path)
    assert path.read_bytes() == b"old"
    write_file(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "model"
    with replace_folder(out) as new:
        assert new.name == out.name  # a model card begins with it
        assert not out.exists()
        (new / "model").write_text("old")
        (new / "licence").write_text("old")
    return out


def content(out: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in out.iterdir()}


def test_a_folder_is_replaced_as_a_whole(folder: Path) -> None:
    _replace(folder)
    assert content(folder) == {"model": "new"}
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyError("bug"), KeyboardInterrupt()])
def test_an_error_on_the_way_leaves_the_old_folder(error: BaseException, folder: Path) -> None:
    with pytest.raises(type(error)):
        _replace(folder, error)
    assert content(folder) == {"model": "old", "licence": "old"}
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_folder_that_cannot_be_moved_leaves_the_old_one(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.os, "rename", At(os.rename, number, full))
    with pytest.raises(OSError, match="No space left"):
        _replace(folder)
    assert content(folder) == {"model": "old", "licence": "old"}
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_crash_while_folders_are_moved_loses_nothing(number: int, folder: Path) -> None:
    killed("rename", number, _replace, folder)
    assert folder.exists() is (number == 1)  # between the two, the old one lies next to it …
    with pytest.raises(KeyError):
        _replace(folder, KeyError())
    assert content(folder) == {"model": "old", "licence": "old"}  # … and the next call puts it back
    _replace(folder)
    assert content(folder) == {"model": "new"}
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_what_a_crash_left_is_not_taken_over(folder: Path) -> None:
    left = folder.with_name(folder.name + PARTIAL) / folder.name
    left.mkdir(parents=True)
    (left / "stale").write_text("half")
    _replace(folder)
    assert content(folder) == {"model": "new"}
    assert not left.parent.exists()


def test_a_folder_on_another_disk_gets_its_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to one, or a mounted volume: a file cannot be renamed into it."""
    real = os.replace

    def within_a_folder(source: Path, target: Path) -> None:
        if Path(source).parent != Path(target).parent:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        real(source, target)

    monkeypatch.setattr(files.os, "replace", within_a_folder)
    with replace_files(folder, last="model") as new:
        (new / "model").write_text("new")
        (new / "code").mkdir()
        (new / "code" / "a.py").write_text("new")
    assert (folder / "code" / "a.py").read_text() == "new"
    (folder / "code" / "a.py").unlink()
    (folder / "code").rmdir()
    assert content(folder) == {"model": "new", "licence": "old"}
    assert [p.name for p in folder.parent.iterdir()] == ["model"]
