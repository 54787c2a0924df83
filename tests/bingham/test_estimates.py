"""Kume–Wood against its textbook formula, Monte Carlo against its own error bar."""

from __future__ import annotations

import itertools
import math

import mpmath
import pytest
import torch

from grmoe.bingham import kume_wood, log_kummer, log_normalizer, monte_carlo, printed
from grmoe.bingham.contour import stirling_remainder

F64 = torch.float64
mp = mpmath.mp.clone()
mp.dps = 50


def textbook(spectrum: list[float], order: int) -> mpmath.mpf:
    """log ĉ(λ) of Kume & Wood (2005) for c(λ) = ∫ exp(−Σλx²) dS, term by term as it is printed."""
    values = [mp.mpf(v) for v in spectrum]
    d = len(values)
    low, high = min(values) - mp.mpf(d) / 2 - 1, min(values) - mp.mpf("1e-6")
    t = mp.findroot(lambda s: mp.fsum(1 / (v - s) for v in values) / 2 - 1, (low, high), solver="anderson")
    # Cumulant derivatives K⁽ⁿ⁾(t̂) = ½ (n−1)! Σ (λ−t̂)^(−n).
    k2, k3, k4 = (mp.factorial(n - 1) / 2 * mp.fsum((v - t) ** -n for v in values) for n in (2, 3, 4))
    log_c = mp.log(2) / 2 + mp.mpf(d - 1) / 2 * mp.log(mp.pi) - mp.log(k2) / 2 - t
    log_c -= mp.fsum(mp.log(v - t) for v in values) / 2
    if order == 3:
        log_c += k4 / k2**2 / 8 - 5 * (k3**2 / k2**3) / 24
    return log_c


@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize(
    "spectrum", [[1.0, 3.0, 5.0], [1.0, 2.0, 3.0], [0.0, 0.0, 10.0], [-3.0, 0.5, 0.5, 2.0, 8.0, 20.0]]
)
def test_textbook_formula(spectrum: list[float], order: int) -> None:
    d = len(spectrum)
    log_area = math.log(2) + d / 2 * math.log(math.pi) - math.lgamma(d / 2)
    got = float(kume_wood(-torch.tensor(spectrum, dtype=F64), [1] * d, order)) + log_area
    assert got == pytest.approx(float(textbook(spectrum, order)), abs=1e-12)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("spectrum", [[1.0, 3.0, 5.0], [-3.0, 0.5, 0.5, 2.0, 8.0, 20.0]])
def test_the_formula_of_the_appendix_as_it_is_printed(spectrum: list[float], factor: int) -> None:
    """(2π)^(d/2) |Λ*|^(−1/2) exp(tr ΛΛ*⁻¹) with matrices, Λ* = factor·(ŝI − Λ), over the area of the sphere."""
    values, d = [mp.mpf(v) for v in spectrum], len(spectrum)
    s = mp.findroot(
        lambda t: mp.fsum(1 / (t - v) for v in values) / 2 - 1,
        (max(values) + 0.1, max(values) + d),
        solver="anderson",
    )
    Lambda, star = mp.diag(values), mp.diag([factor * (s - v) for v in values])
    trace = mp.fsum((Lambda * star**-1)[i, i] for i in range(d))
    log_c = mp.mpf(d) / 2 * mp.log(2 * mp.pi) - mp.log(mp.det(star)) / 2 + trace
    log_area = mp.log(2) + mp.mpf(d) / 2 * mp.log(mp.pi) - mp.loggamma(mp.mpf(d) / 2)
    got = float(printed(torch.tensor(spectrum, dtype=F64), [1] * d, factor))
    assert got == pytest.approx(float(log_c - log_area), abs=1e-10)


def test_the_gradient_of_the_appendix_formula() -> None:
    """Against a difference quotient: the saddle moves with κ."""
    for factor in (1, 2):
        x = torch.tensor(20.0, dtype=F64, requires_grad=True)

        def value(kappa: torch.Tensor, factor: int = factor) -> torch.Tensor:
            return printed(torch.stack([kappa, torch.zeros_like(kappa)]), (16, 112), factor)

        (gradient,) = torch.autograd.grad(value(x), x)
        step = (value(x.detach() + 1e-4) - value(x.detach() - 1e-4)) / 2e-4
        assert float(gradient) == pytest.approx(float(step), rel=1e-7)


@pytest.mark.parametrize("kappa", [1.0, 10.0, 100.0, 1000.0])
def test_third_order_is_better(kappa: float) -> None:
    truth = float(log_kummer(16, 128, kappa))
    spectrum = torch.tensor([kappa, 0.0], dtype=F64)
    first, third = (abs(float(kume_wood(spectrum, (16, 112), order)) - truth) for order in (1, 3))
    assert third < first / 3
    assert third < 5e-4
    assert first < 0.02


