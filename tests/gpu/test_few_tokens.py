"""Few tokens, as in decoding: against fp64, the same bits every time, without waiting for the device, in graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from test_kernels import DEVICE, LARGE, ODD, SMALL, TOLERANCE, Shape, make, tokens
from waiting import no_sync

from grmoe.experts import Dispatch, one_token
from grmoe.experts.reference import reference_experts
from grmoe.kernels import runtime, thin_gate
from grmoe.layer import MoE
from grmoe.routing import GrassmannRouter

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDE = Shape(0, 1000, 6, 1500)  # a width of the experts that is no whole 16 bytes


@pytest.fixture(autouse=True)
def nothing_fell_back() -> Iterator[None]:
    runtime._failed.clear()
    yield
    failed = set(runtime._failed)
    runtime._failed.clear()
    assert not failed


def error(moe: MoE, T: int, dtype: torch.dtype, shape: Shape) -> float:
    """Of the output, in norm, against fp64 with the same selection."""
    x = tokens(shape, dtype, T=T)
    y, routing = moe.run(x)
    exact = copy.deepcopy(moe).double()
    probs = torch.softmax(exact.router.gate(x.double(), None), -1)
    weights = torch.where(routing.selected, probs, 0.0)
    if exact.router.selection.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    most = exact.router.max_experts()
    expected = reference_experts(x.double(), Dispatch.build(weights, routing.selected, most), exact.experts)
    return float((y.double() - expected).norm() / expected.norm())


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("router", ["grassmann", "softmax"])
@pytest.mark.parametrize("shape", [SMALL, ODD, WIDE], ids=str)
def test_output(shape: Shape, router: str, dtype: torch.dtype) -> None:
    moe = make(shape, dtype, router).eval()
    for T in (1, 2, 8, 33, 128, 500, 513):
        assert error(moe, T, dtype, shape) < TOLERANCE[dtype], T


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [SMALL, ODD, WIDE, LARGE], ids=str)
def test_one_token_without_a_list(shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_token, "ENABLED", True)
    moe, x = make(shape, dtype).eval(), tokens(shape, dtype, T=1)
    assert error(moe, 1, dtype, shape) < TOLERANCE[dtype]
    with no_sync():
        plain = moe(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe(x)
    graph.replay()
    assert torch.equal(y, plain)
    x.copy_(tokens(shape, dtype, T=1, seed=3))
    graph.replay()
    assert torch.equal(y, moe(x))


@torch.no_grad()
def test_a_large_layer() -> None:
    moe = make(LARGE).eval()
    for T in (1, 8, 128):
        x = tokens(LARGE, T=T)
        first, again = moe(x), moe(x)
        assert torch.equal(first, again)
        moe.train()  # the kernels of many tokens
        other = moe(x)
        moe.eval()
        # Near ties may fall otherwise for a token or two.
        close = ((first - other).norm(dim=-1) <= 2e-2 * other.norm(dim=-1)).float().mean()
        assert float(close) >= 0.98 if T > 1 else True


@torch.no_grad()
def test_nothing_waits_and_a_graph_follows_the_frames() -> None:
    moe, x = make().eval(), tokens(T=4)
    moe(x)
    with no_sync():
        moe(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe(x)
    for seed in range(2):
        x.copy_(tokens(T=4, seed=seed))
        moe.router.alpha = 1.0 + seed
        assert isinstance(moe.router, GrassmannRouter)
        turned = torch.linalg.qr(moe.router.frames.float() + 0.1 * torch.randn_like(moe.router.frames))[0]
        moe.router.frames.copy_(turned)
        graph.replay()
        assert torch.equal(y, moe(x))
    assert x.device.type == DEVICE


@torch.no_grad()
def test_training_and_many_tokens_keep_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thin_gate, "sum_parts", lambda *_: pytest.fail("used"))
    moe = make()
    moe.train()(tokens(T=4))
    moe.eval()(tokens(T=thin_gate.MOST_TOKENS + 1))
