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
from grmoe.routing import GrassmannRouter, Mass, RoutingMetrics, SoftmaxRouter, SwitchRouter, TopK, VMFRouter
from grmoe.routing.metrics import COLLAPSE_SHARE, MetricsAccumulator, coefficient_of_variation

COUNTED = [f.name for f in fields(RoutingMetrics) if f.default is not None]
GEOMETRY = [f.name for f in fields(RoutingMetrics) if f.default is None]


def naive(
    probs: list[list[float]], weights: list[list[float]], selected: list[list[bool]]
) -> dict[str, object]:
    """Every field from its definition, one token at a time."""
    N = len(probs[0])
    rows = [i for i, row in enumerate(probs) if all(math.isfinite(p) for p in row)]
    T = len(rows)
    soft = [sum(probs[i][e] for i in rows) / T for e in range(N)]
    top1 = [0.0] * N
    pairs = [sum(selected[i][e] for i in rows) for e in range(N)]
    share = [count / sum(pairs) if sum(pairs) else math.nan for count in pairs]
    entropy = inverse = computed = 0.0
    for i in rows:
        served = [e for e in range(N) if selected[i][e]]
        if served:
            top1[max(served, key=lambda e: weights[i][e])] += 1 / T
        entropy += sum(-p * math.log(p) for p in probs[i] if p > 0) / T
        inverse += 1 / sum(p * p for p in probs[i]) / T
        computed += len(served) / T

    def cv(load: list[float]) -> float:
        mean = sum(load) / N
        return math.sqrt(sum((v - mean) ** 2 for v in load) / N) / mean if mean else math.nan

    return {
        "tokens": T,
        "nonfinite_tokens": len(probs) - T,
        "soft_load": soft,
        "top1_load": top1,
        "computed_load": share,
        "load_cv": cv(soft),
        "top1_cv": cv(top1),
        "computed_cv": cv(share),
        "min_load": min(top1),
        "collapsed": min(top1) < 0.01,
        "entropy": entropy,
        "effective_experts_entropy": math.exp(entropy),
        "effective_experts_inverse": inverse,
        "experts_computed": computed,
    }


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
    metrics = MetricsAccumulator(N)
    metrics.update(probs, weights, selected)
    want = naive(probs.tolist(), weights.tolist(), selected.tolist())
    assert sorted(want) == sorted(COUNTED)
    assert_same(metrics.read(), want)
    shaped = MetricsAccumulator(N)  # leading dimensions are all tokens
    shaped.update(probs.unsqueeze(1), weights.unsqueeze(1), selected.unsqueeze(1))
    assert torch.equal(shaped.sums, metrics.sums)


@given(seed=st.integers(0, 2**31 - 1), tokens=st.integers(1, 60), N=st.integers(2, 9), bad=st.integers(0, 3))
def test_computed_load_of_any_selection(seed: int, tokens: int, N: int, bad: int) -> None:
    """Any mask, also one that has nothing to do with the gate; tokens with NaN or Inf count nowhere."""
    g = torch.Generator().manual_seed(seed)
    probs = torch.randn(tokens, N, generator=g).softmax(-1)
    selected = torch.rand(tokens, N, generator=g) < torch.rand((), generator=g)
    metrics = MetricsAccumulator(N)
    metrics.update(probs, torch.where(selected, probs, 0.0), selected)
    clean = metrics.read()
    count = [0] * N
    for token in range(tokens):
        for expert in range(N):
            count[expert] += bool(selected[token, expert])
    total = sum(count)
    if total:
        assert clean.computed_load == [c / total for c in count]
        # N rounded quotients and their sum: 9 ε each.
        assert sum(clean.computed_load) == pytest.approx(1, abs=1e-14)
        assert clean.experts_computed == total / tokens
        assert 0 <= clean.computed_cv <= math.sqrt(N - 1) + 1e-12
    else:
        assert all(math.isnan(v) for v in [*clean.computed_load, clean.computed_cv])
    broken = torch.full((bad, N), 1 / N)
    broken[:, 0] = torch.tensor([math.nan, math.inf, -math.inf])[:bad]
    metrics.update(broken, broken, torch.ones(bad, N, dtype=torch.bool))
    assert metrics.read().computed_load == pytest.approx(clean.computed_load, abs=0, nan_ok=True)
    assert metrics.read().nonfinite_tokens == bad


