"""The whole layer on kernels: against the reference, compiled, checkpointed, repeated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from grmoe.kernels import gate as gate_module
from grmoe.layer import MoE
from grmoe.routing import Dense, Mass, Selection, Threshold, TopK, build_router

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

D, I, N = 16, 8, 3


def make(name: str = "grassmann", dim: int = D, **options: Any) -> MoE:
    torch.manual_seed(0)
    own: dict[str, Any] = {"rank": 4} if name == "grassmann" else {}
    return MoE(dim, I, N, build_router(name, dim, N, **own), backend="triton", **options)


def reference(moe: MoE) -> MoE:
    other = copy.deepcopy(moe)
    other.backend = other.router.backend = "reference"
    return other


def tokens(*shape: int, dim: int = D) -> Tensor:
    return torch.randn(*shape, dim, generator=torch.Generator().manual_seed(1))


def run(moe: Any, x: Tensor, parameters: Any = None) -> list[Tensor]:
    """Output, gradient of the input and of every parameter."""
    module = moe if parameters is None else parameters
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    y = moe(leaf)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


def assert_close(ours: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(ours, expected, strict=True):
        # fp32 sums of a few dozen terms of order one, in another order.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


SELECTIONS: list[Selection] = [Dense(), TopK(1, False), TopK(2), Mass(0.7), Threshold(0.3)]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_output_and_every_gradient(selection: Selection) -> None:
    moe = make(selection=selection, activation="gelu" if selection == TopK(2) else "swiglu")
    x = tokens(3, 7)
    assert_close(run(moe, x), run(reference(moe), x))


def test_no_tokens_and_shared_experts() -> None:
    moe = make(selection=TopK(2), shared_experts=1)
    assert moe(tokens(0)).shape == (0, D)
    assert_close(run(moe, tokens(5)), run(reference(moe), tokens(5)))


@pytest.mark.parametrize("name", ["grassmann", "softmax"])
def test_compiled_whole_it_equals_eager_and_takes_a_new_alpha(name: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    moe = make(name, selection=Mass(0.9, cap=2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe, backend=counter, fullgraph=True)
    x, outputs = tokens(8), []
    for alpha in (1.0, 3.0) if name == "grassmann" else (1.0,):
        moe.router.alpha = alpha
        moe.router.reset_metrics()
        ours = run(compiled, x, moe)
        sums = moe.router.counter.sums.clone()
        moe.router.reset_metrics()
        for a, b in zip(ours, run(moe, x), strict=True):
            assert torch.equal(a, b)  # the same kernels on the same numbers
        assert torch.equal(sums, moe.router.counter.sums)
        outputs.append(ours[0])
    assert counter.frame_count == 1
    assert len(outputs) == 1 or not torch.allclose(*outputs)


def test_compiled_in_eval_mode_it_follows_the_frames() -> None:
    torch._dynamo.reset()
    moe = make(selection=TopK(2)).eval()
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    x = tokens(9)
    with torch.no_grad():
        before = compiled(x)
        moe.router.get_parameter("frames").copy_(moe.router.get_parameter("frames").flip(0))
        assert not torch.equal(compiled(x), before)
        assert torch.equal(compiled(x), moe(x))


def test_compiled_with_a_kept_projection_it_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(gate_module, "KEPT_COLUMNS", 0)
    moe = make(selection=TopK(2))
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    for T in (9, 14):
        x = tokens(T)
        for a, b in zip(run(compiled, x, moe), run(moe, x), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit(reentrant: bool, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "KEPT_COLUMNS", 0 if keep else 10**9)
    moe = make(selection=Mass(0.8))
    x = tokens(2, 4)
    plain = run(moe, x)
    sums = moe.router.counter.sums.clone(), moe.router.prior_sums.clone()
    moe.router.reset_metrics()
    moe.router.prior_sums.zero_()
    again = run(lambda t: checkpoint(moe, t, use_reentrant=reentrant), x, moe)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert torch.equal(moe.router.counter.sums, sums[0])  # a token counts once
    assert torch.equal(moe.router.prior_sums, sums[1])


def test_repeated_runs_give_the_same_bits() -> None:
    moe = make(selection=Mass(0.9, cap=2))
    first, second = run(moe, tokens(12)), run(moe, tokens(12))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nan_token_touches_no_other() -> None:
    moe, x = make(selection=TopK(2)), tokens(12)
    clean = run(moe, x)
    x[5] = float("nan")
    ours = run(moe, x)
    keep = torch.arange(12) != 5
    assert ours[0][5].isnan().all()
    # Without a gate it goes elsewhere, and later tokens move up by a row. The interpreter's products depend on that.
    for a, b in zip(ours[:2], clean[:2], strict=True):
        torch.testing.assert_close(a[keep], b[keep], rtol=1e-6, atol=1e-7)


def test_truncation_bound_on_kernels() -> None:
    moe = make(selection=TopK(1))
    x = tokens(9)
    ours, plain = moe.truncation(x), reference(moe).truncation(x)
    torch.testing.assert_close(ours.bound, plain.bound, rtol=1e-4, atol=1e-5)
    assert bool((moe.truncation(x, exact=True).bound <= ours.bound).all())


def test_tokens_off_alignment() -> None:
    """A view that starts one element into its storage."""
    moe, x = make(selection=TopK(2)), tokens(9)
    shifted = torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)
    assert torch.equal(moe(shifted), moe(x))