def test_error_shrinks_with_the_dimension() -> None:
    """With the shape of the spectrum kept, order 1 errs like 1/d and order 3 like 1/d²: factors 4 and 16."""
    errors = []
    for d in (16, 64, 256, 1024):
        counts = (d // 8, d - d // 8)
        spectrum = torch.tensor([d / 10, 0.0], dtype=F64)
        truth = float(log_normalizer(spectrum, counts))
        errors.append([abs(float(kume_wood(spectrum, counts, order)) - truth) for order in (1, 3)])
    for before, after in itertools.pairwise(errors):
        assert 3.9 < before[0] / after[0] < 4.2
        assert 12 < before[1] / after[1] < 18


@pytest.mark.parametrize("order", [1, 3])
def test_kume_wood_gradient(order: int) -> None:
    """The saddle moves with the spectrum, and unlike the exact integral the approximation feels it."""
    spectrum = torch.tensor([[3.0, -1.0, 0.5], [30.0, 0.0, -20.0]], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: kume_wood(s, (4, 2, 10), order), (spectrum,))


def test_kume_wood_details() -> None:
    spectrum = torch.tensor([[4.0, -1.0, 0.0], [1.0, 2.0, 9.0]])
    value = kume_wood(spectrum, (2, 3, 4))
    assert value.dtype == torch.float32
    assert value.shape == (2,)
    for order in (1, 3):
        wide = spectrum.double()
        shifted = kume_wood(wide + 7.5, (2, 3, 4), order)
        torch.testing.assert_close(shifted, kume_wood(wide, (2, 3, 4), order) + 7.5, rtol=0, atol=1e-12)
    # Without concentration Z = 1, and order 1 misses it by Stirling's remainder of Γ(d/2).
    assert float(kume_wood(torch.zeros(1, dtype=F64), [9])) == pytest.approx(
        stirling_remainder(4.5), abs=1e-14
    )
    with pytest.raises(ValueError, match="order must be one of 1, 3, got 2"):
        kume_wood(spectrum, (2, 3, 4), 2)
    with pytest.raises(ValueError, match=r"multiplicities must sum to d >= 2, got \[1, 0, 0\]"):
        kume_wood(spectrum, (1, 0, 0))


def test_monte_carlo_error_bar_is_calibrated() -> None:
    generator = torch.Generator().manual_seed(0)
    spectrum, counts = torch.tensor([4.0, 0.0, -2.0], dtype=F64), (4, 11, 1)
    linear = torch.tensor([1.0, 0.5, 0.2], dtype=F64)
    for gamma in (None, linear):
        truth = float(log_normalizer(spectrum, counts, gamma))
        z = []
        for _ in range(200):
            estimate, error = monte_carlo(spectrum, counts, gamma, samples=2000, generator=generator)
            z.append((estimate - truth) / error)
        # Of 200 standard normals the mean square has standard deviation 0.1, the mean 0.07: four of each.
        assert 0.6 < sum(v * v for v in z) / len(z) < 1.4
        assert abs(sum(z) / len(z)) < 0.3


def test_monte_carlo_counts_and_seeds() -> None:
    spectrum = torch.tensor([3.0, 50.0, 0.0], dtype=F64)
    run = lambda seed: monte_carlo(  # noqa: E731
        spectrum, (3, 0, 5), samples=300_000, generator=torch.Generator().manual_seed(seed)
    )
    assert run(0) == run(0)
    assert run(0) != run(1)
    estimate, error = run(0)  # more than one chunk, and an eigenvalue that does not occur
    assert abs(estimate - float(log_kummer(3, 8, 3.0))) < 4 * error


def test_monte_carlo_is_useless_when_concentrated() -> None:
    """Why it validates and does not compute: at (128, 16) no sample reaches the region that carries Z."""
    generator = torch.Generator().manual_seed(0)
    relative = {}
    for kappa in (10.0, 1000.0):
        spectrum = torch.tensor([kappa, 0.0], dtype=F64)
        estimate, _ = monte_carlo(spectrum, (16, 112), samples=100_000, generator=generator)
        relative[kappa] = abs(math.expm1(estimate - float(log_kummer(16, 128, kappa))))
    assert relative[10.0] < 0.02
    assert relative[1000.0] > 0.5


def test_monte_carlo_bad_input() -> None:
    with pytest.raises(ValueError, match=r"eigenvalues must have shape \(J,\), got \(2, 3\)"):
        monte_carlo(torch.zeros(2, 3), (1, 1, 1))
    with pytest.raises(ValueError, match="samples must be an integer >= 2, got 1"):
        monte_carlo(torch.zeros(3), (1, 1, 1), samples=1)
