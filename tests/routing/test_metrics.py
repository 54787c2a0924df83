"""Routing metrics against plain Python over the tokens, and what accumulating them must not change."""

from __future__ import annotations

import math
from dataclasses import asdict, fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grmoe import geometry
from grmoe.routing import (
    ExpertChoiceRouter,
    GrassmannRouter,
    Mass,
    Routing,
    RoutingMetrics,
    SoftmaxRouter,
    SoftMoERouter,
    SwitchRouter,
    TopK,
    VMFRouter,
    read_metrics_of,
)
from grmoe.routing.counting import LoadCounter
from grmoe.routing.metrics import coefficient_of_variation

COUNTED = [f.name for f in fields(RoutingMetrics) if f.default is not None]
GEOMETRY = [f.name for f in fields(RoutingMetrics) if f.default is None]


def naive(
    probs: list[list[float]], weights: list[list[float]], selected: list[list[bool]], identity: int = 0
) -> dict[str, object]:
    """Every field from its definition, one token at a time. The last `identity` experts compute nothing."""
    N = len(probs[0])
    rows = [i for i, row in enumerate(probs) if all(math.isfinite(p) for p in row)]
    T = len(rows)
    soft = [sum(probs[i][e] for i in rows) / T for e in range(N)]
    top1 = [0.0] * N
    pairs = [sum(selected[i][e] for i in rows) for e in range(N)]
    load = [count / T for count in pairs]
    entropy = inverse = computed = 0.0
    for i in rows:
        served = [e for e in range(N) if selected[i][e]]
        if served:
            top1[max(served, key=lambda e: weights[i][e])] += 1 / T
        entropy += sum(-p * math.log(p) for p in probs[i] if p > 0) / T
        inverse += 1 / sum(p * p for p in probs[i]) / T
        computed += sum(e < N - identity for e in served) / T
    N -= identity
    load, skipped = load[:N], load[N:]
    top1, soft = top1[:N], soft[:N]

    def cv(load: list[float]) -> float:
        mean = sum(load) / N
        return math.sqrt(sum((v - mean) ** 2 for v in load) / N) / mean if mean else math.nan

    return {
        "tokens": T,
        "nonfinite_tokens": len(probs) - T,
        "experts_per_token": computed,
        "load": load,
        "load_cv": cv(load),
        "min_load": min(load),
        "collapsed": min(load) < 0.1 * computed / N,
        "collapsed_paper": min(load) < 0.01,
        "leading_load": top1,
        "leading_cv": cv(top1),
        "leading_min_load": min(top1),
        "gate_load": soft,
        "gate_cv": cv(soft),
        "entropy": entropy,
        "effective_experts_entropy": math.exp(entropy),
        "effective_experts_inverse": inverse,
        "identity_load": skipped,
    }


def add(counter: LoadCounter, probs: Tensor, weights: Tensor, selected: Tensor) -> None:
    zero = probs.new_zeros(())
    counter.add(Routing(logits=probs.log(), probs=probs, selected=selected, weights=weights, aux_loss=zero))


def assert_same(got: RoutingMetrics, want: dict[str, object], tolerance: float = 1e-6) -> None:
    for name, value in want.items():
        assert getattr(got, name) == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), name


