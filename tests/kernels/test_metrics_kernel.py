"""Sums for metrics and prior by kernels, against `routing_sums` and `prior_shares`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from grmoe.kernels import metrics as module
from grmoe.kernels.metrics import add_counts
from grmoe.kernels.runtime import has_failed
from grmoe.routing import Dense, Mass, Selection, TopK
from grmoe.routing.base import Routing
from grmoe.routing.budget import Budget
from grmoe.routing.counting import LoadCounter

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def gates(T: int, N: int, selection: Selection, seed: int) -> Routing:
    """Sure and unsure tokens, a probability of exactly zero, and two bad tokens where there is room."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, N, generator=g) * 10 ** torch.empty(T, 1).uniform_(-1, 2, generator=g)
    probs = torch.softmax(logits, -1)
    selected = selection(probs)
    weights = torch.where(selected, probs, 0.0)
    if T > 4:
        probs[1], weights[1] = float("nan"), float("nan")
        probs[3, 0] = float("inf")
        selected[4] = False  # dropped for want of capacity
    return Routing(
        logits=logits, probs=probs, selected=selected, weights=weights, aux_loss=logits.new_zeros(())
    )


def sums(routing: Routing, selection: Selection, fused: bool, prior: Any) -> tuple[Tensor, Tensor]:
    """prior: False, True, or what the prior counts."""
    N = routing.probs.shape[-1]
    counter, budget = LoadCounter(N), Budget(selection, N)
    counter.sums.fill_(3.0)
    counter.prior_sums.fill_(2.0)
    if isinstance(prior, str):
        budget.balances = prior  # type: ignore[assignment]
    counter.add(routing, prior=budget if prior else None, kernels=fused)
    assert not has_failed("metrics")
    return counter.sums, counter.prior_sums


@settings(max_examples=15)
@given(
    st.integers(0, 150),
    st.integers(2, 9),
    st.sampled_from([Dense(), TopK(2), Mass(0.7)]),
    st.sampled_from([False, "computed", "candidates", "leading", "both"]),
    st.integers(0, 10**6),
)
def test_all_sums(T: int, N: int, selection: Selection, prior: Any, seed: int) -> None:
    routing = gates(T, N, selection, seed)
    ours, plain = (sums(routing, selection, fused, prior) for fused in (True, False))
    # Partial sums of up to 64 tokens in fp32; counts are exact. A zero gate has entropy log 1 = 0 up to 64 ε.
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], plain[1], rtol=1e-6, atol=1e-5)
    counts = [*range(N, 3 * N), -2, -1]
    assert torch.equal(ours[0][counts], plain[0][counts])
    if not prior:
        assert torch.equal(ours[1], torch.full_like(ours[1], 2.0))


def test_few_tokens_take_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    original = module.launch

    def spy(kernel: Any, *given: Any, **options: Any) -> None:
        launched.append(kernel.fn.__name__)
        original(kernel, *given, **options)

    monkeypatch.setattr(module, "launch", spy)
    for T, kernels in ((1, ["partial_kernel"]), (129, ["partial_kernel", "accumulate_kernel"])):
        sums(gates(T, 4, TopK(2), seed=0), TopK(2), fused=True, prior="both")
        assert launched == kernels
        launched.clear()


def test_chunks_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNKS", 2)
    routing = gates(300, 5, TopK(2), seed=0)
    (ours, ours_prior), (plain, plain_prior) = (sums(routing, TopK(2), f, True) for f in (True, False))
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_prior, plain_prior, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours[5:15], plain[5:15])  # leading and computed experts


@settings(max_examples=15)
@given(st.integers(1, 150), st.integers(2, 9), st.integers(0, 10**6))
def test_computed_pairs_of_any_selection(T: int, N: int, seed: int) -> None:
    """Counted to the bit, tokens with NaN and Inf nowhere, the same bits each time."""
    routing = gates(T, N, Dense(), seed)
    g = torch.Generator().manual_seed(seed)
    routing.selected = torch.rand(T, N, generator=g) < torch.rand((), generator=g)
    ours, again = (sums(routing, TopK(2), True, False)[0] for _ in range(2))
    assert torch.equal(ours, again)
    finite = torch.isfinite(routing.probs).all(-1)
    want = [3.0 + sum(bool(routing.selected[t, e]) for t in range(T) if finite[t]) for e in range(N)]
    assert ours[2 * N : 3 * N].tolist() == want
    assert torch.equal(ours[2 * N : 3 * N], sums(routing, TopK(2), False, False)[0][2 * N : 3 * N])


def test_sums_accumulate_in_fp64() -> None:
    """2^24 tokens and one more: fp32 would stand still."""
    routing = gates(1, 2, TopK(1), seed=0)
    total, prior = torch.zeros(10, dtype=torch.float64), torch.zeros(3)
    total[-2] = 2.0**24
    add_counts(routing.probs, routing.weights, routing.selected, total, prior)
    assert float(total[-2]) == 2.0**24 + 1


def test_strided_inputs() -> None:
    routing = gates(40, 6, TopK(2), seed=1)
    plain = sums(routing, TopK(2), True, True)
    for name in ("probs", "weights", "selected"):
        setattr(routing, name, getattr(routing, name).T.contiguous().T)
    assert all(torch.equal(a, b) for a, b in zip(sums(routing, TopK(2), True, True), plain, strict=True))
