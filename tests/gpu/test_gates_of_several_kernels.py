"""Gates of several kernels (amortised, linear term, raw): against fp64, the same bits, without waiting, in graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from waiting import no_sync

from grmoe.kernels import runtime
from grmoe.routing import GrassmannRouter, TopK

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VARIANTS: list[dict[str, Any]] = [
    {"amortizer": "affinity"},
    {"amortizer": "input"},
    {"amortizer": "matrix"},
    {"linear": True},
    {"linear": True, "amortizer": "affinity", "concentration": "diagonal"},
    {"scaling": "raw", "kappa": 0.01, "linear": True},
]
# Relative, in norm. Tokens of 8 bits are exact in fp64 too; frames and products are rounded to 8 bits.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def nothing_fell_back() -> Iterator[None]:
    runtime._failed.clear()
    yield
    failed = set(runtime._failed)
    runtime._failed.clear()
    assert not failed


def make(options: dict[str, Any], dim: int = 256) -> GrassmannRouter:
    torch.manual_seed(0)
    router = GrassmannRouter(dim, 16, 12, selection=TopK(2), **options)
    with torch.no_grad():
        for name, weight in router.named_parameters():
            if name != "frames":
                weight += 0.05 * torch.randn(weight.shape)
    return router.cuda()


def run(router: GrassmannRouter, x: Tensor) -> list[Tensor]:
    """Logits, and the gradients of a sum of them."""
    leaf = x.clone().requires_grad_()
    logits = router(leaf).logits
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(logits)
    return [logits.detach(), *torch.autograd.grad((weight * logits).sum(), [leaf, *router.parameters()])]


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_logits_and_gradients(options: dict[str, Any], dtype: torch.dtype) -> None:
    for dim, T in ((256, 1500), (250, 77)):  # the second has no whole 16 bytes
        router = make(options, dim)
        x = torch.randn(T, dim, device="cuda", dtype=dtype)
        exact = copy.deepcopy(router).double()
        exact.backend = "reference"
        found, expected = run(router, x), run(exact, x.double())
        for ours, wide in zip(found, expected, strict=True):
            assert error(ours, wide) < 2 * TOLERANCE[dtype]
        assert all(torch.equal(a, b) for a, b in zip(found, run(router, x), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_few_tokens_in_a_graph(options: dict[str, Any]) -> None:
    router, x = make(options).eval(), torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    exact = copy.deepcopy(router).double()
    exact.backend = "reference"
    assert error(router(x).logits, exact(x.double()).logits) < 2 * TOLERANCE[torch.bfloat16]
    with no_sync():
        router(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = router(x).logits
    x.copy_(torch.randn(4, 256))
    graph.replay()
    torch.testing.assert_close(captured, router(x).logits, rtol=0, atol=0)
