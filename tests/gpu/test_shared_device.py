"""Processes that share a device: a kernel that is set aside half-way, and goes on later, gives the same bits.

A kernel that writes shared memory it has set up as a barrier passes every test while it has the device to itself.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from test_kernels import Shape, make, run, tokens
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PROCESSES, SECONDS = 4, 10.0
# As wide as the preset "small", so that the kernels are those of a training run.
WIDE = Shape(16384, 512, 8, 1024)


def differing(want: dict[str, Tensor], got: dict[str, Tensor]) -> list[str]:
    return [name for name, value in want.items() if not torch.equal(got[name], value)]


def work(together: Any, found: Any, shape: Shape, dtype: torch.dtype, router: str, seconds: float) -> None:
    """Forward and backward again and again, with others beside; what differed from the first time."""
    moe, x = make(shape, dtype, router, activation="gelu"), tokens(shape, dtype)
    want = run(moe, x)
    together.wait()
    wrong: set[str] = set()
    end, runs = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        wrong.update(differing(want, run(moe, x)))
        runs += 1
    found.put((runs, sorted(wrong)))


@pytest.mark.parametrize("router", ["grassmann", "softmax"])
def test_output_and_every_gradient(router: str) -> None:
    context = torch.multiprocessing.get_context("spawn")
    together, found = context.Barrier(PROCESSES), context.Queue()
    args = (together, found, WIDE, torch.bfloat16, router, SECONDS)
    processes = [context.Process(target=work, args=args, daemon=True) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    each = [found.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(60)
    assert all(runs > 0 and not wrong for runs, wrong in each), each
