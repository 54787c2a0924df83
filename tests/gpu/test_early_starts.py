"""Kernels that start while the one before them still runs: the same bits, many times, in graphs too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_kernels import LARGE, SMALL, Shape, make, run, tokens

pytest.importorskip("triton")

from grmoe.kernels import launch, runtime

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ONE = Shape(1, 2048, 64, 1024, 8)


@pytest.fixture(autouse=True)
def nothing_fell_back() -> Iterator[None]:
    runtime._failed.clear()
    yield
    failed = set(runtime._failed)
    runtime._failed.clear()
    assert not failed


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=str)
def test_output_and_every_gradient(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not wait long enough reads what the one before is still writing: not in every run."""
    moe, x = make(shape, torch.bfloat16), tokens(shape, torch.bfloat16)
    want = run(moe, x)
    monkeypatch.setattr(launch, "EARLY", True)
    for _ in range(30):
        again = run(moe, x)
        assert all(torch.equal(again[name], value) for name, value in want.items())


@torch.no_grad()
@pytest.mark.parametrize("shape", [ONE, SMALL], ids=str)
def test_replays_of_a_graph(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = make(shape, torch.bfloat16).eval()
    batches = [tokens(shape, torch.bfloat16, seed=seed) for seed in range(20)]
    want = [moe(x) for x in batches]
    monkeypatch.setattr(launch, "EARLY", True)
    x = batches[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        moe(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe(moe(x).mul_(0.5).add_(x))  # PyTorch's kernels between ours
        first = moe(x)
    for batch, output in zip(batches, want, strict=True):
        x.copy_(batch)
        graph.replay()
        assert torch.equal(first, output)
        assert torch.equal(y, moe(output.clone().mul_(0.5).add_(batch)))
