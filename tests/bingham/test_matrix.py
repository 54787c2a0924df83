"""The matrix Bingham distribution of frames: its normaliser, density and sampler against independent computations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grmoe.bingham import log_normalizer, matrix, mean_energy
from grmoe.geometry import haar_frames

F64 = torch.float64
SPECTRUM = torch.tensor([3.0, 2.0, 1.0, 0.5, -0.5], dtype=F64)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthogonal(d: int, seed: int = 1) -> Tensor:
    return haar_frames(d, d, generator=rng(seed), dtype=F64)


def spiked(kappa: float, rank: int, d: int) -> Tensor:
    return torch.cat([torch.full((rank,), kappa), torch.zeros(d - rank)]).double()


# ------------------------------------------------------------------------------------------------ the normaliser


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_zonal_polynomials_of_a_degree_sum_to_the_power_of_the_trace(degree: int) -> None:
    """Σ_κ C_κ(X) = (tr X)ⁿ, which fixes their normalisation; and J_(1ⁿ) = n!·e_n, J is symmetric."""
    x = (0.3, 1.1, 0.7)
    total = 0.0
    for kappa in matrix._partitions(degree, 3):
        zonal = matrix._coefficient(kappa, 1e300, 1e300) * math.factorial(degree)  # (a)_κ/(c)_κ = 1
        total += zonal * matrix._jack(kappa, x, 3, {})
        assert matrix._jack(kappa, x, 3, {}) == pytest.approx(matrix._jack(kappa, x[::-1], 3, {}), rel=1e-12)
    assert total == pytest.approx(sum(x) ** degree, rel=1e-12)
    assert matrix._jack((1, 1), x, 3, {}) == pytest.approx(2 * (0.3 * 1.1 + 0.3 * 0.7 + 1.1 * 0.7), rel=1e-12)


@pytest.mark.parametrize("d", [3, 5])
def test_one_column_is_the_vector_bingham(d: int) -> None:
    """Also d−1 columns: the complement of a line. And the series itself, without that identity."""
    values = SPECTRUM[:d]
    vector = float(log_normalizer(values, [1] * d))
    assert matrix.log_normalizer_series(values, 1) == pytest.approx(vector, abs=1e-12)
    complement = float(values.sum() + log_normalizer(-values, [1] * d))
    assert matrix.log_normalizer_series(values, d - 1) == pytest.approx(complement, abs=1e-12)
    assert matrix.log_normalizer_series(values, d) == pytest.approx(float(values.sum()), abs=1e-12)
    if d == 3:
        assert matrix._series(values, 2, 1e-14) == pytest.approx(complement, abs=1e-12)


def test_rank_and_multiplicity_can_be_exchanged() -> None:
    """E exp(κ‖P_rU‖²) is the same for k-frames and an r-projector as for r-frames and a k-projector."""
    ours = matrix.log_normalizer_series(spiked(2.5, 1, 6), 2)
    assert ours == pytest.approx(matrix.log_normalizer_series(spiked(2.5, 2, 6), 1), abs=1e-12)
    assert matrix.log_normalizer_series(-spiked(1.5, 2, 6), 3) == pytest.approx(
        matrix.log_normalizer_series(-spiked(1.5, 3, 6), 2), abs=1e-12
    )


@pytest.mark.parametrize(("values", "rank"), [(SPECTRUM, 2), (spiked(2.0, 3, 6), 3)])
def test_series_against_monte_carlo(values: Tensor, rank: int) -> None:
    estimate, error = matrix.log_normalizer_monte_carlo(values, rank, 20_000, rng())
    assert error < 0.01
    assert matrix.log_normalizer_series(values, rank) == pytest.approx(estimate, abs=4 * error)


@pytest.mark.parametrize(("d", "k"), [(3, 1), (64, 1), (6, 2), (20, 2), (12, 3), (64, 3)])
def test_the_laplace_approximation_is_good_to_a_percent(d: int, k: int) -> None:
    assert float(matrix.log_normalizer_laplace(torch.tensor([1.0, 1.0]), [k, d - k], k)) == pytest.approx(k)
    for share in (1 / 16, 1 / 8):
        values = torch.tensor([0.3 + share * d, 0.3], dtype=F64)
        exact = matrix.log_normalizer_series(spiked(share * d, k, d) + 0.3, k)
        found = float(matrix.log_normalizer_laplace(values, [k, d - k], k))
        assert 1e-9 < abs(math.expm1(found - exact)) < (0.002 if share < 0.1 else 0.01)


def test_the_laplace_approximation_says_where_it_ends() -> None:
    with pytest.raises(ValueError, match=r"all but min\(k, d−k\) = 2, got 3 others"):
        matrix.log_normalizer_laplace(torch.tensor([1.0, 0.0]), [3, 5], 2)
    with pytest.raises(ValueError, match=r"all but min\(k, d−k\) = 1, got 2"):
        matrix.log_normalizer_laplace(torch.tensor([1.0, 0.0]), [2, 4], 5)
    with pytest.raises(ValueError, match=r"differ by at most d/8 = 2 .* got 3"):
        matrix.log_normalizer_laplace(torch.tensor([3.0, 0.0]), [2, 14], 2)
    matrix.log_normalizer_laplace(torch.tensor([1.0, -1.0, 0.0]), [1, 1, 14], 2)


# ------------------------------------------------------------------------------------------ density and sampler


def test_the_density_sees_subspaces_and_averages_to_one() -> None:
    M, U = orthogonal(5), haar_frames(5, 2, 20_000, generator=rng(2), dtype=F64)
    log_p = matrix.log_density(U, SPECTRUM, M)
    A = M @ torch.diag(SPECTRUM) @ M.T
    for i in range(3):
        assert float(log_p[i]) == pytest.approx(float(torch.trace(A @ U[i] @ U[i].T)), rel=1e-12)
    O = haar_frames(2, 2, 20_000, generator=rng(3), dtype=F64)
    torch.testing.assert_close(matrix.log_density(U @ O, SPECTRUM, M), log_p, rtol=0, atol=1e-12)
    density = (log_p - matrix.log_normalizer_series(SPECTRUM, 2)).exp()
    assert float(density.mean()) == pytest.approx(1.0, abs=4 * float(density.std()) / math.sqrt(len(density)))
    # The mode is the span of the first k columns of M.
    assert float(matrix.log_density(M[:, :2], SPECTRUM, M)) == pytest.approx(5.0)
    assert float(log_p.max()) < 5.0


def test_sampled_frames_have_the_moments_of_the_density() -> None:
    """E UUᵀ by importance sampling of uniform frames, and on its diagonal ∂log Z/∂λ by differences of the series."""
    M, S = orthogonal(5), 2000
    U = matrix.sample_frames(SPECTRUM, M, 2, S, sweeps=12, generator=rng(4))
    assert U.shape == (S, 5, 2)
    assert float((U.mT @ U - torch.eye(2)).abs().max()) < 1e-10
    found = M.T @ (U @ U.mT) @ M
    error = found.std(0) / math.sqrt(S)
    uniform = haar_frames(5, 2, 20_000, generator=rng(5), dtype=F64)
    weight = matrix.log_density(uniform, SPECTRUM, M).softmax(0)
    inside = M.T @ (uniform @ uniform.mT) @ M
    wanted = (weight[:, None, None] * inside).sum(0)
    spread = (weight[:, None, None].square() * (inside - wanted).square()).sum(0).sqrt()
    assert bool(((found.mean(0) - wanted).abs() < 4.5 * (error + spread)).all())
    # U and UO have the same distribution: no column is special, and no sign.
    first, second = (torch.einsum("sd,se->sde", U[..., j], U[..., j]) for j in (0, 1))
    apart = (first - second).mean(0).abs()
    assert bool((apart < 4.5 * (first - second).std(0) / math.sqrt(S)).all())
    assert bool((U.mean(0).abs() < 4.5 * U.std(0) / math.sqrt(S)).all())
    for i in range(5):
        up, down = (SPECTRUM + sign * 1e-4 * torch.eye(5, dtype=F64)[i] for sign in (1, -1))
        slope = (matrix.log_normalizer_series(up, 2) - matrix.log_normalizer_series(down, 2)) / 2e-4
        assert abs(float(found.mean(0)[i, i]) - slope) < 4.5 * float(error[i, i])
    assert float((wanted.diagonal() - 0.4).abs().max()) > 0.1  # far from uniform


def test_one_column_is_drawn_exactly() -> None:
    values, M = spiked(30.0, 2, 6), orthogonal(6)
    x = matrix.sample_frames(values, M, 1, 4000, sweeps=1, generator=rng(6)).squeeze(-1)
    energy = (x @ M[:, :2]).square().sum(-1)
    wanted = float(mean_energy(2, 6, 30.0))
    assert float(energy.mean()) == pytest.approx(wanted, abs=4 * float(energy.std()) / math.sqrt(4000))
    full = matrix.sample_frames(values, M, 6, 2, generator=rng())
    assert float((full.mT @ full - torch.eye(6)).abs().max()) < 1e-10


def test_mistakes_are_named() -> None:
    M = orthogonal(5)
    with pytest.raises(ValueError, match=r"frames must have shape \(\.\.\., 5, k\) with 5 eigenvalues"):
        matrix.log_density(haar_frames(4, 2), SPECTRUM, M)
    with pytest.raises(ValueError, match=r"orientation must have shape \(5, 5\), got \(4, 4\)"):
        matrix.log_density(haar_frames(5, 2).double(), SPECTRUM, orthogonal(4))
    with pytest.raises(ValueError, match="orientation must be orthogonal"):
        matrix.sample_frames(SPECTRUM, 2 * M, 2, 3)
    with pytest.raises(ValueError, match=r"eigenvalues must have shape \(d,\)"):
        matrix.log_normalizer_series(SPECTRUM[None], 1)
    with pytest.raises(ValueError, match="rank must be at most dim = 5, got 6"):
        matrix.log_normalizer_series(SPECTRUM, 6)
    with pytest.raises(ValueError, match=r"series of 2 parts, got λ_1 − λ_d = 60: it needs more than 50"):
        matrix.log_normalizer_series(spiked(60.0, 2, 4), 2)
