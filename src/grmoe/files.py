"""Atomic writes of files and folders: after a crash the old content is there, or the new one.

Reading: a broken file ends in a `ValueError` of one line that names it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # suffix of what is still being written


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file under a temporary name, flush it to disk, then rename it.

    After a crash the file has its old content or its new content, never a part.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error


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
    An error before the end leaves `out` as it was.
    """
    place = out.with_name(out.name + PARTIAL)
    new = place / out.name
    _put_back(place / f"{out.name}.old", out)
    shutil.rmtree(place, ignore_errors=True)
    new.mkdir(parents=True)
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
    return (out.with_name(out.name + PARTIAL) / out.name).is_dir()


def _move_into(new: Path, out: Path, last: str, stale: tuple[str, ...]) -> None:
    names = [path.relative_to(new) for path in sorted(new.rglob("*")) if path.is_file()]
    (out / last).unlink(missing_ok=True)
    _sync_folder(out)
    for old in out.iterdir():
        if Path(old.name) not in names and any(fnmatch(old.name, pattern) for pattern in stale):
            old.unlink()
    for name in sorted(names, key=lambda name: str(name) == last):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new / name, out / name)
    _sync_folder(out)


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
