"""One training per folder: two would write into each other's log and remove each other's checkpoints.

The lock is the kernel's, on an open file. A process that dies, even by kill -9, releases it, so a lock is never stale.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from grmoe.parallel.world import World, any_process

_LOCK = ".lock"
# Some network file systems have no locks; a run there is as safe as it was without.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextlib.contextmanager
def lock_folder(folder: Path, world: World) -> Iterator[None]:
    """Hold the folder for this run; raises on all of its processes if another run does. Creates the folder."""
    path = folder / _LOCK
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
    """Whether the lock was free; then it is ours until the end."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")  # not "w": the holder's name stands in it
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield True


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text() or "another process"
    return "another process"
