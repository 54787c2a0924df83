"""Atomic writes of files and folders: after a crash the old content is there, or the new one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
