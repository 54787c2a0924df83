"""The gate for few tokens against the gate for many: the same numbers by other kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe.kernels import thin_gate
from grmoe.routing import GrassmannRouter, Mass, Router, Routing, SoftmaxRouter, TopK

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

ROUTERS: dict[str, tuple[type[Router], dict[str, Any]]] = {
    "scalar": (GrassmannRouter, {"rank": 20, "selection": TopK(2)}),
    "diagonal": (GrassmannRouter, {"rank": 7, "concentration": "diagonal", "selection": Mass(0.6, cap=3)}),
    "likelihood": (GrassmannRouter, {"rank": 16, "dial": "likelihood", "selection": TopK(3)}),
    "linear": (SoftmaxRouter, {"balance": True, "selection": TopK(2, renormalize=False)}),
}


def make(kind: str, D: int, N: int) -> Router:
    torch.manual_seed(0)
    build, options = ROUTERS[kind]
    router = build(D, N, **options).eval()
    with torch.no_grad():
        router.log_prior += 0.5 * torch.randn(N)
        if isinstance(router, GrassmannRouter):
            router.log_kappa += 0.4 * torch.randn(router.log_kappa.shape)
    router.backend = "triton"
    return router


def tokens(T: int, D: int) -> Tensor:
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    x[T // 2] = 0  # padding
    return x


@torch.no_grad()
@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize(("T", "D", "N"), [(1, 32, 5), (17, 264, 5), (70, 32, 20)])
def test_it_is_the_gate(kind: str, T: int, D: int, N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token, widths and ranks of more than one part, tokens and experts of more than one tile."""
    router, x, used = make(kind, D, N), tokens(T, D), []
    original = thin_gate.sum_parts
    monkeypatch.setattr(thin_gate, "sum_parts", lambda *a: used.append(1) or original(*a))
    ours = router(x)
    assert used == [1]
    router.backend = "reference"
    plain = router(x)
    assert torch.equal(ours.selected, plain.selected)
    for name in ("logits", "probs", "weights"):
        torch.testing.assert_close(getattr(ours, name), getattr(plain, name), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(thin_gate, "MOST_TOKENS", 0)
    router.backend = "triton"
    assert torch.equal(router(x).selected, ours.selected)
    assert used == [1]


def test_training_never_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing runs the forward without gradients and again with them: both must round alike."""
    monkeypatch.setattr(thin_gate, "sum_parts", lambda *_: pytest.fail("used"))
    router, x = make("scalar", 32, 5), tokens(6, 32)
    router.train()
    with torch.no_grad():
        without = router(x)
    assert torch.equal(router(x).logits, without.logits)
    router.eval()
    router(x).weights.sum().backward()  # a gradient is wanted
    assert isinstance(router, GrassmannRouter)
    assert router.frames.grad is not None


@torch.no_grad()
def test_a_nan_token_touches_no_other() -> None:
    router, x = make("scalar", 32, 5), tokens(9, 32)
    clean: Routing = router(x)
    x[4, 3] = float("nan")
    found = router(x)
    others = torch.arange(9) != 4
    assert torch.equal(found.logits[others], clean.logits[others])
    assert found.logits[4].isnan().all()


@torch.no_grad()
def test_strided_frames() -> None:
    """`matrix` may be a view, such as one expert's share of a larger tensor."""
    router, x = make("scalar", 32, 5), tokens(9, 32)
    operands = router.gate_operands()
    assert operands is not None
    turned = replace(operands, matrix=operands.matrix.transpose(1, 2).contiguous().transpose(1, 2))
    from grmoe.routing.fused import fused_gate

    ours, plain = (fused_gate(x, each, router.alpha_value, router.budget) for each in (turned, operands))
    assert torch.equal(ours.logits, plain.logits)
