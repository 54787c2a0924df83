"""The fused kernels of the backward, as compiled: Gluon against Triton, both against separate passes and fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_hopper import triton_too
from test_kernels import LARGE, NARROW, ODD, SMALL, TOLERANCE, Shape, compare, make, run, tokens, upstream
from torch import Tensor
from waiting import no_sync

pytest.importorskip("triton")

from grmoe.kernels import experts as experts_module
from grmoe.kernels import fused_backward as module
from grmoe.kernels import rows, runtime
from grmoe.kernels.experts import GRADIENT, Fused, engines
from grmoe.kernels.fused_backward import gathered_gradient, hidden_gradient
from grmoe.kernels.grouped_gemm import grouped_gemm, weight_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
only_hopper = pytest.mark.skipif(not hopper, reason="no Hopper")

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
ALL = Fused(True, True, True)


@pytest.fixture(autouse=True)
def nothing_fell_back() -> Iterator[None]:
    runtime._failed.clear()
    yield
    failed = set(runtime._failed)
    runtime._failed.clear()
    assert not failed


@dataclass(frozen=True)
class Sizes:
    T: int
    D: int
    N: int
    I: int
    k: int


CASES = [  # sizes, SwiGLU, precision
    (Sizes(1000, 768, 8, 1536, 2), True, BF16),
    (Sizes(1000, 768, 8, 1536, 2), False, BF16),
    (Sizes(1000, 512, 8, 768, 2), True, FP16),
    (Sizes(333, 200, 3, 104, 1), True, FP16),  # neither whole tiles of width nor of columns
    (Sizes(333, 200, 3, 104, 1), False, BF16),
    (Sizes(2000, 256, 40, 360, 4), True, BF16),
    (Sizes(5, 64, 8, 64, 2), False, BF16),
]


class Lists:
    """Half of all rows go to one expert, none to the last. Unused rows hold NaN, and name token 0, which is NaN too."""

    def __init__(self, s: Sizes, glu: bool, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(s.T)
        load = torch.rand(s.N, generator=g)
        load[0], load[-1] = load.sum(), 0.0
        self.offset = (load / load.sum() * (s.T - 1) * s.k).int().cumsum(0).int().to(DEVICE)
        self.used, A = int(self.offset[-1]), s.T * s.k
        self.pair = torch.zeros(A, dtype=torch.int32, device=DEVICE)
        order = s.k + torch.randperm((s.T - 1) * s.k, generator=g)[: self.used].int()
        self.pair[: self.used] = order.to(DEVICE)
        self.token = (self.pair // s.k).int()
        self.weight = torch.rand(s.T, s.k, generator=g).to(DEVICE)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*shape, generator=g)).to(DEVICE, dtype)

        self.grad, self.x = normal(s.T, s.D), normal(s.T, s.D)
        self.grad[0], self.x[0] = torch.nan, torch.nan
        self.down = normal(s.N, s.D, s.I, scale=s.D**-0.5)
        self.inner = normal(A, 2 * s.I if glu else s.I)
        self.inner[self.used :] = torch.nan
        self.glu, self.tiles = glu, engines(dtype, True)

    def hidden(self, spend: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        inner = self.inner.clone()
        given = (self.grad, self.down, inner, self.token, self.pair, self.weight, self.offset, self.tiles.up)
        grad_inner, hidden, grad_weight = hidden_gradient(*given, glu=self.glu, spend=spend)
        if spend:
            assert grad_inner.data_ptr() == inner.data_ptr()
            assert grad_inner[self.used :].isnan().all()
        return grad_inner[: self.used], hidden[: self.used], grad_weight

    def separate(self) -> tuple[Tensor, Tensor, Tensor]:
        gathered = rows.gather(self.grad, self.token, self.offset)
        hidden = grouped_gemm(gathered, self.down, self.offset, self.tiles.plain, transposed=False)
        given = (self.inner, hidden, self.pair, self.weight, self.offset, self.glu)
        grad_inner, grad_weight = rows.activation_backward(*given)
        return grad_inner[: self.used], hidden[: self.used], grad_weight


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_hidden_gradient_and_separate_passes(case: Any) -> None:
    lists = Lists(*case)
    for a, b in zip(lists.hidden(), lists.separate(), strict=True):
        # The separate passes round q to 16 bits.
        assert error(a, b) < TOLERANCE[case[2]]


@only_hopper
@pytest.mark.parametrize("lead", [0, 2, 3])
@pytest.mark.parametrize("spend", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hidden_gradient_of_gluon_and_triton(
    case: Any, spend: bool, lead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = Lists(*case)
    monkeypatch.setattr("grmoe.kernels.hopper.LEAD", lead)
    special, plain = triton_too(lambda: lists.hidden(spend), module, monkeypatch)
    for name, a, b in zip(("inner", "hidden"), special, plain, strict=False):
        assert not a.isnan().any()
        assert torch.equal(a, b), (name, error(a, b))
    # ⟨q, h⟩ is summed over other pieces: fp32 sums of some hundred terms.
    assert error(special[2], plain[2]) < 1e-5


def gradients(lists: Lists) -> tuple[Tensor, Tensor]:
    given = (lists.token, lists.offset, GRADIENT)
    first = lists.inner.shape[1] // 2 if lists.glu else lists.inner.shape[1]
    hidden = lists.inner[
        :, :first
    ].contiguous()  # any matrix in the list's order, with NaN behind the last row
    down = gathered_gradient(lists.grad, hidden, *given, turned=False)
    return down, gathered_gradient(lists.x, lists.inner, *given, turned=True)


@pytest.mark.parametrize("lead", [0, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weight_gradients(case: Any, lead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = Lists(*case)
    monkeypatch.setattr("grmoe.kernels.hopper.LEAD", lead)
    if hopper:
        special, plain = triton_too(lambda: gradients(lists), module, monkeypatch)
        for name, a, b in zip(("down", "up"), special, plain, strict=True):
            assert torch.equal(a, b), (name, error(a, b))
    else:
        special = gradients(lists)
    assert not any(gradient.isnan().any() for gradient in special)
    gathered = rows.gather(lists.x, lists.token, lists.offset)
    # The same sums in the same order, from gathered copies.
    assert torch.equal(special[1], weight_gradient(lists.inner, gathered, lists.offset, GRADIENT))
    assert not any(gradient[-1].any() for gradient in special)  # the idle expert


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "fused_parts", lambda _: ALL)


LAYERS = [
    *[(SMALL, dtype) for dtype in TOLERANCE],
    (ODD, BF16),
    (ODD, torch.float32),
    (NARROW, BF16),
    (LARGE, BF16),
]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(("shape", "dtype"), LAYERS, ids=str)
def test_output_and_every_gradient_of_the_layer(shape: Shape, dtype: torch.dtype) -> None:
    compare(make(shape, dtype), tokens(shape, dtype))


@pytest.mark.usefixtures("fused")
def test_gelu() -> None:
    compare(make(activation="gelu"), tokens())


@pytest.mark.usefixtures("fused")
def test_the_same_bits_every_time_and_in_a_kept_graph() -> None:
    """Twenty runs: a race would show as a difference that moves."""
    moe, x = make(), tokens()
    first = run(moe, x)
    for _ in range(20):
        again = run(moe, x)
        assert all(torch.equal(first[name], again[name]) for name in first)
    leaf = x.requires_grad_()
    y, leaves = moe(leaf), [leaf, *moe.parameters()]
    kept = [torch.autograd.grad(y, leaves, upstream(x), retain_graph=keep) for keep in (True, True, False)]
    for again in kept[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept[0], again, strict=True))


@pytest.mark.usefixtures("fused")
def test_nothing_waits_for_the_device() -> None:
    moe, x = make(), tokens()
    direction = upstream(x)
    moe(x.clone().requires_grad_()).backward(direction)
    leaf = x.clone().requires_grad_()
    with no_sync():
        moe(leaf).backward(direction)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("D", "lead"), [(768, 0), (2048, 0), (768, 3)])
def test_many_rows(seed: int, D: int, lead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every multiprocessor works through many tiles, so each buffer is used many times."""
    torch.manual_seed(seed)
    monkeypatch.setattr("grmoe.kernels.hopper.LEAD", lead)
    lists = Lists(Sizes(8192, D, 16, 1376, 2), True, BF16)
    ours = lists.hidden()
    for a, b in zip(ours, lists.separate(), strict=True):
        assert error(a, b) < TOLERANCE[BF16]
    assert all(torch.equal(a, b) for a, b in zip(ours, lists.hidden(), strict=True))
    down, up = gradients(lists)
    gathered = rows.gather(lists.x, lists.token, lists.offset)
    assert torch.equal(up, weight_gradient(lists.inner, gathered, lists.offset, GRADIENT))
    assert all(torch.equal(a, b) for a, b in zip((down, up), gradients(lists), strict=True))