def test_leading_and_computed_experts_differ() -> None:
    """Expert 0 always leads, the second place goes round: top-1 says collapse, the computed pairs do not."""
    N, T = 4, 30
    second = torch.arange(T) % (N - 1) + 1
    probs = torch.full((T, N), 0.05)
    probs[:, 0], probs[torch.arange(T), second] = 0.6, 0.3
    metrics = MetricsAccumulator(N)
    selected = TopK(2)(probs)
    metrics.update(probs, torch.where(selected, probs, 0.0), selected)
    found = metrics.read()
    assert found.top1_load == [1.0, 0.0, 0.0, 0.0]
    assert found.computed_load == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6], rel=1e-15)
    assert found.computed_cv == pytest.approx(
        1 / math.sqrt(3), rel=1e-12
    )  # deviations 1/4 and 3 × 1/12, mean 1/4
    assert found.collapsed  # stays a matter of the leading expert
    dense = MetricsAccumulator(N)
    dense.update(probs, probs, torch.ones_like(selected))
    assert (dense.read().computed_load, dense.read().computed_cv) == ([1 / N] * N, 0.0)


def test_batches_accumulate() -> None:
    pieces = [batch(seed, tokens, 5) for seed, tokens in ((0, 7), (1, 1), (2, 40))]
    apart, together = MetricsAccumulator(5), MetricsAccumulator(5)
    for piece in pieces:
        apart.update(*piece)
    whole = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    together.update(*whole)
    want = {name: value for name, value in asdict(together.read()).items() if name in COUNTED}
    assert_same(apart.read(), want, tolerance=1e-12)  # fp64 sums in another order
    assert apart.read() == apart.read()  # reading takes nothing away
    first = apart.read()
    apart.reset()
    assert apart.read().tokens == 0
    for piece in pieces:
        apart.update(*piece)
    assert apart.read() == first


def test_counts_beyond_single_precision() -> None:
    metrics = MetricsAccumulator(2).float().bfloat16()  # whatever a model is cast to, counts stay fp64
    metrics.sums[-2] = 2.0**24
    metrics.update(torch.full((1, 2), 0.5), torch.full((1, 2), 0.5), torch.ones(1, 2, dtype=torch.bool))
    assert metrics.read().tokens == 2**24 + 1


def test_no_tokens() -> None:
    router = SoftmaxRouter(4, 3)
    router(torch.zeros(0, 4))
    metrics = router.read_metrics()
    assert (metrics.tokens, metrics.nonfinite_tokens, metrics.collapsed) == (0, 0, False)
    for name in ("load_cv", "top1_cv", "computed_cv", "min_load", "entropy", "experts_computed"):
        assert math.isnan(getattr(metrics, name)), name
    for name in ("effective_experts_entropy", "effective_experts_inverse"):
        assert math.isnan(getattr(metrics, name)), name
    assert all(math.isnan(v) for v in metrics.soft_load + metrics.top1_load + metrics.computed_load)
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
    assert metrics.min_load == 0.0 < COLLAPSE_SHARE
    assert metrics.top1_load == [1.0, 0.0, 0.0]
    assert metrics.top1_cv == pytest.approx(math.sqrt(2))  # √(N−1), one expert takes all
    assert (metrics.computed_load, metrics.computed_cv) == (metrics.top1_load, metrics.top1_cv)  # top_k=1
    router.reset_metrics()
    router(x)  # both signs: experts 0 and 2 share, expert 1 never wins
    assert router.read_metrics().collapsed
    router.reset_metrics()
    with torch.no_grad():
        router.weight.copy_(torch.eye(3, 4))
    router(x)
    assert not router.read_metrics().collapsed
    # One in a hundred is not collapsed, one in two hundred is.
    gate = torch.eye(2)[torch.tensor([1] + [0] * 99)]
    metrics_ = MetricsAccumulator(2)
    metrics_.update(gate, gate, gate > 0)
    assert not metrics_.read().collapsed
    metrics_.update(
        *[torch.eye(2)[torch.zeros(100, dtype=torch.long)]] * 2, selected=torch.eye(2)[[0] * 100] > 0
    )
    assert metrics_.read().collapsed


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
    assert metrics.max_cosine == pytest.approx(
        max(float(torch.linalg.svdvals(m)[0]) for m in inner), rel=1e-5
    )
    assert metrics.orthonormality_error == float(geometry.orthonormality_error(U)) < 1e-6
    assert (metrics.kappa_min, metrics.kappa_max) == pytest.approx((0.5, 4.0), rel=1e-6)

    vmf = VMFRouter(12, 4, kappa=3.0).read_metrics()
    assert (vmf.kappa_min, vmf.kappa_max) == pytest.approx((3.0, 3.0), rel=1e-6)
    assert vmf.max_overlap is vmf.max_cosine is vmf.orthonormality_error is None
    plain = SoftmaxRouter(12, 4).read_metrics()
    assert [getattr(plain, name) for name in GEOMETRY] == [None] * 5


def test_metrics_do_not_follow_the_graph_or_the_checkpoint() -> None:
    router = SoftmaxRouter(4, 3, selection=TopK(2))
    routing = router(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    assert routing.probs.requires_grad
    assert not router.metrics.sums.requires_grad
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
    assert router.metrics.sums.dtype == torch.float64
    assert not any(t.is_meta for t in router.buffers())
