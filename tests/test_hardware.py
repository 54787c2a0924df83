"""The peak of a device goes by its name."""

from __future__ import annotations

import pytest
import torch

from grmoe.hardware import peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Abacus 1", None),
    ],
)
def test_peaks(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == peak


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None
