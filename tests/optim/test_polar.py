"""The Gram matrix that the retraction measures is right to 1e-6, also where sums are added row after row."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

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


@pytest.mark.parametrize(
    ("dim", "rows", "slices"),
    [
        (768, 96, 8),
        (768, None, 1),
        (768, 100, 6),
        (769, 96, 1),
        (16, 96, 1),
        (16, 16, 1),
        (16, 8, 2),
        (1, 1, 1),
    ],
)
def test_a_sum_is_cut_into_equal_slices(
    dim: int, rows: int | None, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most slices of at least `rows` rows that divide the width. On a CPU one sum over all rows is enough."""
    shapes: list[tuple[int, ...]] = []
    product = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: shapes.append(tuple(b.shape)) or product(a, b))
    assert polar.gram_error(torch.ones(2, dim, 1), rows).flatten().tolist() == [dim - 1] * 2
    assert shapes == [(2 * slices, dim // slices, 1)]


def test_on_a_gpu_a_sum_has_96_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    product = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: shapes.append(tuple(b.shape)) or product(a, b))
    with FakeTensorMode():
        polar.gram_error(torch.empty(2, 768, 48, device="cuda"))
    assert shapes == [(16, 96, 48)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_iteration_is_missing_and_none_is_too_many(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residual r falls to ¾r² + ¼r³ in each iteration, until it is below a quarter of the rounding error."""
    products: list[int] = []
    product = torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda *a, **k: products.append(1) or product(*a, **k))
    counts = set()
    for high in torch.linspace(-0.005, 1.5, 300).tolist():
        low = -0.01
        residual = (high - low) / 2 / (1 + (high + low) / 2)  # of the interval's ends, at the start
        wanted, residual = 0, 0.75 * residual**2 + 0.25 * residual**3
        while residual > torch.finfo(dtype).eps / 4:
            wanted, residual = wanted + 1, 0.75 * residual**2 + 0.25 * residual**3
        products.clear()
        ends = torch.tensor([low, (low + high) / 2, high], dtype=dtype)
        found = polar.inverse_sqrt_minus_one(ends.view(3, 1, 1), low, high).flatten()
        assert len(products) == 3 * wanted, high
        exact = torch.expm1(-0.5 * torch.log1p(ends.double()))
        assert float((found.double() - exact).abs().max()) <= 2 * torch.finfo(dtype).eps
        counts.add(wanted)
    assert counts == ({1, 2, 3, 4} if dtype == torch.float32 else {2, 3, 4, 5})
    # As the docstring says of [0, 0.25]; the first iteration needs no product.
    for kind, iterations in ((torch.float32, 3), (torch.float64, 4)):
        products.clear()
        polar.inverse_sqrt_minus_one(torch.zeros(1, 1, 1, dtype=kind), 0.0, 0.25)
        assert len(products) == 3 * (iterations - 1)


def test_where_the_polar_factor_ends_and_qr_begins() -> None:
    """‖UᵀU − I‖_F of 0.01. The polar factor moves both columns of a sheared frame, QR leaves the first where it is."""
    plane = torch.eye(6, 2, dtype=torch.float64)
    for size, by_qr in ((0.0095, False), (0.0105, True), (0.015, True)):
        sheared = plane.clone()
        sheared[0, 1] = size / 2**0.5  # UᵀU − I has this number twice
        fixed = sheared[None].clone()
        polar.repair(fixed)
        assert torch.equal(fixed[0, :, 0].abs(), plane[:, 0]) is by_qr
        assert float(polar.gram_error(fixed).abs().max()) <= 1e-15
