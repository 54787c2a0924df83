"""Kernels that start while the one before them still runs, from Hopper on (programmatic dependent launch).

Between two kernels of a stream the device is idle for about a microsecond. A kernel that starts early is on its
multiprocessors by then. It waits there until the kernel before it is done and has written everything. So each kernel
calls `await_inputs` before it reads or writes any memory. `launch.EARLY` turns it on.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from grmoe.kernels import runtime

COMPILED = tl.constexpr(not runtime.INTERPRETED)


@tl.core.builtin
def starts_early(_semantic: Any = None) -> tl.constexpr:
    """Whether this kernel is compiled for an early start."""
    return tl.constexpr(getattr(_semantic.builder.options, "launch_pdl", False))


@triton.jit
def await_inputs():
    """Waits for the kernel before, then lets the next one start early. Nothing in a kernel that does not start early:
    the next one may be a library's, which starts early by its own choice."""
    if COMPILED and starts_early():
        gdc_wait()
        gdc_launch_dependents()
