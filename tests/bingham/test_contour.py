"""log Z of any spectrum: closed forms, the rules a normaliser obeys, and Monte Carlo for the linear term."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grmoe.bingham import log_kummer, log_normalizer, mean_energy, monte_carlo
from grmoe.bingham.contour import stirling_remainder

F64 = torch.float64
mp = mpmath.mp.clone()
mp.dps = 50


def log_z(
    eigenvalues: Sequence[float], counts: Sequence[int], linear: Sequence[float] | None = None
) -> float:
    gamma = None if linear is None else torch.tensor(linear, dtype=F64)
    return float(log_normalizer(torch.tensor(eigenvalues, dtype=F64), counts, gamma))


# A spectrum: up to five eigenvalues with their multiplicities and linear terms, d ≥ 2.
spectra = st.lists(
    st.tuples(st.floats(-50, 50), st.integers(0, 5), st.floats(0, 20)), min_size=1, max_size=5
).filter(lambda rows: sum(m for _, m, _ in rows) >= 2)


# --------------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize(
    ("spectrum", "log_c"), [((1.0, 3.0, 5.0), 0.02872325178559), ((1.0, 2.0, 3.0), 0.6619056474084)]
)
def test_known_values_on_the_sphere(spectrum: tuple[float, ...], log_c: float) -> None:
    """c(λ) = ∫ exp(−Σλx²) dS over S² is 4π·Z(−λ)."""
    got = log_z([-v for v in spectrum], (1, 1, 1)) + math.log(4 * math.pi)
    assert got == pytest.approx(log_c, abs=1e-13)


@pytest.mark.parametrize(("d", "k"), [(2, 1), (3, 2), (5, 4), (128, 16), (768, 48), (2048, 64), (8192, 2364)])
@pytest.mark.parametrize("kappa", [0.4, 4.2, 100.0, 1000.0, 10_000.0])
def test_two_eigenvalues_are_kummer(d: int, k: int, kappa: float) -> None:
    truth = mp.log(mp.hyp1f1(mp.mpf(k) / 2, mp.mpf(d) / 2, mp.mpf(kappa)))
    error = float(abs(mp.mpf(log_z((kappa, 0.0), (k, d - k))) - truth))
    assert error <= max(1e-13, 1e-15 * kappa)  # what the docstring promises; half of it was seen
    assert log_z((kappa, 0.0), (k, d - k)) == pytest.approx(float(log_kummer(k, d, kappa)), rel=1e-13)


@given(
    values=st.lists(st.integers(-20, 20), min_size=2, max_size=6, unique=True),
    size=st.sampled_from((0.1, 1.0, 5.0)),
)
def test_pairs_are_a_sum_of_residues(values: list[int], size: float) -> None:
    """With every multiplicity two the integrand has simple poles: Z = Γ(d/2) Σ_j e^{λ_j}/Π(λ_j−λ_i)."""
    spectrum = [size * v for v in values]
    exact = [mp.mpf(v) for v in spectrum]
    terms = (mp.exp(a) / mp.fprod(a - b for j, b in enumerate(exact) if j != i) for i, a in enumerate(exact))
    truth = mp.log(mp.gamma(len(exact)) * mp.fsum(terms))
    assert float(abs(mp.mpf(log_z(spectrum, [2] * len(spectrum))) - truth)) <= 1e-11


@pytest.mark.parametrize("d", [2, 3, 8, 32, 768])
@pytest.mark.parametrize("gamma", [1e-3, 1.0, 30.0, 1000.0])
def test_linear_alone_is_von_mises_fisher(d: int, gamma: float) -> None:
    nu, g = mp.mpf(d) / 2 - 1, mp.mpf(gamma)
    truth = mp.log(mp.gamma(mp.mpf(d) / 2) * (2 / g) ** nu * mp.besseli(nu, g))
    assert float(abs(mp.mpf(log_z([0.0], [d], [gamma])) - truth)) <= 1e-11
    # The same vector split over two eigenspaces of the same eigenvalue.
    assert float(abs(mp.mpf(log_z([0.0, 0.0], [1, d - 1], [0.6 * gamma, 0.8 * gamma])) - truth)) <= 1e-11


def test_stirling_remainder() -> None:
    for h in (0.5, 1.0, 2.5, 19.5, 20.0, 64.0, 4096.0):
        exact = mp.loggamma(h) - ((mp.mpf(h) - 0.5) * mp.log(h) - mp.mpf(h) + mp.log(2 * mp.pi) / 2)
        # Below 20 it is a difference of numbers near 30, above it the series ends at its sixth term.
        assert stirling_remainder(h) == pytest.approx(float(exact), abs=2e-14)


# --------------------------------------------------------------------------------------------------- rules


@given(rows=spectra, shift=st.floats(-200, 200), with_linear=st.booleans())
def test_shift(rows: list[tuple[float, int, float]], shift: float, with_linear: bool) -> None:
    values, counts, gammas = zip(*rows, strict=True)
    linear = gammas if with_linear else None
    moved = log_z([v + shift for v in values], counts, linear)
    assert moved == pytest.approx(log_z(values, counts, linear) + shift, abs=1e-11)


@given(rows=spectra, with_linear=st.booleans(), order=st.randoms(use_true_random=False))
def test_order_of_eigenvalues_does_not_matter(
    rows: list[tuple[float, int, float]], with_linear: bool, order: object
) -> None:
    shuffled = rows.copy()
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    results = []
    for version in (rows, shuffled):
        values, counts, gammas = zip(*version, strict=True)
        results.append(log_z(values, counts, gammas if with_linear else None))
    assert results[0] == pytest.approx(results[1], abs=1e-11)


@given(rows=spectra, with_linear=st.booleans())
def test_multiplicity_is_repetition(rows: list[tuple[float, int, float]], with_linear: bool) -> None:
    values, counts, gammas = zip(*rows, strict=True)
    repeated = [v for v, m, _ in rows for _ in range(m)]
    # γ's norm in an eigenspace is what counts, however it lies there.
    spread = [g / math.sqrt(m) for _, m, g in rows for _ in range(m)]
    got = log_z(values, counts, gammas if with_linear else None)
    assert got == pytest.approx(
        log_z(repeated, [1] * len(repeated), spread if with_linear else None), abs=1e-11
    )


@given(rows=spectra, with_linear=st.booleans(), absent=st.floats(-1e4, 1e4))
def test_zero_multiplicity_is_absent(
    rows: list[tuple[float, int, float]], with_linear: bool, absent: float
) -> None:
    values, counts, gammas = zip(*rows, strict=True)
    linear = gammas if with_linear else None
    more = (*gammas, 7.0) if with_linear else None
    assert log_z((*values, absent), (*counts, 0), more) == pytest.approx(
        log_z(values, counts, linear), abs=1e-11
    )


@given(rows=spectra, with_linear=st.booleans())
def test_bounds_and_energies(rows: list[tuple[float, int, float]], with_linear: bool) -> None:
    """λ_min ≤ log Z − (linear part) ≤ λ_max, and Σ_j ∂log Z/∂λ_j = E‖x‖² = 1 with every share positive."""
    values, counts, gammas = zip(*rows, strict=True)
    eigenvalues = torch.tensor(values, dtype=F64, requires_grad=True)
    linear = torch.tensor(gammas, dtype=F64) if with_linear else None
    value = log_normalizer(eigenvalues, counts, linear)
    present = [v for v, m, _ in rows if m]
    reach = math.sqrt(sum(g * g for _, m, g in rows if m)) if with_linear else 0.0
    assert min(present) - 1e-10 <= value.item() <= max(present) + reach + 1e-10
    (energy,) = torch.autograd.grad(value, eigenvalues)
    assert float(energy.sum()) == pytest.approx(1.0, abs=1e-11)
    for share, m in zip(energy.tolist(), counts, strict=True):
        assert share == 0 if m == 0 else share > 0


def test_energy_of_one_subspace() -> None:
    eigenvalues = torch.tensor([4.2, 0.0], dtype=F64, requires_grad=True)
    (energy,) = torch.autograd.grad(log_normalizer(eigenvalues, (48, 720)), eigenvalues)
    assert float(energy[0]) == pytest.approx(0.0631453440167, abs=1e-13)
    assert float(energy[0]) == pytest.approx(float(mean_energy(48, 768, 4.2)), rel=1e-12)


# ----------------------------------------------------------------------------------------- as a torch function


def test_gradients() -> None:
    eigenvalues = torch.tensor([[3.0, -1.0, 0.5], [30.0, 0.0, -20.0]], dtype=F64, requires_grad=True)
    linear = torch.tensor([[0.7, 2.0, 0.3], [5.0, 0.1, 9.0]], dtype=F64, requires_grad=True)
    for counts in ((1, 1, 1), (4, 2, 10)):
        plain = lambda e, c=counts: log_normalizer(e, c)  # noqa: E731
        full = lambda e, l, c=counts: log_normalizer(e, c, l)  # noqa: E731
        assert torch.autograd.gradcheck(plain, (eigenvalues,))
        assert torch.autograd.gradgradcheck(plain, (eigenvalues,))
        assert torch.autograd.gradcheck(full, (eigenvalues, linear))
        assert torch.autograd.gradgradcheck(full, (eigenvalues, linear))


def test_zero_linear_term_is_none() -> None:
    eigenvalues = torch.tensor([3.0, -1.0, 0.5], dtype=F64)
    zero = torch.zeros(3, dtype=F64, requires_grad=True)
    value = log_normalizer(eigenvalues, (2, 3, 4), zero)
    torch.testing.assert_close(value, log_normalizer(eigenvalues, (2, 3, 4)), rtol=1e-14, atol=0)
    (slope,) = torch.autograd.grad(value, zero)
    assert torch.equal(slope, torch.zeros(3, dtype=F64))  # Z is even in γ


def test_batch_dtype_and_device() -> None:
    g = torch.Generator().manual_seed(0)
    eigenvalues, linear = torch.randn(2, 4, 3, generator=g) * 10, torch.rand(2, 4, 3, generator=g)
    counts = torch.tensor([1, 3, 5])
    batched = log_normalizer(eigenvalues, counts, linear)
    assert batched.dtype == torch.float32
    assert batched.shape == (2, 4)
    for i in range(2):
        for j in range(4):
            single = log_normalizer(eigenvalues[i, j].double(), [1, 3, 5], linear[i, j].double())
            assert float(batched[i, j]) == pytest.approx(float(single), rel=1e-6)  # one rounding to fp32
    on_meta = log_normalizer(eigenvalues.to("meta"), [1, 3, 5], linear.to("meta"))  # nothing is read
    assert on_meta.shape == (2, 4)
    mapped = torch.vmap(lambda e, l: log_normalizer(e, [1, 3, 5], l))(eigenvalues, linear)
    torch.testing.assert_close(mapped, batched)
    compiled = torch.compile(lambda e, l: log_normalizer(e, (1, 3, 5), l), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(eigenvalues, linear), batched)


# ---------------------------------------------------------------------------------------------- Monte Carlo


@pytest.mark.parametrize(
    ("spectrum", "counts", "linear"),
    [
        ((1.0, -2.0, 0.5), (1, 1, 1), (1.5, 0.3, 2.0)),
        ((3.0, -1.0), (3, 5), (2.0, 4.0)),
        ((6.0, 0.0, -3.0), (4, 20, 8), (1.0, 3.0, 0.5)),
    ],
)
def test_linear_term_against_monte_carlo(
    spectrum: tuple[float, ...], counts: tuple[int, ...], linear: tuple[float, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    eigenvalues, gamma = torch.tensor(spectrum, dtype=F64), torch.tensor(linear, dtype=F64)
    estimate, error = monte_carlo(eigenvalues, counts, gamma, samples=300_000, generator=generator)
    assert 0 < error < 0.02  # so that four of them say something
    assert abs(log_z(spectrum, counts, linear) - estimate) < 4 * error
    assert abs(log_z(spectrum, counts) - estimate) > 4 * error  # the linear term is seen


def test_against_points_of_the_sphere() -> None:
    """Independent of `monte_carlo`: plain Gaussian directions and an explicit matrix A and vector γ."""
    g = torch.Generator().manual_seed(1)
    d, counts, spectrum = 6, (2, 3, 1), (2.0, -1.0, 4.0)
    Q = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=F64)).Q
    A = (Q * torch.tensor([2.0, 2.0, -1.0, -1.0, -1.0, 4.0], dtype=F64)) @ Q.T
    vector = torch.randn(d, generator=g, dtype=F64)
    parts = (vector @ Q).split(counts)
    x = torch.randn(300_000, d, generator=g, dtype=F64)
    x = x / x.norm(dim=-1, keepdim=True)
    weight = torch.exp(((x @ A) * x).sum(-1) + x @ vector)
    truth = math.exp(log_z(spectrum, counts, [float(p.norm()) for p in parts]))
    assert abs(float(weight.mean()) - truth) < 4 * float(weight.std()) / math.sqrt(len(x))


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("eigenvalues", "counts", "linear", "message"),
    [
        (torch.tensor([1, 2]), [1, 1], None, "eigenvalues must be a floating-point tensor, got torch.int64"),
        (torch.ones(3), [1, 1], None, r"one count for each of the 3 eigenvalues, got \[1, 1\]"),
        (torch.tensor(1.0), [], None, r"one count for each of the 0 eigenvalues, got \[\]"),
        (torch.ones(2), [3, -1], None, r"multiplicities must sum to d >= 2, got \[3, -1\]"),
        (torch.ones(2), [1, 0], None, r"multiplicities must sum to d >= 2, got \[1, 0\]"),
        (torch.ones(2), [1, 2], torch.ones(3), r"linear must have shape \(\.\.\., 2\), got \(3,\)"),
        (torch.ones(2), [1, 2], torch.tensor([1, 2]), "linear must be a floating-point tensor"),
    ],
)
def test_bad_input(eigenvalues: Tensor, counts: list[int], linear: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        log_normalizer(eigenvalues, counts, linear)


@pytest.mark.parametrize("ratio", [0.1, 1.0, 1.5, 1.9, 2.0, 2.1, 4.0])
@pytest.mark.parametrize("kappa", [3.0, 30.0, 100.0, 1000.0])
def test_a_linear_term_across_the_subspace(kappa: float, ratio: float) -> None:
    """On the circle Z is the mean of exp(κ cos²θ + γ sin θ). A parabola as without the term was wrong by 97 nats."""
    gamma = ratio * kappa
    place = mp.asin(min(1, mp.mpf(ratio) / 2))  # of the peak, and its width is at least κ^(−1/2)
    peak = kappa * mp.cos(place) ** 2 + gamma * mp.sin(place)
    around = [place + mp.mpf(i) / 2 for i in range(-6, 7)]
    total = mp.quad(lambda t: mp.exp(kappa * mp.cos(t) ** 2 + gamma * mp.sin(t) - peak), around, maxdegree=9)
    rest = mp.quad(
        lambda t: mp.exp(kappa * mp.cos(t) ** 2 + gamma * mp.sin(t) - peak),
        [place + 3, place + 2 * mp.pi - 3],
    )
    truth = mp.log((total + rest) / (2 * mp.pi)) + peak
    values = torch.tensor([kappa, 0.0], dtype=F64, requires_grad=True)
    found = log_normalizer(values, (1, 1), torch.tensor([0.0, gamma], dtype=F64))
    assert float(abs(mp.mpf(found.item()) - truth)) <= 1e-11 * max(1.0, float(peak))
    found.backward()
    assert values.grad is not None
    assert float(values.grad.min()) >= -1e-9  # mean energies
    assert float(values.grad.sum()) == pytest.approx(1, abs=1e-9)
