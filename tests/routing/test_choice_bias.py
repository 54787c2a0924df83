"""Experts chosen by gate and bias, and weighted by the gate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grmoe.kernels.combine import combine_weights
from grmoe.routing import GrassmannRouter, Mass, Selection, TopK
from grmoe.routing.budget import Budget
from grmoe.routing.selection import NO_LIMIT

D, N = 16, 6
FACTORS = [0.3, 5.0, 1.0, 2.0, 0.1, 1.0]
BIAS = [math.log(f) for f in FACTORS]


def make(selection: Selection, bias: list[float] | None = BIAS, biased: bool = True) -> GrassmannRouter:
    router = GrassmannRouter(D, N, 4, selection=selection, generator=torch.Generator().manual_seed(0))
    router.backend = "reference"
    router.budget.biased = biased
    router.budget.set_numbers(float(router.budget.tau), int(router.budget.cap), bias)
    return router.eval()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "selection", [TopK(1), TopK(3), Mass(0.6, cap=4), Mass(0.4), TopK(2, renormalize=True)], ids=str
)
def test_against_a_loop(selection: Any) -> None:
    routing = make(selection)(tokens(200))
    tau = selection.tau if isinstance(selection, Mass) else NO_LIMIT
    most = selection.max_experts(N)
    differs = 0
    for row, gate in enumerate(routing.probs.double().tolist()):
        shares = [g * n for g, n in zip(gate, FACTORS, strict=True)]
        whole, held, kept = sum(shares), 0.0, []
        for e in sorted(range(N), key=lambda e: -shares[e]):
            if len(kept) < most and (not kept or held < tau * whole):
                held += shares[e]
                kept.append(e)
        assert routing.selected[row].nonzero().flatten().tolist() == sorted(kept)
        scale = sum(gate[e] for e in kept) if selection.renormalize else 1.0
        wanted = torch.tensor([gate[e] / scale if e in kept else 0.0 for e in range(N)])
        torch.testing.assert_close(routing.weights[row], wanted)
        differs += set(kept) != set(sorted(range(N), key=lambda e: -gate[e])[: len(kept)])
    assert differs > 20  # the bias changes the choice of many tokens


def test_renormalised_weights_where_all_chosen_gates_vanish() -> None:
    """g_e/Σg was 0/0, and NaN went into the output and into every gradient of the router."""
    router = make(TopK(2, renormalize=True), bias=[0.0, 0.0, 0.0, 0.0, 9e3, 9e3])
    with torch.no_grad():
        router.log_prior[4:] = -200.0
    routing, upstream = router(tokens(50)), torch.randn(50, N, generator=torch.Generator().manual_seed(2))
    assert not routing.probs[:, 4:].any()  # zero in fp32
    assert routing.selected.nonzero()[:, 1].tolist() == [4, 5] * 50
    apart_T = (routing.logits[:, 4] - routing.logits[:, 5]).double()
    torch.testing.assert_close(routing.weights[:, 4], torch.sigmoid(apart_T).float())
    torch.testing.assert_close(routing.weights.sum(-1), torch.ones(50))
    (found,) = torch.autograd.grad((routing.weights * upstream).sum(), routing.logits)
    slope_T = torch.sigmoid(apart_T) * torch.sigmoid(-apart_T) * (upstream[:, 4] - upstream[:, 5])
    wanted = torch.zeros(50, N, dtype=torch.float64)
    wanted[:, 4], wanted[:, 5] = slope_T, -slope_T
    torch.testing.assert_close(found, wanted.float())
    routing = router(tokens(50))
    (routing.weights * upstream).sum().backward()
    assert bool(torch.isfinite(router.frames.grad).all())


def test_a_row_without_any_expert_has_no_weight() -> None:
    logits = torch.randn(3, N, generator=torch.Generator().manual_seed(3)).requires_grad_()
    chosen = torch.tensor([[False] * N, [True] * N, [True] + [False] * (N - 1)])
    weights = combine_weights(logits, logits.softmax(-1), chosen, renormalize=True)
    assert not weights[0].any()
    torch.testing.assert_close(weights[1], logits[1].softmax(-1))
    assert weights[2].tolist() == [1.0] + [0.0] * (N - 1)
    (found,) = torch.autograd.grad(weights.square().sum(), logits)
    assert bool(torch.isfinite(found).all())


def test_without_a_bias_or_with_an_equal_one_the_gate_chooses() -> None:
    x = tokens(200)
    plain = make(Mass(0.5, cap=3), bias=None, biased=False)(x)
    none = make(Mass(0.5, cap=3), bias=None)(x)
    equal = make(Mass(0.5, cap=3), bias=[2.0] * N)(x)
    for name in ("logits", "probs", "weights", "selected"):
        assert torch.equal(getattr(none, name), getattr(plain, name))
        assert torch.equal(getattr(equal, name), getattr(plain, name))


def test_one_bias_for_each_sequence() -> None:
    x = tokens(2, 50)
    router = make(TopK(2))
    router.budget.bias = torch.tensor([BIAS, [0.0] * N]).unsqueeze(1)
    mixed = router(x)
    for row, bias in enumerate((BIAS, None)):
        assert torch.equal(mixed.selected[row], make(TopK(2), bias=bias)(x).selected[row])
    assert not torch.equal(make(TopK(2))(x).selected, make(TopK(2), bias=None)(x).selected)
    router.budget.set_bias(BIAS)
    assert torch.equal(router.budget.bias, torch.tensor(BIAS))


def test_with_an_alpha_of_the_weights_both_hold() -> None:
    x = tokens(100)
    router = make(TopK(2))
    router.alpha = 3.0
    router.budget.set_weight_alpha(1.0)
    found = router(x)
    router.budget.set_weight_alpha(None)
    assert torch.equal(found.selected, router(x).selected)
    router.alpha = 1.0
    torch.testing.assert_close(found.probs, router(x).probs)


def test_a_bias_is_checked_and_allowed_before() -> None:
    budget = Budget(TopK(2), N)
    with pytest.raises(ValueError, match="a bias needs a budget with biased = True"):
        budget.set_bias(BIAS)
    budget.biased = True
    with pytest.raises(ValueError, match="bias must have one number per expert, 6, got 2"):
        budget.set_bias([1.0, 2.0])
    with pytest.raises(ValueError, match="bias must be a finite number"):
        budget.set_bias([math.nan, *BIAS[1:]])
    before = budget.bias
    budget.set_numbers(NO_LIMIT, 1, BIAS)
    assert budget.bias is before  # in place, so that captured graphs see it
    assert torch.equal(budget.bias, torch.tensor(BIAS))
    budget.set_numbers(NO_LIMIT, 1)
    assert not budget.bias.any()
    budget.set_bias(BIAS)
    budget.set_bias(None)
    assert not budget.bias.any()
