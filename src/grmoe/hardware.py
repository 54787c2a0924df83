"""Peak speed of known devices."""

from __future__ import annotations

import torch

# Dense bf16 FLOP/s from NVIDIA's data sheets. The first entry that is part of the device's name counts, so slower
# variants ("H100 PCIe") come before the plain name ("H100").
PEAK_FLOPS = {
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
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)
