"""Atomic writes of files and folders: after a crash the old content is there, or the new one.

Reading: a broken file ends in a `ValueError` of one line that names it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

PARTIAL = ".partial"  # suffix of what is still being written


def beside(path: Path, ending: str) -> Path:
    """The path with an ending on its name. `.` and `..` stand for a folder: the ending goes on its own name."""
    if path.name in ("", ".."):
        path = path / ".." / path.resolve().name
    return path.with_name(path.name + ending)


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file under a temporary name, flush it to disk, then rename it.

    After a crash the file has its old content or its new content, never a part. Processes that write the same file at
    the same time take turns.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with _held(partial) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                if os.name == "nt":  # Windows renames no open file
                    file.close()
                os.replace(partial, path)
            except OSError:
                with suppress(OSError):  # a file system that may only be read refuses this too
                    partial.unlink(missing_ok=True)
                raise
        _sync_folder(path.parent)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def _held(partial: Path) -> Iterator[BinaryIO]:
    """An empty file of this name that no other process writes meanwhile. One that waited finds it renamed: it opens
    another."""
    while True:
        with open(partial, "ab") as file:
            _lock(file.fileno())
            if _is_at(file.fileno(), partial):
                file.truncate(0)  # what a crash left
                yield file
                return


def _lock(handle: int) -> None:
    """Closing what is open ends it. Some network file systems have no locks, and Windows has others."""
    if os.name == "nt":
        return
    import fcntl

    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)


def _is_at(handle: int, path: Path) -> bool:
    """Whether what is open is still what lies there."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk. A rename is durable only after this."""
    if os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Inside, no other process is in such a block with this folder: what is read there is still so when it is written.

    Makes the folder, also if it was removed while this process waited for the others. A file system without locks, or
    Windows, lets everybody in.
    """
    if os.name == "nt":  # Windows cannot open folders
        folder.mkdir(parents=True, exist_ok=True)
        yield
        return
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # removed just now
            continue
        try:
            _lock(handle)
            if _is_at(handle, folder):
                yield
                return
        finally:
            os.close(handle)


@contextmanager
def replace_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder of the same name; at the end it replaces `out`. An error leaves `out` as it was.

    The name is the same because a model card begins with the folder's name. A crash between the two renames leaves the
    old folder next to `out`; the next call puts it back first.
    """
    place = out.with_name(out.name + PARTIAL)
    new, old = place / out.name, place / f"{out.name}.old"
    _put_back(old, out)
    shutil.rmtree(place, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        if out.exists():
            os.rename(out, old)
        os.rename(new, out)
        _sync_folder(out.parent)
    finally:
        _put_back(old, out)
        shutil.rmtree(place, ignore_errors=True)


def _put_back(old: Path, out: Path) -> None:
    if old.exists() and not out.exists():
        os.rename(old, out)


@contextmanager
def replace_files(out: Path, last: str, stale: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield a temporary folder of the same name; at the end its files replace those of `out`. Other files there stay.

    last: name of the file that makes the folder one of ours. It is removed first and written last, so a crash between
        leaves a folder that does not open, never a mixture that does. The next call completes it (`was_interrupted`).
    stale: patterns of names in `out` that are removed where the new folder has no such file.
    An error before the end leaves `out` as it was. Processes that replace the same folder take turns.
    """
    place = beside(out, PARTIAL)
    with alone_in(place):
        new = _new(place)
        old = new.with_name(f"{new.name}.old")
        _put_back(old, out)
        for left in (new, old):  # by a crash
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir()
        try:
            yield new
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        if not out.exists():
            os.rename(new, out)
        else:
            _move_into(new, out, last, stale)
        _sync_folder(out.parent)
        shutil.rmtree(place, ignore_errors=True)


def was_interrupted(out: Path) -> bool:
    """Whether a crash stopped `replace_files` while it moved files into this folder."""
    return _new(beside(out, PARTIAL)).is_dir()


def _new(place: Path) -> Path:
    """The folder that `replace_files` fills in this place, with the name it will have."""
    return place / place.name.removesuffix(PARTIAL)


def _move_into(new: Path, out: Path, last: str, stale: tuple[str, ...]) -> None:
    names = [path.relative_to(new) for path in sorted(new.rglob("*")) if path.is_file()]
    (out / last).unlink(missing_ok=True)
    _sync_folder(out)
    for old in out.iterdir():
        if Path(old.name) not in names and any(fnmatch(old.name, pattern) for pattern in stale):
            old.unlink()
    for name in sorted(names, key=lambda name: str(name) == last):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        _move(new / name, out / name)
    _sync_folder(out)


def _move(source: Path, target: Path) -> None:
    """As `os.replace`, also to another disk: a folder may be a link to one, or a volume that is mounted there."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        partial = target.with_name(target.name + PARTIAL)
        shutil.copyfile(source, partial)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a library raises about a broken file into a `ValueError` that names the file."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the Rust code of tokenizers panics with a BaseException
        gone = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)
        if isinstance(error, ValueError | OSError) and not gone and str(path) in str(error):
            raise
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """The first line of an error, and its type where the message alone says little."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error).strip()
    line = " ".join((text.splitlines() or [""])[0].split())
    if len(line) > 300:
        line = f"{line[:300]}…"
    plain = isinstance(error, ValueError | OSError | RuntimeError) and line
    return line if plain else f"{type(error).__name__}: {line}".removesuffix(": ")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    with reading(path):
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it must hold an object, got {type(found).__name__}")
    return found
