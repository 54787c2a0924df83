"""A router's budget: numbers that change without recompiling, and budgets drawn while training."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grmoe.routing import AtLeast, Dense, GrassmannRouter, Mass, Selection, SoftmaxRouter, Threshold, TopK
from grmoe.routing.elastic import FULL, Elastic, draw, mix, step_key
from grmoe.routing.selection import NO_LIMIT

D, N = 16, 6


def make(**options: Any) -> GrassmannRouter:
    router = GrassmannRouter(D, N, 4, generator=torch.Generator().manual_seed(0), **options)
    router.backend = "reference"
    return router


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))


def test_a_policy_fills_the_numbers() -> None:
    for policy, tau, cap in (
        (TopK(3), NO_LIMIT, 3), (Mass(0.5, cap=2), 0.5, 2), (Mass(0.25), 0.25, N), (Threshold(0.5), 0.5, N),
        (Dense(), NO_LIMIT, N),
    ):  # fmt: skip
        router = make(selection=policy)
        assert (float(router.budget.tau), router.cap) == (tau, cap)
        other = make(selection=Mass(0.75, cap=4))
        place = other.budget.tau.data_ptr()
        other.selection = policy
        assert (float(other.budget.tau), other.cap, other.selection) == (tau, cap, policy)
        assert other.budget.tau.data_ptr() == place  # in place: a captured graph sees it
    assert not [name for name in make().state_dict() if "budget" in name]


@pytest.mark.parametrize("policy", [TopK(3), Mass(0.5, cap=2), AtLeast(0.25, cap=3), Threshold(0.5)])
def test_tau_can_be_set_to_what_it_reads(policy: Selection) -> None:
    router = make(selection=policy)
    x = tokens(50, seed=7)
    before, numbers = router(x).selected, router.budget.tau.clone()
    router.tau = router.tau
    assert torch.equal(router.budget.tau, numbers)
    router.tau = 0.9
    router.tau = 1.0 if isinstance(policy, TopK) else float(abs(numbers))  # one is no limit for a top-k
    assert torch.equal(router(x).selected, before)


def test_a_choice_with_numbers_of_its_own_is_counted_as_computed() -> None:
    """The gate of the weights does not tell which experts were candidates."""
    for biased in (False, True):
        router = make(selection=TopK(2), alpha=3.0)
        router.budget.balances = "candidates"
        router.budget.biased = biased
        if biased:
            router.budget.set_bias([5.0] + [0.0] * (N - 1))
        else:
            router.budget.set_weight_alpha(0.0)
        routing = router.train()(tokens(200, seed=5))
        computed = routing.selected.float().sum(0) / 2
        torch.testing.assert_close(router.prior_sums[:N], computed)


def test_counts_and_biases_are_in_full_precision() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        router = make(selection=TopK(2))
        router.budget.biased = True
        router.budget.set_bias([1.001] * N)
        router.train()(torch.randn(3, D, dtype=torch.float32).repeat(40_000, 1))
    finally:
        torch.set_default_dtype(before)
    assert float(router.prior_sums[-1]) == 120_000
    assert float(router.budget.bias[0]) == pytest.approx(1.001, rel=1e-6)


def test_a_new_budget_is_full_and_both_numbers_are_set_together() -> None:
    budget = make(selection=TopK(3)).budget
    assert (int(budget.key), int(budget.first_row), budget.layer, budget.elastic) == (FULL, 0, 0, None)
    budget.set_numbers(0.5, 2)
    assert (float(budget.tau), int(budget.cap)) == (0.5, 2)
    with pytest.raises(ValueError, match="cap must be at most 3, the room of TopK"):
        budget.set_numbers(0.5, 4)
    assert (float(budget.tau), int(budget.cap)) == (0.5, 2)


def test_any_number_is_taken_and_bad_ones_are_refused() -> None:
    router = make(selection=TopK(3))
    router.tau, router.cap = np.float32(0.5), torch.tensor(2)
    assert (router.tau, router.cap) == (0.5, 2)
    for wrong in (0.0, 1.5, float("nan"), "0.5"):
        with pytest.raises(ValueError, match="tau must be"):
            router.tau = wrong
    with pytest.raises(ValueError, match="cap must be at most 3, the room of TopK"):
        router.cap = 4
    with pytest.raises(ValueError, match="cap must be an integer >= 1, got 0"):
        router.cap = 0
    assert (router.tau, router.cap) == (0.5, 2)
    above = make(selection=Threshold(0.5))
    above.tau = 0.6
    with pytest.raises(ValueError, match=r"tau must leave at most 2 experts, got 0\.1"):
        above.tau = 0.1
    with pytest.raises(
        ValueError, match="selection must be one of TopK, Mass, AtLeast to change this, got Threshold"
    ):
        above.cap = 1


def test_numbers_decide_what_is_selected() -> None:
    router, x = make(selection=TopK(4)), tokens(3, 11)
    probs = router(x).probs
    for tau, cap in ((0.9, 4), (0.4, 3), (0.2, 1)):
        router.tau, router.cap = tau, cap
        assert torch.equal(router(x).selected, Mass(tau, cap=cap)(probs))


def test_no_number_recompiles() -> None:
    router, x = make(selection=TopK(4)).eval(), tokens(3, 11)
    torch._dynamo.reset()
    compiled = torch.compile(router, fullgraph=True, backend="eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tau, cap in ((0.9, 4), (0.4, 3), (0.2, 1)):
            router.tau, router.cap = tau, cap
            assert torch.equal(compiled(x).selected, router(x).selected)
            assert bool((compiled(x).selected.sum(-1) <= cap).all())


def test_training_with_draws_does_not_recompile() -> None:
    router, x = make(selection=TopK(4)).train(), tokens(3, 11)
    router.budget.elastic = Elastic()
    torch._dynamo.reset()
    compiled = torch.compile(router, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        masks = []
        for key in (1, 2, FULL):
            router.budget.key.fill_(key)
            masks.append(compiled(x).selected)
            assert torch.equal(masks[-1], router(x).selected)
    assert not torch.equal(masks[0], masks[1])


def test_a_draw_is_uniform_and_its_own_for_each_key_layer_and_index() -> None:
    index = torch.arange(20_000)
    u = draw(torch.tensor(12), 3, index)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    counts = torch.histc(u, bins=20, min=0, max=1)
    chi2 = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi2 < 45  # 19 degrees of freedom: one in a thousand
    for other in (draw(torch.tensor(13), 3, index), draw(torch.tensor(12), 4, index), u.roll(1)):
        assert abs(float(torch.corrcoef(torch.stack([u, other]))[0, 1])) < 0.03
    assert torch.equal(draw(torch.tensor(12), 3, index[500:]), u[500:])


def test_the_hash_is_the_published_one() -> None:
    """lowbias32 step by step with Python integers."""
    for word in (0, 1, 2, 0x12345678, 0xFFFFFFFF):
        x = word
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        x ^= x >> 16
        assert int(mix(torch.tensor(word))) == x


def test_keys_of_steps() -> None:
    keys = [step_key(0, step) for step in range(2000)]
    assert len(set(keys)) == 2000
    assert all(0 <= key < 2**31 for key in keys)
    assert keys == [step_key(0, step) for step in range(2000)]
    assert not set(keys) & {step_key(1, step) for step in range(2000)}
    assert step_key(2**40, 0) != step_key(0, 0)
    full = [step_key(0, step, 0.3) for step in range(2000)]
    assert abs(full.count(FULL) / 2000 - 0.3) < 0.035  # 3.4 standard errors
    assert all(a in (FULL, b) for a, b in zip(full, keys, strict=True))  # the others keep their draw
    assert step_key(0, 0, 1.0) == FULL


@pytest.mark.parametrize("rule", ["mass", "count"])
def test_budgets_by_token_against_a_loop(rule: Any) -> None:
    router, x = make(selection=TopK(4)).train(), tokens(3, 11)
    router.budget.elastic, router.budget.layer = Elastic("token", rule), 2
    router.budget.key.fill_(77)
    router.budget.first_row.fill_(5)
    routing = router(x)
    for b in range(3):
        for t in range(11):
            u = float(draw(torch.tensor(77), 3, torch.tensor((5 + b) * 11 + t)))
            probs = routing.probs[b, t]
            want = Mass(u, cap=4)(probs) if rule == "mass" else TopK(min(4, 1 + int(u * 4)))(probs)
            assert torch.equal(routing.selected[b, t], want)


def test_units_share_their_draw() -> None:
    x = tokens(1, 1).expand(4, 9, D)  # equal tokens: what differs is the budget
    for unit, rows, tokens_differ in (("token", 4, True), ("sequence", 4, False), ("layer", 1, False)):
        router = make(selection=TopK(6)).train()
        router.budget.elastic = Elastic(unit, "count")  # type: ignore[arg-type]
        router.budget.key.fill_(3)
        counts = router(x).selected.sum(-1)
        assert (len({int(c) for c in counts[:, 0]}) > 1) == (rows > 1)
        assert (len({int(c) for c in counts[0]}) > 1) == tokens_differ
    counts_of = {}
    for unit in ("layer", "step"):
        counts = []
        for layer in range(12):
            router = make(selection=TopK(6)).train()
            router.budget.elastic, router.budget.layer = Elastic(unit, "count"), layer  # type: ignore[arg-type]
            router.budget.key.fill_(3)
            counts.append(int(router(x).selected[0, 0].sum()))
        counts_of[unit] = len(set(counts))
    assert counts_of["step"] == 1
    assert counts_of["layer"] > 2


def test_a_part_of_a_batch_draws_what_the_whole_draws() -> None:
    """For micro-batches and processes."""
    router, x = make(selection=TopK(4)).train(), tokens(6, 9)
    for unit in ("token", "sequence"):
        router.budget.elastic = Elastic(unit)  # type: ignore[arg-type]
        router.budget.key.fill_(5)
        router.budget.first_row.zero_()
        whole = router(x).selected
        for first in (0, 2, 4):
            router.budget.first_row.fill_(first)
            assert torch.equal(router(x[first : first + 2]).selected, whole[first : first + 2])


def test_weights_at_their_own_alpha() -> None:
    router, x = make(selection=Mass(0.7)), tokens(3, 11)
    dull = router(x)
    router.alpha = 5.0
    sharp = router(x)
    router.budget.set_weight_alpha(1.0)
    apart = router(x)
    assert torch.equal(apart.selected, sharp.selected)
    assert torch.equal(apart.probs, dull.probs)
    assert torch.equal(apart.weights, torch.where(sharp.selected, dull.probs, 0.0))
    assert router.alpha == 5.0
    assert float(sharp.selected.sum()) < float(dull.selected.sum())
    with pytest.raises(ValueError, match="weight_alpha must be a finite number >= 0, got -1"):
        router.budget.set_weight_alpha(-1)


def test_copies_and_casts_keep_the_budget() -> None:
    router = make(selection=TopK(3))
    router.tau = 0.375
    for other in (copy.deepcopy(router), copy.deepcopy(router).bfloat16(), copy.deepcopy(router).double()):
        assert (other.tau, other.cap) == (0.375, 3)
        assert other.budget.cap.dtype == torch.int32


def test_a_softmax_router_has_the_same_budget() -> None:
    router, x = SoftmaxRouter(D, N, top_k=3), tokens(3, 11)
    router.tau = 0.4
    assert torch.equal(router(x).selected, Mass(0.4, cap=3)(router(x).probs))
