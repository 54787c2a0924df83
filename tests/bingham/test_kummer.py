"""log ₁F₁ and its derivative against mpmath at 50 digits, and as a differentiable torch function."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from grmoe.bingham import log_kummer, log_kummer_reference, mean_energy

F64 = torch.float64
mp = mpmath.mp.clone()
mp.dps = 50

LARGE = [(128, 16), (768, 48), (2048, 64)]
SMALL = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (5, 4), (16, 16)]
KAPPAS = [0.4, 1.0, 4.2, 10.0, 100.0, 1000.0]
CASES = [(d, k, kappa) for d, k in LARGE + SMALL for kappa in KAPPAS] + [(8192, 64, 1e4)]
# A small subspace of a large space takes over from the rest near κ = d/2. One parabola for all was wrong by 214 nats.
CASES += [
    (d, k, d * share) for d in (100, 768, 1024) for k in (1, 2, 4) for share in (0.5, 0.55, 0.7, 0.9, 3.0)
]


def exact(k: int, d: int, kappa: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """log Z and E‖Px‖²."""
    a, b, x = mp.mpf(k) / 2, mp.mpf(d) / 2, mp.mpf(kappa)
    Z = mp.hyp1f1(a, b, x)
    return mp.log(Z), a / b * mp.hyp1f1(a + 1, b + 1, x) / Z


def relative(value: torch.Tensor | float, truth: mpmath.mpf) -> float:
    return float(abs(mp.mpf(float(value)) / truth - 1))


@pytest.mark.parametrize(("d", "k", "kappa"), CASES)
def test_normaliser_and_gradient(d: int, k: int, kappa: float) -> None:
    log_z, energy = exact(k, d, kappa)
    x = torch.tensor(kappa, dtype=F64, requires_grad=True)
    value = log_kummer(k, d, x)
    (gradient,) = torch.autograd.grad(value, x)
    assert float(abs(mp.mpf(value.item()) - log_z)) <= 1e-11  # relative error of Z
    assert relative(value.detach(), log_z) <= 1e-11  # relative error of log Z
    assert relative(gradient, energy) <= 1e-11
    assert relative(mean_energy(k, d, kappa), energy) <= 1e-11
    if k == d:
        assert value.item() == pytest.approx(kappa, rel=1e-13)  # Z = e^κ


@pytest.mark.parametrize(
    ("k", "d", "kappa", "log_z"),
    [
        (1, 3, 1.0, 0.38025105262664977),
        (48, 768, 4.2, 0.2638509058926054),
        (16, 128, 10.0, 1.340956035010131),
        (64, 2048, 1000.0, 70.62939245908881),
        (64, 8192, 1e4, 2445.300039780177),
    ],
)
def test_known_values(k: int, d: int, kappa: float, log_z: float) -> None:
    assert float(log_kummer(k, d, kappa)) == pytest.approx(log_z, rel=1e-12)
    # The series adds up to κ terms of one sign, each carrying n roundings: n·eps at worst.
    assert log_kummer_reference(k, d, kappa) == pytest.approx(log_z, rel=1e-11)


def test_known_energy() -> None:
    assert float(mean_energy(48, 768, 4.2)) == pytest.approx(0.0631453440167, abs=1e-13)


@given(
    d=st.integers(1, 64), data=st.data(), kappa=st.floats(0, 2000, allow_subnormal=False) | st.floats(0, 1e-3)
)
def test_agrees_with_the_series(d: int, data: st.DataObject, kappa: float) -> None:
    k = data.draw(st.integers(1, d))
    assert float(log_kummer(k, d, kappa)) == pytest.approx(
        log_kummer_reference(k, d, kappa), rel=1e-10, abs=1e-12
    )
    assert k / d - 1e-12 <= float(mean_energy(k, d, kappa)) <= 1 + 1e-12  # κ ≥ 0 pulls towards the subspace


@pytest.mark.parametrize(("d", "k"), [(3, 1), (16, 4), (768, 48)])
@pytest.mark.parametrize("kappa", [0.5, 20.0, 800.0])
def test_negative_concentration(d: int, k: int, kappa: float) -> None:
    """Kummer's transformation: ₁F₁(a; b; −κ) = e^(−κ) ₁F₁(b−a; b; κ), girdles instead of clusters."""
    got = log_kummer(k, d, torch.tensor(-kappa, dtype=F64))
    assert relative(got, exact(d - k, d, kappa)[0] - mp.mpf(kappa)) <= 1e-11


def test_zero_concentration() -> None:
    for d, k in LARGE + SMALL:
        assert abs(float(log_kummer(k, d, 0.0))) <= 1e-13
        assert float(mean_energy(k, d, 0.0)) == pytest.approx(k / d, rel=1e-13)


