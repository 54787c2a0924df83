"""Decoding on a device: rotary positions to the bit, attention against fp64, norms, graphs, and a compiled step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import StaticCache
from waiting import no_sync

from grmoe import attention, linears
from grmoe.bench.models import ModelShape, ours
from grmoe.kernels import runtime
from grmoe.model.attention_grmoe import GrmoeRMSNorm

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPES = [(1, 16, 4, 300, 128), (32, 16, 4, 1024, 128), (5, 12, 12, 77, 64), (3, 8, 1, 2049, 96)]


@pytest.fixture(autouse=True)
def nothing_fell_back() -> Iterator[None]:
    runtime._failed.clear()
    yield
    failed = set(runtime._failed)
    runtime._failed.clear()
    assert not failed


def make(B: int, H: int, G: int, L: int, W: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(L)
    q = torch.randn(B, H, 1, W, generator=g, device="cuda").to(dtype)
    k, v = torch.randn(2, B, G, L + 8, W, generator=g, device="cuda").to(dtype)[:, :, :, :L]
    ends = 1 + (torch.arange(B, device="cuda") * 37 + L - 1) % L
    return q, k, v, torch.arange(L, device="cuda") < ends.view(-1, 1, 1, 1)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_exact_to_its_precision(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v, mask = make(*shape, dtype)
    assert attention.can_attend_one(q, k, v, mask)
    with no_sync():
        found = attention.attend_one(q, k, v, mask, 0.1)
    exact = attention.attend_one_reference(q.double(), k.double(), v.double(), mask, 0.1)
    error = (found.double() - exact).norm() / exact.norm()
    assert error < {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}[dtype]
    assert torch.equal(found, attention.attend_one(q, k, v, mask, 0.1))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_have_the_bits_of_pytorchs_operations(dtype: torch.dtype) -> None:
    q, k = (torch.randn(3, 7, heads, 128, device="cuda", dtype=dtype).transpose(1, 2) for heads in (20, 5))
    angles = 10 * torch.randn(1, 7, 128, device="cuda")
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    with no_sync():
        found = attention.rotate(q, k, cos, sin)
    for ours_, plain in zip(found, attention.rotate_reference(q, k, cos, sin), strict=True):
        assert torch.equal(ours_, plain)


def test_a_norm_without_gradients_is_that_with_them() -> None:
    norm = GrmoeRMSNorm(1000).to("cuda", torch.bfloat16).eval()
    with torch.no_grad():
        norm.weight.copy_(torch.rand(1000))
        x = torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16)
        fast = norm(x)
    exact = F.rms_norm(x.double(), (1000,), norm.weight.double(), norm.variance_epsilon)
    assert (fast.double() - exact).norm() < 3e-3 * exact.norm()
    torch.testing.assert_close(fast, norm(x), rtol=2**-7, atol=0)  # which rounds twice


@torch.no_grad()
def test_a_compiled_step_is_the_step() -> None:
    """With a static cache, without a break in the graph."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = ours(ModelShape("small", 4, 64, "gelu").config("grassmann")).eval()
        ids = torch.randint(1000, (4, 64))
    cache = StaticCache(config=model.config, max_cache_len=128)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    kept = [
        (layer.keys.clone(), layer.values.clone(), layer.cumulative_length.clone()) for layer in cache.layers
    ]
    step = torch.compile(model, dynamic=False, fullgraph=True)
    found = []
    for run in (model, step):
        for layer, (keys, values, length) in zip(cache.layers, kept, strict=True):
            layer.keys.copy_(keys)
            layer.values.copy_(values)
            layer.cumulative_length.copy_(length)
        found.append(run(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


THIN = [(1, 2048, 5504), (1, 1000, 24), (7, 2048, 5504), (32, 2048, 512), (64, 768, 3072)]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", THIN, ids=str)
def test_linear_maps_of_few_tokens(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    T, D, O = shape
    torch.manual_seed(T)
    with torch.device("cuda"):
        x, gain, residual = (t.to(dtype) for t in (3 * torch.randn(T, D), torch.rand(D), torch.randn(T, D)))
        up, gate = ((torch.randn(O, D) / D**0.5).to(dtype) for _ in range(2))
        down, k = (torch.randn(D, O) / O**0.5).to(dtype), (torch.randn(40, D) / D**0.5).to(dtype)
    wide = [t.double() for t in (x, gate, up, gain)]
    x64, gate64, up64, gain64 = wide
    with no_sync():
        inner = linears.feed_forward_few(x, gate, up, gain, 1e-5)
        plain = linears.feed_forward_few(x, None, up, gain, 1e-5)
        projected = linears.project_few(x, [up, k, gate], gain, 1e-5)
        total = linears.add_product(residual, inner, down)
    pairs = [
        (inner, linears.feed_forward_few_reference(x64, gate64, up64, gain64, 1e-5)),
        (plain, linears.feed_forward_few_reference(x64, None, up64, gain64, 1e-5)),
        (total, residual.double() + inner.double() @ down.double().T),
        *zip(
            projected,
            linears.project_few_reference(x64, [up64, k.double(), gate64], gain64, 1e-5),
            strict=True,
        ),
    ]
    for found, exact in pairs:
        error = (found.double() - exact).norm() / exact.norm()
        assert error < {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 1e-5}[dtype]
    assert torch.equal(inner, linears.feed_forward_few(x, gate, up, gain, 1e-5))


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 4])
def test_steps_with_maps_of_few_tokens(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and compiled, against the plain step."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = ours(ModelShape("small", batch, 64, "gelu").config("grassmann")).eval()
        ids = torch.randint(1000, (batch, 64))
    cache = StaticCache(config=model.config, max_cache_len=128)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    kept = [
        (layer.keys.clone(), layer.values.clone(), layer.cumulative_length.clone()) for layer in cache.layers
    ]

    def step(run: object) -> torch.Tensor:
        for layer, (keys, values, length) in zip(cache.layers, kept, strict=True):
            layer.keys.copy_(keys)
            layer.values.copy_(values)
            layer.cumulative_length.copy_(length)
        return run(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits  # type: ignore[operator]

    plain = step(model)
    monkeypatch.setattr(linears, "MOST_TOKENS", 64)
    torch.testing.assert_close(step(model), plain, rtol=1e-3, atol=1e-3)
    compiled = torch.compile(model, dynamic=False, fullgraph=True)
    torch.testing.assert_close(step(compiled), plain, rtol=1e-3, atol=1e-3)
