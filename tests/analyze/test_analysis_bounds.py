"""The paper's bounds on a layer's tokens: a loop counts the same, and a layer that fits the theorem obeys it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch

from grmoe.analyze import analyze, bounds
from grmoe.analyze.bounds import BoundsTally
from grmoe.analyze.results import Separation
from grmoe.routing import GrassmannRouter, TopK, build_router
from grmoe.tables import Table

D, N, K = 24, 4, 6


def measured(router: Any, x: torch.Tensor, parts: int = 2) -> BoundsTally:
    tally = BoundsTally(router)
    for part in x.chunk(parts):
        with torch.no_grad(), router.uncounted():
            tally.add(part, router(part))
    return tally


def draw_router(seed: int = 0, **options: Any) -> GrassmannRouter:
    torch.manual_seed(seed)
    router = GrassmannRouter(D, N, K, selection=TopK(3), **options).double().eval()
    with torch.no_grad():
        router.log_kappa += 0.3 * torch.randn_like(router.log_kappa)
        router.log_prior += 0.2 * torch.randn_like(router.log_prior)
        for parameter in (p for name, p in router.named_parameters() if name.startswith("amortizer")):
            parameter += 0.3 * torch.randn_like(parameter)
    return router


@pytest.mark.parametrize("options", [{}, {"amortizer": "affinity"}, {"dial": "likelihood"}])
def test_a_loop_over_tokens_finds_the_same(options: dict[str, Any]) -> None:
    router = draw_router(**options)
    router.alpha = 1.7
    x = torch.randn(10, 9, D, dtype=torch.float64)
    tally = measured(router, x)
    found = tally.separation()
    assert found is not None
    own, rival, factors, gates, homes = [], [], [], [], []
    masses: dict[int, list[tuple[float, float, float]]] = {1: [], 2: [], 3: []}
    U, scale = router.frames.detach(), D / K
    for token in x.reshape(-1, D):
        a = [float(scale * (U[e].T @ token).square().sum() / token.square().sum()) for e in range(N)]
        scores = router.scores(token).tolist()
        home = max(range(N), key=a.__getitem__)
        own.append(a[home])
        rival.append(max(a[e] for e in range(N) if e != home))
        factors += [score / affinity for score, affinity in zip(scores, a, strict=True)]
        homes.append(home)
        logits = router.gate(token, None).tolist()
        total = sum(math.exp(v) for v in logits)
        gates.append([math.exp(v) / total for v in logits])
        ranked = sorted(logits, reverse=True)
        for k, rows in masses.items():
            rest = (N - k) * math.exp(ranked[k] - ranked[k - 1])
            rows.append((sum(sorted(gates[-1])[-k:]), 1 - rest, k / (k + rest)))
    gamma, rho = min(own), max(rival) / min(own)
    first = found.gaps[0]
    assert (first.gamma, first.rho) == (pytest.approx(gamma), pytest.approx(rho))
    assert (found.kappa_min, found.kappa_max) == (pytest.approx(min(factors)), pytest.approx(max(factors)))
    assert first.gap == pytest.approx(gamma * (min(factors) - rho * max(factors)))
    assert first.gap <= found.gaps[1].gap <= found.gaps[2].gap  # more left out, a wider gap
    # 45 of 90 may be left out: 22 below γ and 22 above ργ.
    assert found.gaps[2].gamma == pytest.approx(sorted(own)[22])
    assert found.gaps[2].rho == pytest.approx(sorted(rival)[-23] / sorted(own)[22])
    leads = [a * min(factors) > b * max(factors) for a, b in zip(own, rival, strict=True)]
    assert found.leading_tokens == pytest.approx(fmean(leads))
    load = [fmean(gate[e] for gate in gates) for e in range(N)]
    assert found.load_cv == pytest.approx(pstdev(load) / fmean(load))
    counts = [homes.count(e) for e in range(N)]
    assert found.mixture_cv == pytest.approx(pstdev(counts) / fmean(counts))
    prior = router.log_prior_correction().tolist()
    between = max(prior) - min(prior)
    # The theorem's Δ stands inside α: a prior that α leaves alone is worth less there.
    assert found.prior_range == pytest.approx(between / 1.7 if "dial" in options else between)
    assert found.gap_needed is not None
    assert (N - 1) * math.exp(-1.7 * found.gap_needed) == pytest.approx(found.load_cv)
    for mass in tally.top_mass():
        means = [fmean(column) for column in zip(*masses[mass.k], strict=True)]
        assert (mass.mass, mass.paper, mass.sharp) == tuple(map(pytest.approx, means))
        assert mass.paper_useful == fmean(paper > mass.k / N for _, paper, _ in masses[mass.k])
        assert mass.paper <= mass.sharp <= mass.mass
        assert mass.broken == 0
    assert [mass.k for mass in tally.top_mass()] == [1, 2, 3]


def test_tokens_below_a_bound_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one: a mean over tokens would hide them."""
    true = bounds.topk_mass_bound

    def wrong(logits: torch.Tensor, k: int, method: str = "sharp") -> Any:
        found = true(logits, k, method)  # type: ignore[arg-type]
        return replace(found, bound=found.bound + 2.0 * (torch.arange(len(logits)) % 5 == 0))

    monkeypatch.setattr(bounds, "topk_mass_bound", wrong)
    tally = measured(draw_router(), torch.randn(20, D, dtype=torch.float64))
    assert [mass.broken for mass in tally.top_mass()] == [4, 4, 4]


