"""One training per folder. Two would mix their logs and remove each other's checkpoints.

The operating system holds the lock on an open file. It ends with the process, even after kill -9, so it is never stale.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from grmoe.checks import require
from grmoe.data.shards import INDEX
from grmoe.parallel.world import World, any_process
from grmoe.runs.folder import CONFIG

_LOCK = ".lock"
# Errors of network file systems without locks. A run there continues without one.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextlib.contextmanager
def lock_folder(folder: Path, world: World) -> Iterator[None]:
    """Lock the folder, and create it if needed. Raises on all processes if another run holds the lock.

    A start that fails before anything was written leaves no folder behind.
    """
    path = folder / _LOCK
    require(not folder.is_file(), f"out must be a folder for the run, but {folder} is a file")
    # A run there would hide the text: `grmoe info` tells a folder by its files. A run from before this rule goes on.
    holds_text = (folder / INDEX).is_file() and not (folder / CONFIG).is_file()
    require(not holds_text, f"out must be a folder for the run, but {folder} holds prepared text")
    with contextlib.ExitStack() as held:
        taken = held.enter_context(_locked(path)) if world.first else True
        if any_process(world, not taken):
            raise ValueError(
                f"{folder} is being trained by {_holder(path)}: wait for it, stop it, or give this run another "
                "folder (out=…)"
            )
        yield


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Yield whether the lock was free. If so, hold it until the context ends."""
    with _open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        if os.fstat(file.fileno()).st_nlink == 0:  # by `_remove_if_alone`, after we had opened it
            raise OSError(f"{path.parent} was just removed by a start that failed: start again")
        with contextlib.suppress(OSError):  # on a full disk the lock works without a name
            # Not by the file's buffer: what it could not write would fail again when the file is closed.
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield True
        except BaseException:
            _remove_if_alone(path)
            raise


def _open(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a")  # not "w", which would erase the name of the holder
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from error


def _remove_if_alone(path: Path) -> None:
    """Remove the lock and its folder if the folder holds nothing else. Called while the lock is held."""
    with contextlib.suppress(OSError):
        if [p.name for p in path.parent.iterdir()] == [path.name]:
            path.unlink()
            path.parent.rmdir()


def trained_by(folder: Path) -> str | None:
    """The process that trains in the folder now; None if there is none, or if the file system has no locks."""
    path = folder / _LOCK
    # Without a lock file nothing was trained here, or it was copied from elsewhere.
    with contextlib.suppress(OSError), path.open() as file:
        try:
            # Shared, so that two who ask do not take each other for a training. Closing the file ends it.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(path)
    return None


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text() or "another process"
    return "another process"
