"""What every test shares: one thread, property tests that draw the same examples on every run, little to collect."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
from collections.abc import Iterator

# The tensors of the tests are small: handing them to several threads costs more than the arithmetic. Set before the
# libraries that read it are loaded: fixtures of a session, other threads and started commands have one as well.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
import typer.main
import typer.testing
from hypothesis import settings

# Without a GPU the kernels run through Triton's interpreter (tests/kernels). It is chosen when a kernel is defined,
# so before anything imports triton or grmoe.kernels; "auto" backends never take it.
if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tests call the command line hundreds of times. Typer's runner would build all commands anew for each call.
typer.testing._get_command = functools.cache(typer.main.get_command)

settings.register_profile("grmoe", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("grmoe")


def pytest_sessionstart() -> None:
    """Imports and collected tests stay until the end. Looking for garbage among them takes seconds.

    Shells let commands in the background ignore Ctrl-C, and `nohup` the end of a terminal. Tests of both, and the
    commands they start, need them.
    """
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Also where torch was loaded before, or a test has changed it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
