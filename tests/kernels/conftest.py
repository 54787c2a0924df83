"""The kernels through Triton's interpreter: on the CPU, fp32 (its bf16 is wrong), a program at a time.

It multiplies whole tiles, rows that nobody wrote included, so numpy may warn; modules that meet this ignore the
warning for themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from grmoe.kernels import runtime


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """Skips where kernels are compiled (tests/gpu covers them); no failure outlives its test."""
    if not runtime.INTERPRETED:
        pytest.skip("kernels are compiled here, not interpreted")
    runtime._failed.clear()
    yield
    runtime._failed.clear()


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Memory that nobody wrote holds NaN (integers: the largest): what torch does in deterministic mode."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