def batch(seed: int, tokens: int, N: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    probs = (3 * torch.randn(tokens, N, generator=g)).softmax(-1)
    selected = Mass(0.8)(probs)
    selected[0] = False  # a dropped token
    weights = torch.where(selected, probs, 0.0)
    if tokens > 2:
        probs[1] = math.nan
        weights[1] = math.nan
        probs[2] = torch.eye(N)[N - 1]  # zeros: 0·log 0 = 0
    return probs, weights, selected


@given(seed=st.integers(0, 2**31 - 1), tokens=st.integers(1, 30), N=st.integers(2, 6))
def test_every_field(seed: int, tokens: int, N: int) -> None:
    probs, weights, selected = batch(seed, tokens, N)
    identity = seed % (N - 1)
    metrics = LoadCounter(N, identity)
    add(metrics, probs, weights, selected)
    want = naive(probs.tolist(), weights.tolist(), selected.tolist(), identity)
    assert sorted(want) == sorted(COUNTED)
    assert_same(metrics.read(), want)
    shaped = LoadCounter(N)  # leading dimensions are all tokens
    add(shaped, probs.unsqueeze(1), weights.unsqueeze(1), selected.unsqueeze(1))
    assert torch.equal(shaped.sums, metrics.sums)


@given(seed=st.integers(0, 2**31 - 1), tokens=st.integers(1, 60), N=st.integers(2, 9), bad=st.integers(0, 3))
def test_load_of_any_selection(seed: int, tokens: int, N: int, bad: int) -> None:
    """Any mask, also one that has nothing to do with the gate; tokens with NaN or Inf count nowhere."""
    g = torch.Generator().manual_seed(seed)
    probs = torch.randn(tokens, N, generator=g).softmax(-1)
    selected = torch.rand(tokens, N, generator=g) < torch.rand((), generator=g)
    metrics = LoadCounter(N)
    add(metrics, probs, torch.where(selected, probs, 0.0), selected)
    clean = metrics.read()
    count = [0] * N
    for token in range(tokens):
        for expert in range(N):
            count[expert] += bool(selected[token, expert])
    total = sum(count)
    assert clean.load == [c / tokens for c in count]
    assert clean.experts_per_token == total / tokens
    assert clean.min_load == min(count) / tokens
    assert clean.collapsed == (
        10 * min(count) * N < total
    )  # in whole numbers: less than a tenth of total / N
    if total:
        assert 0 <= clean.load_cv <= math.sqrt(N - 1) + 1e-12
    else:
        assert math.isnan(clean.load_cv)
    broken = torch.full((bad, N), 1 / N)
    broken[:, 0] = torch.tensor([math.nan, math.inf, -math.inf])[:bad]
    add(metrics, broken, broken, torch.ones(bad, N, dtype=torch.bool))
    assert metrics.read().load == clean.load
    assert metrics.read().nonfinite_tokens == bad


def test_leading_and_received_load_differ() -> None:
    """Expert 0 always leads and the second place goes round: leaders look collapsed, received tokens do not."""
    N, T = 4, 30
    second = torch.arange(T) % (N - 1) + 1
    probs = torch.full((T, N), 0.05)
    probs[:, 0], probs[torch.arange(T), second] = 0.6, 0.3
    metrics = LoadCounter(N)
    selected = TopK(2)(probs)
    add(metrics, probs, torch.where(selected, probs, 0.0), selected)
    found = metrics.read()
    assert found.leading_load == [1.0, 0.0, 0.0, 0.0]
    assert found.leading_cv == pytest.approx(math.sqrt(3))
    assert found.load == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3], rel=1e-15)
    assert found.load_cv == pytest.approx(1 / math.sqrt(3), rel=1e-12)  # deviations 1/2 and 3 × 1/6, mean 1/2
    assert (found.collapsed, found.collapsed_paper) == (False, False)
    dense = LoadCounter(N)
    add(dense, probs, probs, torch.ones_like(selected))
    assert (dense.read().load, dense.read().load_cv, dense.read().collapsed) == ([1.0] * N, 0.0, False)


def test_many_balanced_experts_are_not_collapsed() -> None:
    """At N = 128 a fair share of leaders is below 1 %: the paper's rule, and the leading expert, say nothing there."""
    router = SoftmaxRouter(64, 128, top_k=8, generator=torch.Generator().manual_seed(0))
    router(torch.randn(20_000, 64, generator=torch.Generator().manual_seed(1)))
    metrics = router.read_metrics()
    assert metrics.load_cv < 0.3
    assert not metrics.collapsed
    fair = torch.eye(128).repeat(10, 1)  # each expert gets exactly 1/128 of the tokens
    counter = LoadCounter(128)
    add(counter, fair, fair, fair > 0)
    assert counter.read().collapsed_paper
    assert (counter.read().collapsed, counter.read().load_cv) == (False, 0.0)