def test_dtypes_and_shapes() -> None:
    kappa = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)) * 50
    for dtype in (torch.float32, torch.bfloat16, F64):
        for function in (log_kummer, mean_energy):
            value = function(8, 64, kappa.to(dtype))
            assert value.dtype == dtype
            assert value.shape == (2, 3)
            # Evaluated in fp64, rounded once.
            assert torch.equal(value, function(8, 64, kappa.to(dtype).double()).to(dtype))
    assert log_kummer(8, 64, 3).dtype == F64
    assert mean_energy(8, 64, 3.0).dtype == F64
    single = kappa.clone().requires_grad_()
    log_kummer(8, 64, single).sum().backward()
    assert single.grad is not None
    torch.testing.assert_close(single.grad, mean_energy(8, 64, kappa), rtol=1e-6, atol=0)
    for i in range(2):
        for j in range(3):
            # The batch changes the order of no sum: equal up to vectorised exp and log.
            torch.testing.assert_close(
                log_kummer(8, 64, kappa)[i, j], log_kummer(8, 64, kappa[i, j]), rtol=1e-6, atol=0
            )


@pytest.mark.parametrize(("d", "k"), [(2, 1), (5, 4), (6, 6), (64, 8)])
def test_derivatives_of_every_order(d: int, k: int) -> None:
    kappa = torch.tensor([0.0, 0.7, 30.0, -4.0], dtype=F64, requires_grad=True)
    for function in (log_kummer, mean_energy):
        assert torch.autograd.gradcheck(lambda t, f=function: f(k, d, t), (kappa,))
        assert torch.autograd.gradgradcheck(lambda t, f=function: f(k, d, t), (kappa,))
    # The second derivative is the variance of the energy.
    (first,) = torch.autograd.grad(log_kummer(k, d, kappa).sum(), kappa, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), kappa)
    n = 200_001
    phi = torch.linspace(0, math.pi / 2, n, dtype=F64)
    a = phi.sin().square()
    if k < d:
        weight = phi.sin() ** (k - 1) * phi.cos() ** (d - k - 1)
        weight[0] /= 2
        weight[-1] /= 2
        p = weight * torch.exp(kappa.detach().unsqueeze(-1) * a)
        p = p / p.sum(-1, keepdim=True)
        mean = (p * a).sum(-1, keepdim=True)
        variance = (p * (a - mean).square()).sum(-1)
        torch.testing.assert_close(first.detach(), mean.squeeze(-1), rtol=1e-8, atol=0)
        torch.testing.assert_close(second, variance, rtol=1e-7, atol=0)
    else:
        torch.testing.assert_close(second, torch.zeros_like(second), rtol=0, atol=1e-11)


def test_vmap() -> None:
    kappa = torch.linspace(0, 40, 6, dtype=F64).view(2, 3)
    mapped = torch.vmap(torch.vmap(lambda t: log_kummer(4, 16, t)))(kappa)
    torch.testing.assert_close(mapped, log_kummer(4, 16, kappa), rtol=1e-14, atol=1e-14)
    gradient = torch.vmap(torch.func.grad(lambda t: log_kummer(4, 16, t)))(kappa.flatten())
    torch.testing.assert_close(gradient, mean_energy(4, 16, kappa.flatten()), rtol=1e-13, atol=0)


def test_compiles_in_one_graph() -> None:
    counter = CompileCounter()
    compiled = torch.compile(lambda t: log_kummer(4, 16, t), backend=counter, fullgraph=True)
    kappa = torch.tensor([0.5, 20.0], dtype=F64, requires_grad=True)
    value = compiled(kappa)
    torch.testing.assert_close(value, log_kummer(4, 16, kappa), rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(value.sum(), kappa)
    torch.testing.assert_close(gradient, mean_energy(4, 16, kappa.detach()), rtol=1e-13, atol=0)
    compiled(2 * kappa)
    assert counter.frame_count == 1


def test_reads_nothing_on_the_host() -> None:
    """A meta tensor has no values: whatever read one would raise."""
    kappa = torch.rand(2, 3, device="meta", requires_grad=True)
    value = log_kummer(4, 16, kappa)
    assert (value.shape, value.dtype, value.device.type) == ((2, 3), torch.float32, "meta")
    value.sum().backward()
    assert kappa.grad is not None
    assert kappa.grad.shape == (2, 3)
    assert mean_energy(4, 16, kappa).shape == (2, 3)


@pytest.mark.parametrize("function", [log_kummer, mean_energy, log_kummer_reference])
def test_bad_input(function: object) -> None:
    assert callable(function)
    with pytest.raises(ValueError, match=r"rank must be at most dim = 4, got 5"):
        function(5, 4, 1.0)
    with pytest.raises(ValueError, match=r"rank must be an integer >= 1, got 0"):
        function(0, 4, 1.0)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"kappa must be a finite number >= 0, got {bad}"):
            function(2, 4, bad)
    if function is not log_kummer_reference:
        with pytest.raises(ValueError, match=r"kappa must be a floating-point tensor, got torch.int64"):
            function(2, 4, torch.tensor(3))
