"""Devices: which one to use, its name, and its peak rate."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from grmoe import checks

# Dense bf16 FLOP/s from NVIDIA's data sheets. The first entry that is part of the device's name counts, so slower
# variants ("H100 PCIe") come before the plain name ("H100").
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a device, the denominator of MFU; None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAK_FLOPS.items() if known in name), None)


def find_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """The named device, or an error if it is not there. "auto": the GPU of this process if there is one."""
    kind, _, number = name.partition(":")
    known = name in ("auto", "cpu") or (kind == "cuda" and (number.isdecimal() or name == "cuda"))
    checks.require(known, f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, int(number or local_rank))
    gpus = torch.cuda.device_count()
    checks.require(device.index < gpus, f"device must exist, got {device} on a machine with {gpus} GPUs")
    return device


def use_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """`find_device`, and make a GPU the current device."""
    device = find_device(name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """Name of the GPU, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def memory_bytes(device: torch.device) -> int:
    """Bytes that this process may use: memory of the GPU, or its share of the machine's, within a container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):  # no container, or one without a limit ("max")
            continue
    return total // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
