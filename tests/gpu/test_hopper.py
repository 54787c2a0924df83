"""The warp-specialised kernels against the Triton kernels whose arithmetic they repeat: equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe.kernels import gate as gate_module
from grmoe.kernels import grouped_gemm as gemm_module
from grmoe.kernels import runtime
from grmoe.kernels.experts import engines
from grmoe.kernels.gate import gate
from grmoe.kernels.grouped_gemm import grouped_gemm

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="no Hopper")]

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def nothing_fell_back() -> Iterator[None]:
    runtime._failed.clear()
    yield
    assert not runtime.failures()


def triton_too(run: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Results of both kernels."""
    launched: list[str] = []
    launch = module.launch

    def listen(kernel: Any, *args: Any) -> None:
        launched.append(kernel.fn.__module__)
        launch(kernel, *args)

    monkeypatch.setattr(module, "launch", listen)
    special = run()
    assert any("hopper" in name for name in launched)
    monkeypatch.setattr(module, "specialises", lambda _: False)
    launched.clear()
    plain = run()
    assert not any("hopper" in name for name in launched)
    return special, plain


BF16, FP16 = torch.bfloat16, torch.float16
GATES = [  # tokens, width, experts, rank; how to choose; λ along a frame's directions; precision
    ((1000, 2048, 16, 64), runtime.LARGEST, False, BF16),
    ((1000, 2048, 16, 64), runtime.DENSE, True, FP16),
    ((1, 512, 16, 64), runtime.LARGEST, False, BF16),
    ((257, 200, 9, 40), runtime.ABOVE, True, BF16),  # padded experts and columns, width not of whole tiles
    ((640, 256, 64, 32), runtime.LARGEST, True, BF16),
    ((300, 320, 8, 128), runtime.ABOVE, False, FP16),
]
SMALL_GATE = ((1000, 768, 8, 48), runtime.LARGEST, False, BF16)  # three tiles of columns at once


