"""A disk that takes no more, made of the limit on the size of files."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

MESSAGE = "File too large"  # where a full disk says "No space left on device"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process can become larger than this. Python ignores the signal, so writing raises."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
