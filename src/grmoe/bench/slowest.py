"""The kernels that take most of a pass: PyTorch's profiler, one pass, sorted by time.

On a GPU these are kernels, also those inside CUDA graphs. On a CPU they are PyTorch's operators, without what they
call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch
from torch.profiler import ProfilerActivity, profile

from grmoe.tables import Table

_NAME = 90  # characters; names of kernels are templates of thousands


class Kernel(TypedDict):
    name: str
    ms: float
    """All of its calls in the pass."""
    calls: int
    share: float
    """Of the time of all kernels."""


def slowest(run: Callable[[], object], device: torch.device, most: int) -> list[Kernel]:
    """The `most` slowest kernels of one call of `run`, which was called before."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    times = [
        (event.key, event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count)
        for event in found.key_averages()
    ]
    total = sum(time for _, time, _ in times)
    times.sort(key=lambda each: -each[1])
    return [
        Kernel(name=name, ms=time / 1e3, calls=calls, share=time / total)
        for name, time, calls in times[:most]
        if time > 0
    ]


def table(title: str, kernels: list[Kernel]) -> Table:
    found = Table(title, ["kernel", "ms", "share", "calls"])
    for kernel in kernels:
        name = kernel["name"] if len(kernel["name"]) <= _NAME else kernel["name"][: _NAME - 1] + "…"
        found.add(name, f"{kernel['ms']:.3f}", f"{100 * kernel['share']:.1f} %", str(kernel["calls"]))
    found.end_section()
    shown, share = sum(k["ms"] for k in kernels), sum(k["share"] for k in kernels)
    found.add("sum of these", f"{shown:.3f}", f"{100 * share:.1f} %", "")
    return found
