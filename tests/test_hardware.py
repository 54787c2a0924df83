"""The peak of a device goes by its name."""

from __future__ import annotations

import pytest
import torch

from grmoe.hardware import peak_flops, use_device


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


def test_using_a_gpu_makes_it_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert use_device("cpu") == torch.device("cpu")
    assert current == []
    assert use_device("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