def separated(noise: float) -> Separation:
    """A router with orthogonal subspaces, and as many tokens from each."""
    router = GrassmannRouter(D, N, K, init="identity", prior="paper", kappa=2.0).double().eval()
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(40, N, D, generator=draw, dtype=torch.float64) * noise
    for e in range(N):
        inside = torch.randn(40, K, generator=draw, dtype=torch.float64)
        x[:, e, e * K : (e + 1) * K] += inside / inside.norm(dim=-1, keepdim=True)
    found = measured(router, x).separation()
    assert found is not None
    return found


def test_where_the_hypothesis_holds_the_bound_does_too() -> None:
    found = separated(0.02)
    assert found.holds
    assert found.mixture_cv == 0
    assert found.leading_tokens == 1
    assert found.sharp is not None
    assert found.paper is not None
    assert found.load_cv < found.sharp < found.paper
    assert found.gap_needed is not None
    assert found.gaps[0].gap < found.gap_needed  # the bound is loose: it would need more to be exact


def test_where_it_fails_nothing_is_claimed() -> None:
    found = separated(1.0)
    assert not found.holds
    assert found.gaps[0].gap < 0
    assert (found.paper, found.sharp) == (None, None)
    assert (
        found.leading_tokens == 1
    )  # with equal κ each token leads to its own expert; the limits are over all tokens


@pytest.mark.parametrize("router", ["softmax", "vmf"])
def test_a_gate_without_subspaces_has_the_corollary_alone(router: str) -> None:
    tally = measured(build_router(router, D, N).eval(), torch.randn(20, D))
    assert tally.separation() is None
    assert [mass.k for mass in tally.top_mass()] == [1, 2]


def test_a_linear_term_is_not_the_theorems_gate_and_a_broken_token_is_left_out() -> None:
    x = torch.randn(20, D, dtype=torch.float64)
    assert measured(draw_router(linear=True), x).separation() is None
    whole = measured(draw_router(), x).separation()
    with_nan = measured(draw_router(), torch.cat([x, x[:1] * math.nan])).separation()
    assert with_nan is not None
    assert whole is not None
    assert with_nan.gaps == whole.gaps
    assert with_nan.load_cv == pytest.approx(whole.load_cv)  # another sum order


def test_analyze_shows_the_bounds(make: Any, texts: list[Path]) -> None:
    from grmoe.analyze.results import Result
    from grmoe.analyze.tables import markdown, show

    loaded = make()
    result = Result(loaded, analyze(loaded, texts, 200))
    for layer in result.analysis.layers:
        assert layer.separation is not None
        loads = [load for load in layer.gate_load if load is not None]
        assert layer.separation.load_cv == pytest.approx(pstdev(loads) / fmean(loads), rel=1e-4)
    shown = [part for part in show(result) if isinstance(part, Table)][-1]
    assert shown.title.startswith("Bounds of the paper")
    assert "CV of mean gate" in shown.headings  # "load" is what is computed, in the table above it
    assert [len(section) for section in shown.sections] == [2]
    assert "## Bounds of the paper" in markdown(result, {})
    assert any("no" in row for row in shown.sections[0])
