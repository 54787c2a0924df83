"""Budgets in the fused gate: numbers on the device, one per sequence, drawn, and weights at an α of their own.

The specification is the router's own PyTorch path in fp64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe.routing import (
    AtLeast,
    Dense,
    GrassmannRouter,
    Mass,
    Router,
    Routing,
    SoftmaxRouter,
    Threshold,
    TopK,
)
from grmoe.routing.elastic import FULL, Elastic
from grmoe.routing.fused import try_fused

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

B, S, D, N = 5, 13, 16, 6


def make(kind: str, **options: Any) -> Router:
    torch.manual_seed(1)
    router: Router = (
        GrassmannRouter(D, N, 7, **options) if kind == "grassmann" else SoftmaxRouter(D, N, **options)
    )
    with torch.no_grad():
        router.log_prior += 0.5 * torch.randn(N)
    return router


def tokens(*shape: int) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(*shape, D, generator=g) * torch.exp(torch.randn(*shape, 1, generator=g))


def both(router: Router, x: Tensor) -> tuple[Routing, Routing]:
    """By the kernel, and by PyTorch in fp64."""
    fused = try_fused(
        x, router.gate_operands, router.gate_parts, router.alpha_value, router.budget, router.training, None
    )
    assert fused is not None
    return fused, copy.deepcopy(router).double().route(x.double(), None)


def assert_same(fused: Routing, plain: Routing) -> None:
    assert torch.equal(fused.selected, plain.selected)
    for name in ("logits", "probs", "weights"):
        torch.testing.assert_close(getattr(fused, name).double(), getattr(plain, name), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["grassmann", "softmax"])
def test_numbers_change_what_a_built_gate_selects(kind: str) -> None:
    router, x = make(kind, selection=TopK(4)), tokens(B, S)
    counts = []
    for tau, cap in ((None, 4), (0.5, 4), (0.5, 2), (1e-6, 4), (None, 3)):
        router.selection = TopK(4)  # no τ
        if tau is not None:
            router.tau = tau
        router.cap = cap
        fused, plain = both(router, x)
        assert_same(fused, plain)
        wanted = TopK(cap) if tau is None else Mass(tau, cap=cap)
        assert torch.equal(fused.selected, wanted(plain.probs))
        counts.append(float(fused.selected.sum(-1).float().mean()))
    assert (counts[0], counts[3], counts[4]) == (4, 1, 3)
    assert 1 < counts[2] <= 2
    assert counts[2] < counts[1] < 4


@pytest.mark.parametrize("kind", ["grassmann", "softmax"])
def test_least_weights(kind: str) -> None:
    """As a policy, and as a negative τ of another one; for a token of NaN too."""
    router, x = make(kind, selection=AtLeast(0.2, cap=3)), tokens(B, S)
    counts = []
    for weight, cap in ((0.2, 3), (0.13, 3), (0.13, 2), (1.0, 3), (1e-6, 3)):
        router.selection = AtLeast(weight, cap=3)
        router.cap = cap
        fused, plain = both(router, x)
        assert_same(fused, plain)
        assert torch.equal(fused.selected, AtLeast(weight, cap)(plain.probs))
        counts.append(float(fused.selected.sum(-1).float().mean()))
        router.selection = TopK(3)
        router.budget.set_numbers(-weight, cap)
        assert torch.equal(both(router, x)[0].selected, fused.selected)
    assert counts[3] == 1 < counts[0] < counts[1] < 3
    assert counts[4] == 3
    assert counts[2] <= 2
    router.budget.set_numbers(-0.2, 3)
    x[0, 0] = torch.nan
    assert int(both(router, x)[0].selected[0, 0].sum()) == 1


def test_mass_and_least_weights_in_one_batch() -> None:
    """Budgets of different curves may meet in one batch: the sign of τ is a number of a sequence as well."""
    router, x = make("grassmann", selection=TopK(3)), tokens(B, S)
    taus = [0.6, -0.2, 2.0, -0.05, -1.0]
    router.budget.tau = torch.tensor(taus).view(-1, 1, 1)
    router.budget.cap = torch.full((B, 1, 1), 3, dtype=torch.int32)
    router.alpha_value = torch.ones(B, 1, 1)
    with torch.no_grad():
        fused, plain = both(router, x)
    assert_same(fused, plain)
    rules: list[Any] = [Mass(0.6, 3), AtLeast(0.2, 3), TopK(3), AtLeast(0.05, 3), TopK(1)]
    for row, rule in enumerate(rules):
        assert torch.equal(fused.selected[row], rule(plain.probs[row]))


@pytest.mark.parametrize("selection", [TopK(4), Mass(0.7, cap=3), AtLeast(0.2, cap=3), Threshold(0.2)])
@pytest.mark.parametrize("kind", ["grassmann", "softmax"])
def test_one_number_per_sequence(kind: str, selection: Any) -> None:
    """Every sequence gets what it would get alone."""
    router, x = make(kind, selection=selection), tokens(B, S)
    alphas, taus, caps = [0.5, 1.0, 2.0, 1.0, 3.0], [0.9, 0.3, 0.6, 1.0, 0.3], [3, 1, 2, 3, 2]
    alone = []
    for row in range(B):
        router.alpha, router.budget.tau[...] = alphas[row], taus[row]
        if not isinstance(selection, Threshold):
            router.cap = caps[row]
        alone.append(both(router, x[row : row + 1])[1])
    router.alpha_value = torch.tensor(alphas).view(-1, 1, 1)
    router.budget.tau = torch.tensor(taus).view(-1, 1, 1)
    if not isinstance(selection, Threshold):
        router.budget.cap = torch.tensor(caps, dtype=torch.int32).view(-1, 1, 1)
    with torch.no_grad():
        fused, plain = both(router, x)
    assert_same(fused, plain)
    for row, one in enumerate(alone):
        assert torch.equal(plain.selected[row], one.selected[0])
        torch.testing.assert_close(plain.weights[row], one.weights[0], rtol=1e-6, atol=1e-7)


def test_numbers_per_sequence_leave_gradients_to_torch() -> None:
    router, x = make("grassmann", selection=TopK(2)), tokens(B, S)
    router.alpha_value = torch.ones(B, 1, 1)
    assert (
        try_fused(x, router.gate_operands, router.gate_parts, router.alpha_value, router.budget, True, None)
        is None
    )
    with torch.no_grad():
        flat = x.reshape(-1, D)  # no sequences to tell apart
        gate = (router.gate_operands, router.gate_parts)
        assert try_fused(flat, *gate, router.alpha_value, router.budget, True, None) is None


@pytest.mark.parametrize("unit", ["token", "sequence", "layer", "step"])
@pytest.mark.parametrize(("kind", "rule"), [("grassmann", "mass"), ("softmax", "count")])
def test_drawn_budgets(kind: str, rule: Any, unit: Any) -> None:
    router, x = make(kind, selection=TopK(4)), tokens(B, S)
    router.budget.elastic, router.budget.layer = Elastic(unit, rule), 3
    seen = set()
    for key, first_row in ((7, 0), (7, 40), (2**31 - 1, 3), (FULL, 0)):
        router.budget.key.fill_(key)
        router.budget.first_row.fill_(first_row)
        fused, plain = both(router.train(), x)
        assert_same(fused, plain)
        seen.add(tuple(fused.selected.flatten().tolist()))
    assert bool((fused.selected.sum(-1) == 4).all())  # FULL
    assert len(seen) == (
        4 if unit in ("token", "sequence") else 3
    )  # the row does not matter for a layer or a step
    router.budget.key.fill_(7)
    fused, plain = both(router.eval(), x)  # nothing is drawn in eval mode
    assert_same(fused, plain)
    assert bool((fused.selected.sum(-1) == 4).all())


@pytest.mark.parametrize("kind", ["grassmann", "softmax"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_weights_at_their_own_alpha(kind: str, renormalize: bool) -> None:
    router, x = make(kind, selection=Mass(0.8, renormalize=renormalize)), tokens(B, S)
    dull = both(router, x)[1]
    router.alpha = 4.0
    sharp = both(router, x)[1]
    router.budget.set_weight_alpha(1.0)
    fused, plain = both(router, x)
    assert_same(fused, plain)
    assert torch.equal(plain.selected, sharp.selected)  # the choice of α = 4
    assert not torch.equal(plain.selected, dull.selected)
    torch.testing.assert_close(plain.probs, dull.probs)  # the gate of α = 1
    router.budget.set_weight_alpha(None)
    assert_same(*both(router, x))
    torch.testing.assert_close(both(router, x)[1].weights, sharp.weights)


@pytest.mark.parametrize("kind", ["grassmann", "softmax"])
def test_gradients_at_the_weights_alpha(kind: str) -> None:
    router, x = make(kind, selection=Mass(0.8)), tokens(B, S)
    router.alpha = 4.0
    router.budget.set_weight_alpha(0.7)
    upstream = torch.randn(B, S, N, generator=torch.Generator().manual_seed(3))
    exact = copy.deepcopy(router).double()
    for one, given in ((router, x), (exact, x.double())):
        leaf = given.clone().requires_grad_()
        gate = (one.gate_operands, one.gate_parts)
        fused = try_fused(leaf, *gate, one.alpha_value, one.budget, True, None)
        routing = one.route(leaf, None) if fused is None else fused
        assert (fused is None) == (one is exact)
        (routing.weights * upstream.to(leaf.dtype)).sum().backward()
        one.token_grad = leaf.grad  # type: ignore[assignment]
    pairs = [(router.token_grad, exact.token_grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(router.parameters(), exact.parameters(), strict=True)]
    for ours, want in pairs:
        torch.testing.assert_close(ours.double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_a_dense_gate_has_no_budget() -> None:
    router, x = make("grassmann", selection=Dense()), tokens(B, S)
    router.budget.elastic = Elastic()
    router.budget.key.fill_(5)
    fused, plain = both(router.train(), x)
    assert_same(fused, plain)
    assert bool(fused.selected.all())
    with pytest.raises(
        ValueError, match="selection must be one of TopK, Mass, AtLeast, Threshold to change this, got Dense"
    ):
        router.tau = 0.5


def test_a_compiled_gate_follows_its_budget_without_recompiling() -> None:
    """Through the operator that a compiled model calls, forward and backward."""
    router, x = make("grassmann", selection=TopK(3)).train(), tokens(3, 7)
    router.backend = "triton"
    router.budget.elastic = Elastic()
    torch._dynamo.reset()
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    seen = set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for key in (5, 9, FULL):
            router.budget.key.fill_(key)
            results = []
            for one in (compiled, router):
                router.zero_grad()
                routing = one(x)
                routing.weights.square().sum().backward()
                grad = [p.grad for p in router.parameters() if p.grad is not None]
                results.append([routing.selected, routing.weights.detach(), *grad])
            for ours, plain in zip(*results, strict=True):
                torch.testing.assert_close(ours, plain)
            seen.add(int(results[0][0].sum()))
    assert len(seen) == 3


@pytest.mark.parametrize("selection", [TopK(2), Mass(0.7, cap=3), Mass(0.5, renormalize=True)])
@pytest.mark.parametrize("kind", ["grassmann", "softmax"])
def test_a_bias_for_the_choice(kind: str, selection: Any) -> None:
    router, x = make(kind, selection=selection), tokens(B, S)
    by_gate = both(router, x)[1]
    router.budget.biased = True
    bias = torch.linspace(-1.5, 1.5, N).tolist()
    router.budget.set_bias(bias)
    fused, plain = both(router, x)
    assert_same(fused, plain)
    assert torch.equal(plain.probs, by_gate.probs)
    assert not torch.equal(plain.selected, by_gate.selected)
    router.budget.set_weight_alpha(0.5)
    assert_same(*both(router, x))
    router.budget.set_weight_alpha(None)
    # One bias per sequence, with or without other numbers per sequence.
    rows = torch.tensor([bias, [0.0] * N, bias[::-1], bias, [0.0] * N])
    router.budget.bias = rows.unsqueeze(1)
    with torch.no_grad():
        mixed, plain_mixed = both(router, x)
    assert_same(mixed, plain_mixed)
    assert torch.equal(mixed.selected[0], fused.selected[0])
    assert torch.equal(mixed.selected[1], by_gate.selected[1])
