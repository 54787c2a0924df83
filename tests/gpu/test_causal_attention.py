"""cuDNN's attention for training and prompts: exact to its precision, compiled, in a captured graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grmoe import attention
from grmoe.bench.models import ModelShape, ours
from grmoe.kernels import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPES = [(2, 12, 12, 1024, 64), (3, 8, 2, 77, 128), (1, 4, 4, 513, 96)]


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    if not runtime.is_hopper(torch.device("cuda", 0)):
        pytest.skip("no Hopper")
    monkeypatch.setattr(attention, "CUDNN", True)


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, compiled: bool) -> None:
    B, H, G, S, W = shape
    torch.manual_seed(S)
    # As projections give them: the heads of a position side by side.
    tensors = [
        torch.randn(B, S, n, W, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        for n in (H, G, G)
    ]
    assert attention.can_attend_causally(*tensors[:2], None)
    run = torch.compile(attention.attend_causally, fullgraph=True) if compiled else attention.attend_causally
    found = run(*tensors, 0.1)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact = reference(*wide, 0.1)
    upstream = torch.randn_like(found)
    pairs = [(found, exact)]
    grads = torch.autograd.grad(found, tensors, upstream), torch.autograd.grad(exact, wide, upstream.double())
    for a, b in [*pairs, *zip(*grads, strict=True)]:
        error = (a.double() - b).norm() / b.norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_gives_the_same_within_rounding(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = ModelShape("tiny", 2, 64, "gelu").config("grassmann")
    with torch.device("cuda"):
        model = ours(config).eval()
    if not autocast:
        model.bfloat16()
    ids = torch.randint(config.vocab_size, (2, 64), device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        found = model(ids).logits.float()
        monkeypatch.setattr(attention, "CUDNN", False)
        want = model(ids).logits.float()
    assert not torch.equal(found, want)  # it was another kernel
    assert (found - want).norm() < 2e-2 * want.norm()


def test_a_captured_graph() -> None:
    q, k, v = (torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    want = attention.attend_causally(q, k, v, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention.attend_causally(q, k, v, 0.1)
    found.zero_()
    graph.replay()
    assert torch.equal(found, want)
