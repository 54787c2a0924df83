"""The experts of one token without a list: against the loop in fp64, and in place of the list in a layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe.experts import Dispatch, ExpertWeights, one_token
from grmoe.experts.one_token import one_token_experts
from grmoe.experts.reference import reference_experts
from grmoe.kernels import one_token as module
from grmoe.layer import MoE
from grmoe.routing import GrassmannRouter, Mass, TopK


def gates(N: int, chosen: list[int]) -> tuple[Tensor, Tensor]:
    weights, selected = torch.zeros(1, N), torch.zeros(1, N, dtype=torch.bool)
    selected[0, chosen] = True
    weights[0, chosen] = torch.rand(len(chosen), generator=torch.Generator().manual_seed(N)) + 0.1
    return weights, selected


# Width, experts, width of an expert: even and odd, of one tile and of several.
SIZES = [(40, 6, 24), (1030, 3, 33), (24, 16, 1100)]


@torch.no_grad()
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("chosen", [[], [2], [0, 2]], ids=str)
def test_output(size: tuple[int, int, int], chosen: list[int], activation: Any) -> None:
    D, N, I = size
    torch.manual_seed(0)
    experts, x = ExpertWeights(D, I, N, activation), 2 * torch.randn(1, D)
    weights, selected = gates(N, chosen)
    found = one_token_experts(x, weights, selected, experts, 2)
    wide = Dispatch.build(weights.double(), selected, 2)
    exact = reference_experts(x.double(), wide, copy.deepcopy(experts).double())
    # Sums of up to 2200 products in fp32.
    torch.testing.assert_close(
        found.double(), exact, rtol=1e-5, atol=1e-5 * max(1.0, float(exact.abs().max()))
    )


@torch.no_grad()
def test_experts_that_are_not_chosen_are_not_read_and_weights_may_be_zero() -> None:
    torch.manual_seed(0)
    experts, x = ExpertWeights(40, 24, 6), torch.randn(1, 40)
    weights, selected = gates(6, [1, 4])
    plain = one_token_experts(x, weights, selected, experts, 3)
    for expert in (0, 2, 3, 5):
        experts.up[expert] = float("nan")
        experts.down_proj[expert] = float("nan")
    weights[0, 0] = float("nan")
    assert torch.equal(one_token_experts(x, weights, selected, experts, 3), plain)
    weights[0, 1] = 0.0
    assert one_token_experts(x, weights, selected, experts, 3).isfinite().all()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the kernels ran."""
    found: list[int] = []
    plain = module.experts
    monkeypatch.setattr(one_token, "ENABLED", True)
    monkeypatch.setattr(
        module, "experts", lambda *args, **options: found.append(1) or plain(*args, **options)
    )
    return found


@pytest.mark.parametrize("selection", [TopK(2, renormalize=False), Mass(0.8, cap=3)], ids=str)
def test_a_layer_takes_it_for_one_token_without_gradients(selection: Any, calls: list[int]) -> None:
    torch.manual_seed(0)
    moe = MoE(
        40, 24, 6, GrassmannRouter(40, 6, 4, selection=selection), backend="triton", shared_experts=1
    ).eval()
    x = torch.randn(3, 1, 40)
    want = moe(x)
    assert calls == []  # gradients are on
    with torch.no_grad():
        moe(x)
        assert calls == []  # three tokens
        for token, expected in zip(x, want, strict=True):
            torch.testing.assert_close(moe(token), expected, rtol=1e-4, atol=1e-5)
        assert len(calls) == 3
        moe.use_backend("reference")
        torch.testing.assert_close(moe(x[0]), want[0], rtol=1e-4, atol=1e-5)
        assert len(calls) == 3


@torch.no_grad()
def test_identity_experts_and_compiled_layers(calls: list[int]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    router = GrassmannRouter(40, 7, 4, selection=TopK(3, renormalize=False), identity=1)
    moe = MoE(40, 24, 6, router, backend="triton").eval()
    x = torch.randn(1, 40)
    found = moe(x)
    assert calls == [1]
    moe.use_backend("reference")
    torch.testing.assert_close(found, moe(x), rtol=1e-4, atol=1e-5)
    moe.use_backend("triton")
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), found, rtol=1e-5, atol=1e-6)
