"""Gather, combine and the activations on rows of the dispatch list, against plain indexing and autograd in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

import triton
import triton.language as tl

from grmoe.experts.dispatch import Dispatch
from grmoe.kernels import rows

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

NAN = float("nan")


def dispatch(T: int = 40, N: int = 5, most: int = 3, seed: int = 0) -> Dispatch:
    """Tokens with none to `most` experts; expert 1 has none."""
    g = torch.Generator().manual_seed(seed)
    score = torch.rand(T, N, generator=g)
    score[:, 1] = -1
    selected = score.argsort(1, descending=True).argsort(1) < torch.randint(most + 1, (T, 1), generator=g)
    weights = torch.where(selected, torch.rand(T, N, generator=g), 0.0)
    return Dispatch.build(weights, selected, most, kernels=True)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Widths: less than a tile, not a power of two, more than one tile (1024 columns).
@pytest.mark.parametrize("width", [4, 36, 1040])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gather(width: int, dtype: torch.dtype) -> None:
    d, x = dispatch(), random(40, width).to(dtype)
    used = int(d.offset_N[-1])
    assert 0 < used < d.num_rows
    out = rows.gather(x, d.token_A, d.offset_N)
    assert torch.equal(out[:used], x[d.token_A[:used].long()])
    assert out[used:].isnan().all()  # untouched


@pytest.mark.parametrize("width", [4, 36, 1040])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_combine(width: int, weighted: bool, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "AT_ONCE", at_once)
    d = dispatch()
    used = int(d.offset_N[-1])
    y = random(d.num_rows, width)
    y[used:] = NAN  # unused rows never leak
    weight = d.weight_TM.clone()
    filled = d.slot_TM < d.num_rows
    weight[~filled] = NAN  # nor do the weights of empty slots
    expected = torch.zeros(40, width, dtype=torch.float64)
    for t, m in filled.nonzero().tolist():
        w = float(weight[t, m]) if weighted else 1.0
        expected[t] += w * y[d.slot_TM[t, m]].double()
    out = rows.combine(y, d.slot_TM, weight if weighted else None)
    assert out.isfinite().all()
    # Sums of three products.
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    assert (out[~filled.any(1)] == 0).all()


def test_nan_row_reaches_its_token_alone() -> None:
    d = dispatch()
    y = random(d.num_rows, 8)
    y[5] = NAN
    bad = rows.combine(y, d.slot_TM, d.weight_TM).isnan()
    assert bad[d.token_A[5]].all()
    assert int(bad.sum()) == 8


def act(inner: Tensor, glu: bool) -> Tensor:
    if not glu:
        return F.gelu(inner)
    first, up = inner.chunk(2, -1)
    return F.silu(first) * up


@pytest.mark.parametrize("spend", [False, True])
@pytest.mark.parametrize("glu", [True, False])
@pytest.mark.parametrize("I", [4, 20, 1028])
def test_activation_backward(glu: bool, I: int, spend: bool) -> None:
    d = dispatch(T=9)
    used, A = int(d.offset_N[-1]), d.num_rows
    inner, q = 3 * random(A, 2 * I if glu else I), random(A, I, seed=2)
    inner[used:], q[used:] = NAN, NAN
    # The loss whose gradients these are: Σ_a w_a ⟨q_a, act(inner_a)⟩.
    leaf = inner[:used].double().requires_grad_()
    weight = d.weight_TM.double().requires_grad_()
    row_weight = weight.flatten()[d.pair_A[:used].long()].unsqueeze(-1)
    hidden = act(leaf, glu)
    (row_weight * q[:used].double() * hidden).sum().backward()
    grad, before = q.clone(), inner.clone()
    args = (inner, grad, d.pair_A, d.weight_TM, d.offset_N, glu, spend)
    grad_inner, grad_weight = rows.activation_backward(*args)
    assert (grad_inner is inner) == spend
    assert spend or torch.equal(inner[:used], before[:used])
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}  # dots of a thousand terms of size ten
    torch.testing.assert_close(grad_inner[:used].double(), leaf.grad, **close)
    torch.testing.assert_close(grad_weight.double(), weight.grad, **close)
    torch.testing.assert_close(grad[:used].double(), (row_weight * hidden).detach(), **close)
    assert grad_inner[used:].isnan().all()
    assert grad[used:].isnan().all()


def test_extreme_pre_activations_stay_finite() -> None:
    """exp(−a) overflows at a = −100; the sigmoid there is zero, not NaN."""
    inner = torch.tensor([[-100.0, 0.0, 100.0, -1e30, 1.0, 1.0, 1.0, 1.0]])
    offset, pair = torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for glu in (True, False):
        hidden = torch.ones_like(act(inner, glu))
        grads = rows.activation_backward(inner, hidden, pair, torch.ones(1, 1), offset, glu)
        torch.testing.assert_close(hidden, act(inner, glu))
        assert all(g.isfinite().all() for g in grads)


def test_the_normal_distribution_is_as_exact_as_fp32_needs() -> None:
    """Through the backward of one wide row with weight and gradient one: h = a·Φ(a), slope = Φ(a) + a·φ(a)."""
    a = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 30.0, -30.0, 1e-30])])[None]
    one = torch.ones(1, 1)
    pair, offset = torch.zeros(1, dtype=torch.long), torch.tensor([1], dtype=torch.int32)
    grad = torch.ones_like(a)
    slope, _ = rows.activation_backward(a.clone(), grad, pair, one, offset, False)
    leaf = a.double().requires_grad_()
    exact = F.gelu(leaf)
    exact.sum().backward()
    assert (grad.double() - exact).abs().max() < 2e-6  # a few units in the last place of values up to 30
    assert (slope.double() - leaf.grad).abs().max() < 5e-7


@triton.jit
def gelu_kernel(a_ptr, out_ptr, COUNT: tl.constexpr):
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out_ptr + i, rows.gelu(tl.load(a_ptr + i)))


def test_gelu_is_as_exact_as_fp32_needs() -> None:
    extreme = torch.tensor([0.0, -0.0, 30.0, -30.0, 1e-30, -1e30, 1e30, -3e38])
    a = torch.cat([torch.linspace(-12, 12, 4096 - len(extreme)), extreme])
    out, exact = torch.empty_like(a), F.gelu(a.double())
    gelu_kernel[(1,)](a, out, 4096)
    small = a.abs() < 6
    assert (out - exact)[small].abs().max() < 4e-7  # a unit in the last place of 5
    # Far out nothing is left of the tail, and nothing overflows.
    assert torch.equal(out[~small], torch.where(out[~small] > 0, a[~small], out[~small]))
    assert out[~small & (a < 0)].abs().max() < 1e-8
    # Relative errors stay below those of 16 bits where gelu is not negligible.
    mine = (a > -4) & (a < 0)
    assert ((out - exact) / exact)[mine].abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_of_every_number_of_16_bits(dtype: torch.dtype) -> None:
    a = torch.arange(2**16).to(torch.uint16).view(dtype).float()
    a[~a.isfinite()] = 0.0
    out = torch.empty_like(a)
    gelu_kernel[(16,)](a, out, 4096)
    exact = F.gelu(a.double())
    # Two roundings, and what the polynomial adds to Φ times a.
    room = (0.5 * torch.finfo(dtype).eps + 2**-22) * exact.abs() + 5e-8
    room += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((out.to(dtype).double() - exact).abs() <= room).all()