def test_what_soft_moe_and_expert_choice_compute() -> None:
    """64 tokens, 8 experts: Soft MoE computes its slots, Expert Choice its capacity."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    for slots, per_token in ((1, 0.125), (8, 1.0)):
        soft = SoftMoERouter(16, 8, slots=slots)
        soft(x)
        soft(x.view(1, 64, 16))
        metrics = soft.read_metrics()
        assert metrics.experts_per_token == per_token == soft.experts_per_token(64)
        assert metrics.load == [per_token / 8] * 8
        assert (metrics.load_cv, metrics.collapsed) == (0.0, False)
    for factor in (1.0, 2.0):
        chosen = ExpertChoiceRouter(16, 8, capacity_factor=factor)
        chosen(x)
        metrics = chosen.read_metrics()
        assert metrics.experts_per_token == factor == chosen.experts_per_token(64)
        assert (metrics.load_cv, metrics.collapsed) == (0.0, False)
        assert metrics.leading_cv > 0


def test_batches_accumulate() -> None:
    pieces = [batch(seed, tokens, 5) for seed, tokens in ((0, 7), (1, 1), (2, 40))]
    apart, together = LoadCounter(5), LoadCounter(5)
    for piece in pieces:
        add(apart, *piece)
    whole = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    add(together, *whole)
    want = {name: value for name, value in asdict(together.read()).items() if name in COUNTED}
    assert_same(apart.read(), want, tolerance=1e-12)  # fp64 sums in another order
    assert apart.read() == apart.read()  # reading takes nothing away
    first = apart.read()
    apart.reset()
    assert apart.read().tokens == 0
    for piece in pieces:
        add(apart, *piece)
    assert apart.read() == first


def test_counts_beyond_single_precision() -> None:
    metrics = LoadCounter(2).float().bfloat16()  # whatever a model is cast to, counts stay fp64
    metrics.sums[-2] = 2.0**24
    add(metrics, torch.full((1, 2), 0.5), torch.full((1, 2), 0.5), torch.ones(1, 2, dtype=torch.bool))
    assert metrics.read().tokens == 2**24 + 1


def test_no_tokens() -> None:
    router = SoftmaxRouter(4, 3)
    router(torch.zeros(0, 4))
    metrics = router.read_metrics()
    assert (metrics.tokens, metrics.nonfinite_tokens) == (0, 0)
    assert (metrics.collapsed, metrics.collapsed_paper) == (False, False)
    for name in (
        "load_cv",
        "leading_cv",
        "gate_cv",
        "min_load",
        "leading_min_load",
        "entropy",
        "experts_per_token",
    ):
        assert math.isnan(getattr(metrics, name)), name
    for name in ("effective_experts_entropy", "effective_experts_inverse"):
        assert math.isnan(getattr(metrics, name)), name
    assert all(math.isnan(v) for v in metrics.gate_load + metrics.leading_load + metrics.load)
    router(torch.full((3, 4), math.nan))
    assert (router.read_metrics().tokens, router.read_metrics().nonfinite_tokens) == (0, 3)
    assert math.isnan(router.read_metrics().entropy)


def test_collapse() -> None:
    router = SoftmaxRouter(4, 3, top_k=1)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.tensor([5.0, 0.0, -5.0])
    x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    router(x.abs())
    metrics = router.read_metrics()
    assert metrics.collapsed
    assert metrics.collapsed_paper
    assert metrics.min_load == 0.0
    assert metrics.load == [1.0, 0.0, 0.0]
    assert metrics.load_cv == pytest.approx(math.sqrt(2))  # √(N−1), one expert takes all
    assert (metrics.load, metrics.load_cv) == (metrics.leading_load, metrics.leading_cv)  # top_k=1
    router.reset_metrics()
    router(x)  # both signs: experts 0 and 2 share, expert 1 never wins
    assert router.read_metrics().collapsed
    router.reset_metrics()
    with torch.no_grad():
        router.weight.copy_(torch.eye(3, 4))
    router(x)
    assert not router.read_metrics().collapsed


def test_where_collapse_begins() -> None:
    """A tenth of the fair share 1/2 is one token in twenty; the paper's line is one in a hundred."""
    for tokens, ours, paper in ((20, False, False), (21, True, False), (100, True, False), (101, True, True)):
        gate = torch.eye(2)[torch.tensor([1] + [0] * (tokens - 1))]
        metrics = LoadCounter(2)
        add(metrics, gate, gate, gate > 0)
        assert (metrics.read().collapsed, metrics.read().collapsed_paper) == (ours, paper), tokens


