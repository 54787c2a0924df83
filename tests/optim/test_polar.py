"""The Gram matrix that the retraction measures is right to 1e-6, also where sums are added row after row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grmoe.geometry import haar_frames
from grmoe.optim import GrassmannAdam, polar


def row_after_row(A: Tensor, B: Tensor) -> Tensor:
    """A batched product as a GPU's fp32 units compute it: one fused multiply-add per row."""
    out = A.new_zeros(A.shape[0], A.shape[1], B.shape[2])
    for i in range(A.shape[2]):
        out.baddbmm_(A[:, :, i : i + 1], B[:, i : i + 1])
    return out


@pytest.mark.parametrize(("dim", "rank"), [(768, 48), (2048, 32), (512, 64), (769, 8), (16, 16), (1, 1)])
def test_the_error_of_the_gram_matrix(dim: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Y_NDK = haar_frames(dim, rank, 2) + 1e-3 * torch.randn(2, dim, rank) / dim**0.5
    wide_NDK = Y_NDK.double()
    exact_NKK = wide_NDK.mT @ wide_NDK - torch.eye(rank, dtype=torch.float64)
    room = 2e-6 if dim == 769 else 5e-7  # a prime has no slices, and pays for its long sum
    assert (polar.gram_error(Y_NDK).double() - exact_NKK).abs().max() <= room
    assert torch.allclose(polar.gram_error(wide_NDK), exact_NKK, rtol=0, atol=1e-14)
    monkeypatch.setattr(torch, "bmm", row_after_row)
    assert (polar.gram_error(Y_NDK).double() - exact_NKK).abs().max() <= room


def test_frames_stay_orthonormal_where_sums_are_added_row_after_row(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = torch.nn.Parameter(haar_frames(768, 48, 2))
    optimizer = GrassmannAdam([frames])
    monkeypatch.setattr(torch, "bmm", row_after_row)
    for _ in range(4):
        frames.grad = torch.randn_like(frames)
        optimizer.step()
        wide_NDK = frames.detach().double()
        error = wide_NDK.mT @ wide_NDK - torch.eye(48, dtype=torch.float64)
        assert float(error.abs().max()) <= 1e-6
