"""Gates of several kernels (amortised, with a linear term, raw) against the same router by torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe.kernels import choose
from grmoe.routing import GrassmannRouter, Mass, TopK

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

D, N = 16, 5
VARIANTS: list[dict[str, Any]] = [
    {"amortizer": "affinity"},
    {"amortizer": "input", "concentration": "diagonal", "amortizer_hidden": 6},
    {"amortizer": "matrix", "amortizer_hidden": 300},  # more than the kernel's columns
    {"amortizer": "affinity", "concentration": "diagonal", "dial": "likelihood"},
    {"linear": True},
    {"scaling": "raw", "kappa": 0.3},
    {"scaling": "raw", "linear": True, "amortizer": "input", "kappa": 0.3, "selection": Mass(0.7, cap=3)},
]


def make(dim: int = D, **options: Any) -> GrassmannRouter:
    torch.manual_seed(0)
    router = GrassmannRouter(dim, N, 3, **{"selection": TopK(2), **options})
    with torch.no_grad():
        for p in router.parameters():
            if p is not router.frames:
                p += 0.3 * torch.randn(p.shape)
        router.log_prior += 0.5 * torch.randn(N)
    return router


def run(router: GrassmannRouter, x: Tensor) -> tuple[Any, list[Tensor]]:
    leaf = x.clone().requires_grad_()
    routing = router(leaf)
    weight = torch.randn(routing.weights.shape, generator=torch.Generator().manual_seed(3))
    (weight * (routing.weights + routing.logits)).sum().backward()
    grads = [leaf.grad, *(p.grad for p in router.parameters())]
    assert all(g is not None for g in grads)
    return routing, grads  # type: ignore[return-value]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_it_is_the_gate(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Routing and every gradient while training, and the routing of few tokens afterwards."""
    used: list[int] = []
    original = choose.choose
    monkeypatch.setattr(choose, "choose", lambda *a, **k: used.append(1) or original(*a, **k))
    router, x = make(**options), torch.randn(3, 7, D, generator=torch.Generator().manual_seed(1))
    x[1, 2] = 0  # padding
    plain = copy.deepcopy(router)
    router.backend, plain.backend = "triton", "reference"
    (ours, our_grads), (expected, grads) = run(router, x), run(plain, x)
    assert used == [1]
    assert torch.equal(ours.selected, expected.selected)
    for name in ("logits", "probs", "weights"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
    for ours_grad, grad in zip(our_grads, grads, strict=True):
        torch.testing.assert_close(ours_grad, grad, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        few, few_plain = router.eval()(x), plain.eval()(x)
    assert used == [1, 1]
    torch.testing.assert_close(few.logits, few_plain.logits, rtol=1e-4, atol=1e-4)


def test_a_learned_alpha_and_an_odd_width() -> None:
    router, x = make(18, amortizer="input", linear=True), torch.randn(9, 18)
    router.learn_alpha()
    plain = copy.deepcopy(router)
    router.backend, plain.backend = "triton", "reference"
    (ours, our_grads), (expected, grads) = run(router, x), run(plain, x)
    torch.testing.assert_close(ours.weights, expected.weights, rtol=1e-4, atol=1e-4)
    for ours_grad, grad in zip(our_grads, grads, strict=True):
        torch.testing.assert_close(ours_grad, grad, rtol=1e-3, atol=1e-3)


def test_alpha_of_each_sequence() -> None:
    router, x = make(amortizer="affinity").eval(), torch.randn(3, 4, D)
    router.alpha_value = torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1)
    plain = copy.deepcopy(router)
    router.backend, plain.backend = "triton", "reference"
    with torch.no_grad():
        torch.testing.assert_close(router(x).probs, plain(x).probs, rtol=1e-4, atol=1e-4)
