"""Budgets of a whole model: what is random, what it is drawn from, what priors count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from grmoe.routing import (
    FULL,
    Dense,
    Elastic,
    GrassmannRouter,
    Mass,
    Selection,
    SwitchRouter,
    Threshold,
    TopK,
    routers,
    set_balances,
    set_draw,
    set_elastic,
)
from grmoe.routing.elastic import step_key


def model(*selections: Selection) -> nn.Sequential:
    return nn.Sequential(*(GrassmannRouter(8, 4, 2, selection=s) for s in selections))


def test_each_layer_of_ones_own_model_draws_its_own_budgets() -> None:
    found = model(*[TopK(3)] * 4)
    set_elastic(found, Elastic("layer", "count"))
    x = torch.randn(5, 8)
    counts = []
    for step in range(20):
        set_draw(found, step_key(0, step))
        counts.append([int(router.train()(x).selected.sum(-1)[0]) for router in routers(found)])
    assert any(len(set(layers)) > 1 for layers in counts)


def test_random_budgets_are_set_for_all_routers_or_none() -> None:
    found = model(TopK(2), Mass(0.9))
    set_elastic(found, Elastic("layer", "count"))
    assert [r.budget.elastic for r in routers(found)] == [Elastic("layer", "count")] * 2
    set_elastic(found, None)
    assert [r.budget.elastic for r in routers(found)] == [None, None]
    for wrong in (TopK(1), Mass(0.9, cap=1), Threshold(0.3), Dense()):
        mixed = model(TopK(2), wrong)
        with pytest.raises(
            ValueError, match="elastic needs a selection TopK or Mass with more than one expert"
        ):
            set_elastic(mixed, Elastic())
        assert [r.budget.elastic for r in routers(mixed)] == [None, None]
        set_elastic(mixed, None)
    with pytest.raises(ValueError, match="in a SwitchRouter"):
        set_elastic(SwitchRouter(8, 4), Elastic())


def test_random_budgets_by_mass_are_refused_where_the_budget_is_a_least_weight() -> None:
    """min(τ, u) of a negative τ is τ: every step would compute the same, without a word."""
    torch.manual_seed(0)
    found = model(TopK(3), TopK(3))
    found[1].budget.set_numbers(-0.25, 3)
    with pytest.raises(ValueError, match=r"draw nothing.*a least weight.*set_budget\(None\)"):
        set_elastic(found, Elastic())
    assert [r.budget.elastic for r in routers(found)] == [None, None]
    set_elastic(found, None)
    found[1].budget.tau = torch.tensor([0.5, -0.25]).view(2, 1, 1)  # one sequence is enough
    with pytest.raises(ValueError, match="draw nothing"):
        set_elastic(found, Elastic())
    found[1].budget.set_numbers(-0.1, 3)
    set_elastic(found, Elastic(rule="count"))  # the cap is drawn whatever τ is
    x, counts = torch.randn(40, 8), set()
    for step in range(5):
        set_draw(found, step_key(0, step))
        counts.add(int(found[1].train()(x).selected.sum()))
    assert len(counts) > 1
    found[1].budget.set_numbers(0.5, 3)
    set_elastic(found, Elastic())


def test_draws_are_filled_in_place() -> None:
    """In place, because captured graphs read the same memory."""
    found = model(TopK(2), TopK(3))
    tensors = [(r.budget.key, r.budget.first_row) for r in routers(found)]
    for key, row in ((2**31 - 1, 2**40 + 1), (FULL, 0), (5, 3)):
        set_draw(found, key, row)
        assert [(int(k), int(f)) for k, f in tensors] == [(key, row)] * 2
        for router, (k, f) in zip(routers(found), tensors, strict=True):
            assert router.budget.key is k
            assert router.budget.first_row is f
    set_draw(nn.Linear(2, 2), 5, 3)  # nothing to fill


def test_budgets_are_full_until_a_key_is_set() -> None:
    torch.manual_seed(0)
    found = model(TopK(3))
    set_elastic(found, Elastic(rule="count"))
    x = torch.randn(4, 16, 8)
    experts = lambda: set(found[0](x).selected.sum(-1).unique().tolist())  # noqa: E731
    assert experts() == {3}
    set_draw(found, 11)
    assert experts() == {1, 2, 3}
    found.eval()
    assert experts() == {3}


def test_priors_count_what_they_are_told() -> None:
    found = model(TopK(2), Dense())
    set_balances(found, "candidates")
    assert [r.budget.balances for r in routers(found)] == ["candidates", "leading"]
    with pytest.raises(ValueError, match="balances must be one of"):
        set_balances(found, "all")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["candidates", "leading", "both"])
def test_priors_count_what_is_computed_while_the_choice_has_numbers_of_its_own(kind: Any) -> None:
    found = model(TopK(2), TopK(2))
    first, second = (router.budget for router in routers(found))
    first.set_weight_alpha(1.0)
    set_balances(found, kind)
    assert [first.balances, second.balances] == ["computed", kind]
    first.set_weight_alpha(None)
    second.biased = True
    assert [first.balances, second.balances] == [kind, "computed"]
