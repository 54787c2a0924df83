"""Draws from the Bingham distribution against its exact energy law and its exact moments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from grmoe.bingham import log_normalizer, mean_energy, sample
from grmoe.geometry import haar_frames

F64 = torch.float64
DRAWS = 20_000


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frame(d: int, k: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return haar_frames(d, k, generator=rng(seed), dtype=dtype)


def energy_p_value(x_SD: Tensor, U_DK: Tensor, kappa: float) -> float:
    """KS test of ‖Uᵀx‖² against a^{k/2−1} (1−a)^{(d−k)/2−1} e^{κa}, integrated in φ, a = sin²φ."""
    d, k = U_DK.shape
    grid = np.linspace(0, math.pi / 2, 40_001)[1:-1]
    log_density = (
        (k - 1) * np.log(np.sin(grid)) + (d - k - 1) * np.log(np.cos(grid)) + kappa * np.sin(grid) ** 2
    )
    density = np.exp(log_density - log_density.max())
    cdf = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    phi = torch.asin((x_SD @ U_DK).norm(dim=-1).clamp(max=1.0)).numpy()
    return float(kstest(phi, lambda t: np.interp(t, grid, cdf / cdf[-1])).pvalue)


def assert_mean(samples: Tensor, truth: Tensor | float) -> None:
    """Means over the first dimension within four standard errors."""
    error = samples.std(0) / math.sqrt(len(samples))
    assert bool(((samples.mean(0) - truth).abs() < 4 * error + 1e-15).all())


@pytest.mark.parametrize(("d", "k"), [(2, 1), (3, 1), (3, 2), (16, 4), (64, 63), (128, 16)])
@pytest.mark.parametrize("kappa", [0.0, 1.0, 10.0, 200.0])
def test_scalar_energy(d: int, k: int, kappa: float) -> None:
    U = frame(d, k)
    x = sample(U, kappa, DRAWS, generator=rng(1))
    assert x.shape == (DRAWS, d)
    # A one-dimensional complement is what is left of a Gaussian after projection, down to 1e-5 in these draws.
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(DRAWS, dtype=F64), rtol=0, atol=1e-10)
    assert energy_p_value(x, U, kappa) > 1e-3  # 24 cases, seeds fixed
    assert_mean((x @ U).square().sum(-1), mean_energy(k, d, kappa))


@pytest.mark.parametrize("kappa", [10.0, 200.0])
def test_the_energy_test_has_power(kappa: float) -> None:
    U = frame(128, 16)
    x = sample(U, kappa, DRAWS, generator=rng(1))
    # Twenty percent of κ = 10 moves the mean energy by ten standard errors at these many draws.
    for wrong in (0.8 * kappa, 1.2 * kappa):
        assert energy_p_value(x, U, wrong) < 1e-6


@pytest.mark.parametrize("diagonal", [False, True])
def test_directions_are_isotropic(diagonal: bool) -> None:
    """Inside the subspace and in its complement nothing but the energy is preferred."""
    d, k, kappa = 8, 3, 5.0
    U = frame(d, k)
    concentration = torch.full((k,), kappa, dtype=F64) if diagonal else kappa
    x = sample(U, concentration, DRAWS, generator=rng(2))
    complement = torch.linalg.qr(torch.cat([U, torch.eye(d, dtype=F64)], dim=1)).Q[:, k:]
    inside = mean_energy(k, d, kappa)
    for basis, total in ((U, inside), (complement, 1 - inside)):
        y = x @ basis
        n = basis.shape[1]
        assert_mean(y, 0.0)
        assert_mean(
            (y.unsqueeze(-1) * y.unsqueeze(-2)).flatten(1), (total / n * torch.eye(n, dtype=F64)).flatten()
        )
    assert_mean(((x @ U).unsqueeze(-1) * (x @ complement).unsqueeze(-2)).flatten(1), 0.0)


@pytest.mark.parametrize(
    ("d", "spectrum"),
    [
        (3, (1.0, -2.0)),
        (3, (-1.0, -2.0, -3.0)),  # no complement, nothing positive
        (4, (5.0, 3.0, 1.0, 0.5)),
        (8, (6.0, 2.0, 0.0)),
        (8, (-4.0, -9.0)),
        (64, (30.0, 10.0, 5.0, 1.0)),
        (128, (200.0, 100.0)),
    ],
)
def test_diagonal_second_moments(d: int, spectrum: tuple[float, ...]) -> None:
    k = len(spectrum)
    U = frame(d, k)
    values = torch.tensor(spectrum, dtype=F64)
    x = sample(U, values, DRAWS, generator=rng(3))
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(DRAWS, dtype=F64), rtol=0, atol=1e-12)
    eigenvalues = torch.cat([values, torch.zeros(1, dtype=F64)]).requires_grad_()
    (energy,) = torch.autograd.grad(log_normalizer(eigenvalues, [1] * k + [d - k]), eigenvalues)
    along = (x @ U).square()
    assert_mean(along, energy[:k])
    if d > k:
        rest = x - (x @ U) @ U.T
        assert_mean(rest.square().sum(-1), energy[k])
    # Signs and pairs of columns: A is diagonal in the frame.
    assert_mean(x @ U, 0.0)
    for i in range(k):
        for j in range(i):
            assert_mean((x @ U[:, i]) * (x @ U[:, j]), 0.0)


@pytest.mark.parametrize(
    ("d", "k", "kappa"), [(8, 1, 6.0), (16, 4, 10.0), (16, 4, -10.0), (64, 8, 100.0), (5, 2, 0.0)]
)
def test_equal_concentrations_are_the_scalar_law(d: int, k: int, kappa: float) -> None:
    U = frame(d, k)
    x = sample(U, torch.full((k,), kappa, dtype=F64), DRAWS, generator=rng(4))
    assert energy_p_value(x, U, kappa) > 1e-3
    assert energy_p_value(x, U, kappa + 2.0) < 1e-6


@pytest.mark.parametrize("concentration", [0.0, torch.zeros(3, dtype=F64)])
def test_zero_concentration_is_uniform(concentration: Tensor | float) -> None:
    d = 6
    x = sample(frame(d, 3), concentration, DRAWS, generator=rng(5))
    assert_mean(x, 0.0)
    outer = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(1)
    assert_mean(outer, torch.eye(d, dtype=F64).flatten() / d)
    for axis in (torch.eye(d, 2, dtype=F64), frame(d, 4, seed=9)):
        assert energy_p_value(x, axis, 0.0) > 1e-3


def test_whole_space() -> None:
    """With k = d the energy is one whatever κ: uniform draws."""
    x = sample(frame(4, 4), 50.0, DRAWS, generator=rng(6))
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(DRAWS, dtype=F64), rtol=0, atol=1e-12)
    assert energy_p_value(x, torch.eye(4, 1, dtype=F64), 0.0) > 1e-3


@pytest.mark.parametrize("concentration", [3.0, torch.tensor([3.0, 1.0])])
def test_generator_and_dtype(concentration: Tensor | float) -> None:
    U = frame(10, 2, dtype=torch.float32)
    x = sample(U, concentration, 7, generator=rng(7))
    assert x.dtype == torch.float32
    assert x.shape == (7, 10)
    assert torch.equal(x, sample(U, concentration, 7, generator=rng(7)))
    assert not torch.equal(x, sample(U, concentration, 7, generator=rng(8)))
    assert sample(U, concentration, 1000, generator=rng(7)).unique(dim=0).shape[0] == 1000


def test_scalar_tensor_is_a_number() -> None:
    U = frame(6, 2)
    got = sample(U, torch.tensor(2.5), 5, generator=rng(8))
    assert torch.equal(got, sample(U, 2.5, 5, generator=rng(8)))


@pytest.mark.parametrize(
    ("concentration", "message"),
    [
        (-1.0, "concentration must be a finite number >= 0, got -1.0"),
        (math.nan, "concentration must be a finite number >= 0, got nan"),
        (torch.ones(3), r"concentration must be a number or have shape \(2,\), got \(3,\)"),
        (torch.tensor([1.0, math.inf]), "concentration holds 1 non-finite value of 2"),
    ],
)
def test_bad_concentration(concentration: Tensor | float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(frame(6, 2), concentration, 5)


def test_bad_frame_and_count() -> None:
    with pytest.raises(ValueError, match=r"frame must have shape .*k <= d, got \(2, 6\)"):
        sample(torch.zeros(2, 6), 1.0, 5)
    with pytest.raises(ValueError, match=r"frame must have shape \(d, k\), got \(1, 6, 2\)"):
        sample(frame(6, 2).unsqueeze(0), 1.0, 5)
    with pytest.raises(ValueError, match="num must be an integer >= 1, got 0"):
        sample(frame(6, 2), 1.0, 0)
