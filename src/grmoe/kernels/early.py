"""Kernels that start while the one before them still runs, from Hopper on (programmatic dependent launch).

Between two kernels of a stream the device is idle for about a microsecond. A kernel that starts early is on its
multiprocessors by then. It waits there until the kernel before it is done and has written everything. So each kernel
calls `await_inputs` before it reads or writes any memory. `launch.EARLY` turns it on.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from grmoe.kernels import runtime

COMPILED = tl.constexpr(not runtime.INTERPRETED)


@triton.jit
def await_inputs():
    """Waits for the kernel before, then lets the next one start early. Without an early launch both do nothing."""
    if COMPILED and cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()
