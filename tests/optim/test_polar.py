"""The Gram matrix that the retraction measures is right to 1e-6, also where sums are added row after row."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from grmoe.geometry import haar_frames
from grmoe.optim import GrassmannAdam, grassmann_adam, polar


def row_after_row(A: Tensor, B: Tensor) -> Tensor:
    """A batched product as a GPU's fp32 units compute it: one fused multiply-add per row."""
    out = A.new_zeros(A.shape[0], A.shape[1], B.shape[2])
    for i in range(A.shape[2]):
        out.baddbmm_(A[:, :, i : i + 1], B[:, i : i + 1])
    return out


@pytest.mark.parametrize(("dim", "rank"), [(768, 48), (2048, 32), (512, 64), (16, 16), (1, 1)])
def test_sums_over_slices_are_right_to_1e_6_row_after_row(
    dim: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Y_NDK = haar_frames(dim, rank, 2) + 1e-3 * torch.randn(2, dim, rank) / dim**0.5
    wide_NDK = Y_NDK.double()
    exact_NKK = wide_NDK.mT @ wide_NDK - torch.eye(rank, dtype=torch.float64)
    for rows in (None, 96, 7):
        assert torch.allclose(polar.gram_error(wide_NDK, rows), exact_NKK, rtol=0, atol=1e-14)
    assert (polar.gram_error(Y_NDK).double() - exact_NKK).abs().max() <= 6e-7
    monkeypatch.setattr(torch, "bmm", row_after_row)
    sliced, whole = ((polar.gram_error(Y_NDK, rows).double() - exact_NKK).abs().max() for rows in (96, dim))
    assert sliced <= 5e-7
    assert whole > 5e-7 or dim < 200  # what the slices are for


def test_a_width_without_divisors_is_one_sum() -> None:
    Y_NDK = haar_frames(769, 8, 2).double()
    assert polar.gram_error(Y_NDK, 96).abs().max() <= 1e-6


def test_frames_stay_orthonormal_where_sums_are_added_row_after_row(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = torch.nn.Parameter(haar_frames(768, 48, 2))
    optimizer = GrassmannAdam([frames])
    as_on_a_gpu = functools.partial(polar.gram_error, rows=96)
    monkeypatch.setattr(grassmann_adam, "gram_error", as_on_a_gpu)
    monkeypatch.setattr(torch, "bmm", row_after_row)
    for _ in range(4):
        frames.grad = torch.randn_like(frames)
        optimizer.step()
        wide_NDK = frames.detach().double()
        error = wide_NDK.mT @ wide_NDK - torch.eye(48, dtype=torch.float64)
        assert float(error.abs().max()) <= 1e-6