@pytest.mark.parametrize("kind", ["dense", "mass", "switch"])
def test_metrics_of_a_router(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    router = {
        "dense": lambda: GrassmannRouter(8, 4, 2, generator=g),
        "mass": lambda: VMFRouter(8, 4, selection=Mass(0.6), generator=g),
        "switch": lambda: SwitchRouter(8, 4, capacity_factor=0.5, generator=g),
    }[kind]()
    x = torch.randn(6, 10, 8, generator=g)
    x[2, 3] = math.nan
    outputs = [router(part) for part in x]
    lists = [torch.cat([getattr(o, n) for o in outputs]).tolist() for n in ("probs", "weights", "selected")]
    metrics = router.read_metrics()
    assert_same(metrics, naive(*lists))
    assert metrics.nonfinite_tokens == 1
    assert metrics.tokens == 59
    router.reset_metrics()
    assert router.read_metrics().tokens == 0


def test_metrics_of_several_routers_are_those_of_each() -> None:
    g = torch.Generator().manual_seed(0)
    found = [
        GrassmannRouter(12, 4, 3, generator=g),
        SoftmaxRouter(12, 6, generator=g),
        VMFRouter(12, 4, kappa=2.0, generator=g),
        GrassmannRouter(12, 5, 2, kappa=0.7, generator=g),
    ]
    for i, router in enumerate(found):
        router(torch.randn(7 + i, 12, generator=g))
    assert read_metrics_of(found) == [router.read_metrics() for router in found]
    assert read_metrics_of(found)[3].kappa_max == pytest.approx(0.7)
    assert read_metrics_of([]) == []


def test_geometry_fields() -> None:
    g = torch.Generator().manual_seed(0)
    router = GrassmannRouter(12, 4, 3, generator=g)
    with torch.no_grad():
        router.log_kappa.copy_(torch.tensor([0.5, 1.0, 2.0, 4.0]).log())
    metrics = router.read_metrics()
    U = router.frames.detach()
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    inner = [U[i].T @ U[j] for i, j in pairs]
    assert metrics.max_overlap == pytest.approx(max(float((m**2).sum()) for m in inner) / 3, rel=1e-5)
    assert metrics.orthonormality_error == float(geometry.orthonormality_error(U)) < 1e-6
    assert (metrics.kappa_min, metrics.kappa_max) == pytest.approx((0.5, 4.0), rel=1e-6)

    vmf = VMFRouter(12, 4, kappa=3.0).read_metrics()
    assert (vmf.kappa_min, vmf.kappa_max) == pytest.approx((3.0, 3.0), rel=1e-6)
    assert vmf.max_overlap is vmf.orthonormality_error is None
    plain = SoftmaxRouter(12, 4).read_metrics()
    assert [getattr(plain, name) for name in GEOMETRY] == [None] * 4


def test_metrics_do_not_follow_the_graph_or_the_checkpoint() -> None:
    router = SoftmaxRouter(4, 3, selection=TopK(2))
    routing = router(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    assert routing.probs.requires_grad
    assert not router.counter.sums.requires_grad
    assert not any("sums" in key for key in router.state_dict())


def test_coefficient_of_variation() -> None:
    assert coefficient_of_variation([1.0, 1.0, 1.0]) == 0.0
    assert coefficient_of_variation([0.0, 1.0]) == pytest.approx(1.0)
    assert coefficient_of_variation([1.0, 2.0, 3.0]) == pytest.approx(math.sqrt(2 / 3) / 2)
    assert math.isnan(coefficient_of_variation([0.0, 0.0]))
    assert math.isnan(coefficient_of_variation([math.nan, 1.0]))


def test_a_router_built_on_the_meta_device_can_be_given_memory() -> None:
    with torch.device("meta"):
        router = SoftmaxRouter(8, 4)
    router.to_empty(device="cpu")
    assert router.counter.sums.dtype == torch.float64
    assert not any(t.is_meta for t in router.buffers())
