"""The MoE layer against a plain sum over experts, for every router and backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grmoe.experts import pick_backend
from grmoe.experts.weights import Activation, ExpertWeights
from grmoe.layer import MoE
from grmoe.routing import (
    ROUTERS,
    Dense,
    GrassmannRouter,
    Mass,
    Router,
    Selection,
    SwitchRouter,
    Threshold,
    TopK,
    build_router,
)

DIM, HIDDEN, N = 16, 24, 5


def make_router(name: str = "grassmann", **options: Any) -> Router:
    torch.manual_seed(0)
    if name == "grassmann":
        options["rank"] = 3
    return build_router(name, DIM, N, **options)


def layer(router: Router, **options: Any) -> MoE:
    torch.manual_seed(1)
    return MoE(DIM, HIDDEN, N, router, **options)


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def plain_expert(weights: ExpertWeights, e: int, x: Tensor) -> Tensor:
    inner = x @ weights.up[e].T
    if weights.activation == "gelu":
        return nn.functional.gelu(inner) @ weights.down_proj[e].T
    gate, up = inner[..., : inner.shape[-1] // 2], inner[..., inner.shape[-1] // 2 :]
    return (nn.functional.silu(gate) * up) @ weights.down_proj[e].T


def plain_sum(moe: MoE, x: Tensor) -> Tensor:
    routing = moe.router(x)
    return sum(routing.weights[..., e : e + 1] * plain_expert(moe.experts, e, x) for e in range(N))


SELECTIONS: list[Selection] = [Dense(), TopK(1), TopK(3), Mass(0.7), Mass(0.9, cap=2), Threshold(0.3)]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_output_and_every_gradient_equal_the_plain_sum(
    selection: Selection, activation: Activation, backend: Any
) -> None:
    moe = layer(make_router(selection=selection, linear=True), activation=activation, backend=backend)
    x, direction = tokens(3, 7), tokens(3, 7) ** 2
    results = []
    for run in (moe, lambda x: plain_sum(moe, x)):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        (y * direction).sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in moe.parameters())])
    for ours, plain in zip(*results, strict=True):
        assert ours is not None
        # fp32 sums of a few dozen terms of order one, in another order.
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", [n for n in ROUTERS if n != "soft_moe"])
@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_every_router_runs_through_the_layer(name: str, backend: Any) -> None:
    moe = layer(make_router(name), backend=backend)
    x = tokens(2, 9)
    torch.testing.assert_close(moe(x), plain_sum(moe, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_soft_moe_runs_through_the_layer(backend: Any) -> None:
    moe = layer(make_router("soft_moe", slots=2), backend=backend)
    x = tokens(3, 6)
    y, routing = moe.run(x)
    assert routing.slots is not None
    expected = torch.zeros_like(x)
    for b in range(3):
        for e in range(N):
            for p in range(2):
                slot = routing.slots.dispatch[b, :, e, p] @ x[b]
                expected[b] += torch.outer(
                    routing.slots.combine[b, :, e, p], plain_expert(moe.experts, e, slot)
                )
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    poisoned = x.clone()
    poisoned[1, 2] = float("nan")
    y = moe(poisoned)
    assert y[1, 2].isnan().all()
    keep = torch.ones(3, 6, dtype=torch.bool)
    keep[1, 2] = False
    assert y[keep].isfinite().all()


def test_gradcheck_in_fp64() -> None:
    torch.manual_seed(0)
    moe = MoE(6, 4, 3, GrassmannRouter(6, 3, 2, selection=Mass(0.8, cap=2))).double()
    x = tokens(4, dtype=torch.float64)[:, :6].clone().requires_grad_()
    assert pick_backend("auto", x).__name__ == "reference_experts"
    frames = moe.router.get_parameter("frames")
    assert torch.autograd.gradcheck(lambda x, *_: moe(x), (x, frames, moe.experts.up, moe.experts.down_proj))


def test_no_tokens_empty_experts_and_dropped_tokens() -> None:
    moe = layer(make_router(selection=TopK(2)), backend="grouped")
    empty = torch.zeros(0, DIM, requires_grad=True)
    assert moe(empty).shape == (0, DIM)
    one = tokens(1)  # three of five experts get nothing
    torch.testing.assert_close(moe(one), plain_sum(moe, one), rtol=1e-4, atol=1e-5)
    # Switch drops what exceeds capacity: such a token leaves the layer as zero.
    switch = SwitchRouter(DIM, N, capacity_factor=0.5)
    moe = layer(switch, backend="grouped")
    y, routing = moe.run(tokens(20))
    dropped = ~routing.selected.any(-1)
    assert dropped.any()
    assert (y[dropped] == 0).all()
    assert (y[~dropped].abs().sum(-1) > 0).all()


def test_nan_token_touches_no_other() -> None:
    moe = layer(make_router(selection=TopK(2)), backend="grouped")
    x = tokens(12)
    clean = moe(x)
    x[5] = float("nan")
    y = moe(x)
    keep = torch.arange(12) != 5
    torch.testing.assert_close(y[keep], clean[keep], rtol=1e-5, atol=1e-6)
    assert y[5].isnan().all()


def test_bf16_layer_keeps_its_router_in_fp32() -> None:
    moe = layer(make_router(selection=TopK(2)), backend="grouped")
    expected = moe(tokens(64)).detach()
    moe = moe.bfloat16()
    assert moe.experts.down_proj.dtype == torch.bfloat16
    assert moe.router.get_parameter("frames").dtype == torch.float32
    y = moe(tokens(64).bfloat16()).detach()
    assert y.dtype == torch.bfloat16
    # bf16 carries 8 bits; tokens rounded to bf16 may also swap a near tie, so compare in norm.
    assert ((y.float() - expected).norm() / expected.norm()).item() < 2e-2


def test_repeated_runs_give_the_same_bits() -> None:
    moe = layer(make_router(selection=Mass(0.9, cap=3)), backend="grouped")
    grads = []
    for _ in range(2):
        moe.zero_grad()
        x = tokens(40).requires_grad_()
        moe(x).square().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in moe.parameters() if p.grad is not None)])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_shared_experts_are_added_with_weight_one() -> None:
    moe = layer(make_router(selection=TopK(1)), shared_experts=2)
    assert moe.shared is not None
    assert moe.shared.down_proj.shape == (1, DIM, 2 * HIDDEN)
    x = tokens(6)
    expected = plain_sum(moe, x) + plain_expert(moe.shared, 0, x)
    torch.testing.assert_close(moe(x), expected, rtol=1e-4, atol=1e-5)


def test_compiles_whole_and_takes_a_new_alpha_without_recompiling() -> None:
    from torch._dynamo.testing import CompileCounter

    # bf16: the shape function of grouped_mm in torch 2.11–2.13 refuses fp32, which its kernel takes.
    moe = layer(make_router(selection=Mass(0.9, cap=3)), backend="grouped").bfloat16()
    counter = CompileCounter()
    compiled = torch.compile(moe, backend=counter, fullgraph=True)
    x, outputs = tokens(32).bfloat16(), []
    for alpha in (1.0, 3.0, 0.3):
        moe.router.alpha = alpha
        outputs.append(compiled(x))
        torch.testing.assert_close(outputs[-1], moe(x), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    assert not torch.allclose(outputs[0], outputs[1])


def test_default_router_and_mistakes() -> None:
    moe = MoE(DIM, HIDDEN, 4)
    assert isinstance(moe.router, GrassmannRouter)
    assert moe.router.rank == 4
    assert moe.router.selection == TopK(2)
    with pytest.raises(ValueError, match=r"router must be built for .* \(16, 4\), got \(16, 5\)"):
        MoE(DIM, HIDDEN, 4, make_router())
    with pytest.raises(ValueError, match=r"backend must be one of .* got 'cuda'"):
        MoE(DIM, HIDDEN, 4, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation must be one of"):
        ExpertWeights(4, 4, 2, "relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden must be an integer >= 1, got 0"):
        MoE(DIM, 0, 4)


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_selection_never_exceeds_its_own_bound(selection: Selection) -> None:
    g = torch.Generator().manual_seed(0)
    probs = torch.softmax(3 * torch.randn(2000, N, generator=g), -1)
    probs = torch.cat([probs, torch.full((1, N), 1 / N), torch.eye(N)])
    count = selection(probs).sum(-1)
    assert int(count.max()) <= selection.most(N)
    assert selection.most(N) <= N