@pytest.mark.parametrize("lead", [0, 3])
@pytest.mark.parametrize(("shape", "mode", "diagonal", "dtype"), GATES, ids=str)
def test_gate(
    shape: tuple[int, int, int, int],
    mode: int,
    diagonal: bool,
    dtype: torch.dtype,
    lead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    T, D, N, K = shape
    monkeypatch.setattr("grmoe.kernels.hopper.LEAD", lead)
    torch.manual_seed(T + mode)
    x = torch.randn(T, D, device=DEVICE, dtype=dtype)
    x[T // 2] = 0.0
    frames = torch.linalg.qr(torch.randn(N, D, K, device=DEVICE))[0].contiguous()
    log_kappa = torch.randn(N, K, device=DEVICE) if diagonal else torch.randn(N, device=DEVICE)
    prior, alpha = torch.randn(N, device=DEVICE), torch.tensor(1.7, device=DEVICE)
    tau = torch.tensor(0.2 if mode == runtime.ABOVE else 2.0, device=DEVICE)
    cap = torch.tensor(3, device=DEVICE, dtype=torch.int32)

    def run() -> tuple[Tensor, ...]:
        return gate(
            x, frames, log_kappa, prior, alpha, energy_scale=D / K, posterior=not diagonal, mode=mode, max_experts=3,
            tau=tau, cap=cap, renormalize=not diagonal,
        )  # fmt: skip

    special, plain = triton_too(run, gate_module, monkeypatch)
    for name, a, b in zip(("logits", "probs", "weights", "selected", "zero"), special, plain, strict=True):
        assert torch.equal(a, b), (name, (a.float() - b.float()).abs().max().item())


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("shape", "mode", "diagonal", "dtype"), [*GATES, SMALL_GATE], ids=str)
def test_a_kept_projection(
    shape: tuple[int, int, int, int],
    mode: int,
    diagonal: bool,
    dtype: torch.dtype,
    special: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It changes no bit of the forward. Gradients differ by the rounding of the projection."""
    T, D, N, K = shape
    torch.manual_seed(T + mode)
    if not special:
        monkeypatch.setattr(gate_module, "specialises", lambda _: False)
    x = torch.randn(T, D, device=DEVICE, dtype=dtype, requires_grad=True)
    frames = torch.linalg.qr(torch.randn(N, D, K, device=DEVICE))[0].contiguous().requires_grad_()
    log_kappa = torch.randn(*((N, K) if diagonal else (N,)), device=DEVICE, requires_grad=True)
    prior = torch.randn(N, device=DEVICE, requires_grad=True)
    alpha, cap = torch.tensor(1.7, device=DEVICE), torch.tensor(3, device=DEVICE, dtype=torch.int32)
    tau = torch.tensor(0.2 if mode == runtime.ABOVE else 2.0, device=DEVICE)
    upstream = torch.randn(T, N, device=DEVICE)

    def run() -> tuple[list[Tensor], list[Tensor]]:
        results = gate(
            x, frames, log_kappa, prior, alpha, energy_scale=D / K, mode=mode, max_experts=3, tau=tau, cap=cap,
            renormalize=False,
        )  # fmt: skip
        leaves = [x, frames, log_kappa, prior]
        return list(results[:4]), list(torch.autograd.grad(results[0], leaves, upstream))

    monkeypatch.setattr(gate_module, "KEPT_COLUMNS", 10**9)
    plain, gradients = run()
    monkeypatch.setattr(gate_module, "KEPT_COLUMNS", 0)
    kept, others = run()
    assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))
    for a, b in zip(others, gradients, strict=True):
        assert (a.double() - b.double()).norm() <= 1e-2 * b.double().norm()
    again = run()[1]
    assert all(torch.equal(a, b) for a, b in zip(again, others, strict=True))


@pytest.mark.parametrize("elastic", [runtime.FIXED, runtime.MASS, runtime.COUNT])
def test_budgets_of_the_gate(elastic: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers per sequence, or drawn, and weights at their own α: equal to the Triton kernel bit for bit."""
    torch.manual_seed(elastic)
    rows, length, D, N, K = 6, 50, 512, 16, 64
    x = torch.randn(rows * length, D, device=DEVICE, dtype=BF16)
    frames = torch.linalg.qr(torch.randn(N, D, K, device=DEVICE))[0].contiguous()
    log_kappa, prior = torch.randn(N, device=DEVICE), torch.randn(N, device=DEVICE)
    shape = () if elastic else (rows,)
    alpha, apart = 0.5 + torch.rand(shape, device=DEVICE), 0.5 + torch.rand(shape, device=DEVICE)
    tau = torch.rand(shape, device=DEVICE) if not elastic else torch.tensor(2.0, device=DEVICE)
    cap = torch.randint(1, 5, shape, device=DEVICE, dtype=torch.int32)
    key, first_row = torch.tensor(99, device=DEVICE), torch.tensor(3, device=DEVICE)

    def run() -> tuple[Tensor, ...]:
        return gate(
            x, frames, log_kappa, prior, alpha, weight_alpha=apart, tau=tau, cap=cap, key=key, first_row=first_row,
            energy_scale=D / K, mode=runtime.LARGEST, max_experts=4, renormalize=False, length=length, layer=5,
            elastic=elastic, unit=runtime.PER_TOKEN,
        )  # fmt: skip

    special, plain = triton_too(run, gate_module, monkeypatch)
    for name, a, b in zip(("logits", "probs", "weights", "selected", "zero"), special, plain, strict=True):
        assert torch.equal(a, b), (name, (a.float() - b.float()).abs().max().item())


UPS = [  # tokens, width, experts, expert width, experts per token; activation; pre-activations too; precision
    ((1000, 768, 8, 1536, 2), 1, True, BF16),
    ((1000, 768, 8, 1536, 2), 2, True, BF16),
    ((1000, 768, 8, 1536, 2), 1, False, FP16),
    ((333, 200, 3, 104, 1), 1, True, FP16),  # neither whole tiles of width nor of columns
    ((333, 200, 3, 104, 1), 2, False, BF16),
    ((2000, 256, 40, 352, 4), 1, True, BF16),
    ((5, 64, 8, 64, 2), 2, True, BF16),
]


def uneven(num_experts: int, rows: int) -> Tensor:
    """Offsets: one expert takes half of all rows, one nobody; rows behind the last are nobody's."""
    load = torch.rand(num_experts)
    load[0], load[-1] = load.sum(), 0.0
    return (load / load.sum() * rows).int().cumsum(0).int().to(DEVICE)


@pytest.mark.parametrize("lead", [0, 2, 3])
@pytest.mark.parametrize(("shape", "activation", "save", "dtype"), UPS, ids=str)
def test_first_gemm(
    shape: tuple[int, int, int, int, int], activation: int, save: bool, dtype: torch.dtype, lead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    T, D, N, I, k = shape
    torch.manual_seed(T)
    monkeypatch.setattr("grmoe.kernels.hopper.LEAD", lead)
    x = torch.randn(T, D, device=DEVICE, dtype=dtype)
    weights = torch.randn(N, I * (2 if activation == 1 else 1), D, device=DEVICE, dtype=dtype) / D**0.5
    offset = uneven(N, T * k)
    token = torch.randint(0, T, (T * k,), device=DEVICE, dtype=torch.int32)
    used = int(offset[-1])

    def run() -> tuple[Tensor, Tensor]:
        inner = torch.full((T * k, weights.shape[1]), torch.nan, device=DEVICE, dtype=dtype) if save else None
        out = grouped_gemm(
            x, weights, offset, engines(dtype, True).up, token=token, transposed=True, activation=activation,
            inner=inner,
        )  # fmt: skip
        if inner is None:
            return out[:used], out[:0]
        assert inner[used:].isnan().all()
        return out[:used], inner[:used]

    special, plain = triton_too(run, gemm_module, monkeypatch)
    assert not special[0].isnan().any()
    for a, b in zip(special, plain, strict=True):
        assert torch.equal(a, b), (a.float() - b.float()).abs().max().item()


PLAIN = [  # rows, inner dimension, experts, columns; B's rows are output columns; precision
    ((4000, 1536, 8, 768), True, BF16),
    ((4000, 768, 8, 1536), False, BF16),
    ((999, 200, 3, 104), True, FP16),  # neither whole steps nor whole tiles of columns
    ((999, 192, 3, 104), False, FP16),  # fewer steps than stages
    ((30000, 256, 40, 360), True, BF16),  # several tiles per program
    ((30000, 320, 40, 360), False, BF16),
]


@pytest.mark.parametrize("lead", [0, 2, 3])
@pytest.mark.parametrize(("shape", "transposed", "dtype"), PLAIN, ids=str)
def test_second_gemm(
    shape: tuple[int, int, int, int], transposed: bool, dtype: torch.dtype, lead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    A, K, N, O = shape
    torch.manual_seed(A)
    monkeypatch.setattr("grmoe.kernels.hopper.LEAD", lead)
    monkeypatch.setattr(gemm_module, "ALL_SPECIALISED", True)
    offset = uneven(N, A)
    used = int(offset[-1])
    a = torch.randn(A, K, device=DEVICE, dtype=dtype)
    a[used:] = torch.nan
    b = torch.randn(N, *((O, K) if transposed else (K, O)), device=DEVICE, dtype=dtype) / K**0.5

    def run() -> tuple[Tensor]:
        return (grouped_gemm(a, b, offset, engines(dtype, True).plain, transposed=transposed)[:used],)

    (special,), (plain,) = triton_too(run, gemm_module, monkeypatch)
    assert not special.isnan().any()
    assert torch.equal(special, plain), (special.float() - plain.float()).abs().max().item()


def test_another_number_of_tokens_is_no_new_kernel_and_changes_no_token() -> None:
    torch.manual_seed(0)
    x = torch.randn(700, 512, device=DEVICE, dtype=torch.bfloat16)
    frames = torch.linalg.qr(torch.randn(16, 512, 64, device=DEVICE))[0].contiguous()
    zeros, alpha = torch.zeros(16, device=DEVICE), torch.tensor(1.0, device=DEVICE)
    tau, cap = torch.tensor(2.0, device=DEVICE), torch.tensor(2, device=DEVICE, dtype=torch.int32)
    options = {"mode": runtime.LARGEST, "max_experts": 2, "renormalize": True, "tau": tau, "cap": cap}
    whole = gate(x, frames, zeros, zeros, alpha, **options)
    known = len(gate_module.launch.__globals__["_compiled"])
    for T in (1, 16, 127, 128, 129, 700):
        part = gate(x[:T], frames, zeros, zeros, alpha, **options)
        assert all(torch.equal(a, b[:T]) for a, b in zip(part[:4], whole[:4], strict=True)), T
    assert len(gate_module.launch.__globals__["_compiled"]) == known
