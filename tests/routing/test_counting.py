"""Counters, controls of a whole model, and corners of single routers.

Legend: N experts, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor, nn

from grmoe import geometry
from grmoe.routing import (
    Dense,
    GrassmannRouter,
    Mass,
    Router,
    SoftMoERouter,
    TopK,
    set_alpha,
    uncounted,
    update_priors,
)
from grmoe.routing import SoftmaxRouter as Softmax
from grmoe.routing.budget import Budget
from grmoe.routing.controls import routers
from grmoe.routing.counting import LoadCounter, prior_shares, read_all
from grmoe.routing.elastic import Elastic
from grmoe.routing.prior import next_log_prior
from grmoe.routing.result import Routing

N, D = 4, 12
F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_routing(*shape: int, seed: int = 0) -> Routing:
    logits = torch.randn(*shape, N, generator=rng(seed))
    probs = logits.softmax(-1)
    selected = probs >= probs.topk(2, dim=-1).values[..., -1:]
    weights = torch.where(selected, probs, 0.0)
    return Routing(
        logits=logits, probs=probs, selected=selected, weights=weights, aux_loss=logits.new_zeros(())
    )


# ------------------------------------------------------------------------------------------------- the counter


def test_counters_read_together_say_what_each_says_alone() -> None:
    counters = [
        LoadCounter(N),
        LoadCounter(N, identity_experts=1),
        LoadCounter(N),
    ]  # the last has counted nothing
    for seed, counter in enumerate(counters[:2]):
        counter.add(random_routing(50 + seed, seed=seed))
    assert list(map(repr, read_all(counters))) == [repr(counter.read()) for counter in counters]  # NaN ≠ NaN
    small = LoadCounter(2)
    assert read_all([counters[0], small])[0] == counters[0].read()  # of another size


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.float(), torch.float32),
        (lambda m: m.double(), torch.float64),
    ],
)
def test_a_cast_keeps_the_sums_and_takes_the_prior_sums_along(
    cast: Callable[[nn.Module], nn.Module], dtype: torch.dtype
) -> None:
    counter = LoadCounter(N)
    counter.sums.fill_(2.0**40 + 1)  # no shorter type holds it
    counter.prior_sums.fill_(3.0)
    cast(counter)
    assert counter.sums.dtype == F64
    assert bool((counter.sums == 2.0**40 + 1).all())
    assert counter.prior_sums.dtype == dtype
    assert bool((counter.prior_sums == 3).all())
    counter.add(random_routing(5), prior=Budget(TopK(2), N))
    assert counter.prior_sums.dtype == dtype
    assert float(counter.prior_sums[-1]) == 8
    assert counter.state_dict() == {}


def test_a_router_is_never_cast_below_single_precision() -> None:
    router = Softmax(D, N, top_k=2, balance=True)
    router.bfloat16()
    assert (router.counter.sums.dtype, router.prior_sums.dtype) == (F64, torch.float32)
    router.double()
    assert (router.counter.sums.dtype, router.prior_sums.dtype) == (F64, F64)


@pytest.mark.parametrize("kind", ["computed", "candidates", "leading", "both", "dense"])
def test_shares_of_the_prior_against_a_loop(kind: Any) -> None:
    routing = random_routing(3, 7)
    routing.probs[0, 2, 1] = math.nan  # counts for nobody
    routing.selected[1, 3] = False  # dropped: counted as a token that nobody computes
    budget = Budget(Dense() if kind == "dense" else TopK(3), N)
    if kind != "dense":
        budget.balances = kind
    budget.elastic = Elastic()  # draws while training; candidates are those of the full budget
    want = torch.zeros(N + 1)
    for p, s in zip(routing.probs.reshape(-1, N), routing.selected.reshape(-1, N), strict=True):
        if bool(torch.isfinite(p).all()):
            want[N] += 1
            leader, best = [int(p.argmax())], p.topk(3).indices.tolist()
            computed = [e for e in range(N) if s[e]]
            parts = {
                "computed": [computed],
                "candidates": [best],
                "leading": [leader],
                "dense": [leader],
                "both": [leader, best],
            }[kind]
            for chosen in parts:
                for e in chosen:
                    want[e] += 1 / len(chosen) / len(parts)
    got = prior_shares(routing.probs, routing.selected, budget)
    torch.testing.assert_close(got, want)
    assert got[N] == 20
    assert float(got[:N].sum()) == pytest.approx(19 if kind == "computed" else 20)


def test_nothing_is_counted_while_paused() -> None:
    counter, routing = LoadCounter(N), random_routing(6)
    with counter.pause():
        with counter.pause():
            counter.add(routing, prior=Budget(TopK(2), N))
        counter.add(routing, prior=Budget(TopK(2), N))  # still inside the outer one
    assert not counter.sums.any()
    assert not counter.prior_sums.any()
    with pytest.raises(RuntimeError, match="stop"), counter.pause():
        raise RuntimeError("stop")
    counter.add(routing)
    assert counter.read().tokens == 6
    assert not counter.prior_sums.any()  # only where the prior is asked for
    counter.add(routing, prior=Budget(TopK(2), N))
    assert counter.read().tokens == 12
    counter.reset()
    assert counter.read().tokens == 0
    assert counter.prior_sums[-1] == 6  # the prior's sums stay


def test_a_soft_moe_counts_the_slots_that_experts_compute() -> None:
    router = SoftMoERouter(D, N, slots=3, generator=rng())
    router(torch.randn(2, 8, D, generator=rng(1)))
    # 2 sequences of 8 tokens; each expert computes 3 slots per sequence, 24 rows for 16 tokens.
    assert router.read_metrics().experts_per_token == pytest.approx(24 / 16)


# ------------------------------------------------------------------------------------------------- the controls


def balanced(experts: int = N, seed: int = 0) -> Router:
    router = Softmax(D, experts, top_k=2, balance=True, generator=rng(seed))
    router.log_prior.copy_(torch.randn(experts, generator=rng(seed + 10)))
    router.prior_sums.copy_(torch.cat([torch.rand(experts, generator=rng(seed + 20)), torch.ones(1)]))
    return router


def test_priors_of_different_sizes_and_a_flagged_step() -> None:
    found = [balanced(4, 0), balanced(6, 1), balanced(4, 2)]
    fixed = Softmax(D, N, top_k=2)
    fixed.prior_sums.fill_(5.0)
    wanted = [next_log_prior(r.log_prior, r.prior_sums, 0.3) for r in found]
    before = [r.log_prior.clone() for r in found]
    sums = [r.prior_sums.clone() for r in found]
    update_priors([*found, fixed], 0.3, torch.tensor(1.0))
    for router, old in zip(found, before, strict=True):
        assert torch.equal(router.log_prior, old)
        assert not router.prior_sums.any()  # the sums of a bad step are gone either way
    for router, old in zip(found, sums, strict=True):
        router.prior_sums.copy_(old)
    update_priors([*found, fixed], 0.3, torch.tensor(0.0))
    for router, want, old in zip(found, wanted, before, strict=True):
        torch.testing.assert_close(router.log_prior, want)
        assert not torch.equal(router.log_prior, old)
    assert bool((fixed.prior_sums == 5).all())  # not balanced: left alone
    for wrong in (-0.1, math.nan):
        with pytest.raises(ValueError, match="rate"):
            update_priors([], wrong)


def test_alphas_go_to_the_routers_in_their_order() -> None:
    model = nn.ModuleDict({"a": balanced(), "mid": nn.Linear(2, 2), "b": balanced(6)})
    assert routers(model) == [model["a"], model["b"]]
    set_alpha(model, [2.0, 3.0])
    assert [r.alpha for r in routers(model)] == [2.0, 3.0]
    set_alpha(model, 0.5)
    assert [r.alpha for r in routers(model)] == [0.5, 0.5]
    for wrong in ([1.0], [1.0, 2.0, 3.0], [1.0, -1.0]):
        with pytest.raises(ValueError, match="alpha"):
            set_alpha(model, wrong)
    assert [r.alpha for r in routers(model)] == [0.5, 0.5]  # nothing was set
    with pytest.raises(ValueError, match="module must contain a router, got Linear without one"):
        set_alpha(nn.Linear(2, 2), 1.0)
    x = torch.randn(3, D, generator=rng())
    with uncounted(model):
        model["a"](x)
    with uncounted([model["a"]]):
        model["a"](x)
        model["b"](x)
    assert [r.read_metrics().tokens for r in routers(model)] == [0, 3]


# --------------------------------------------------------------------------------------------------- Soft MoE


def test_slots_follow_the_length_of_a_sequence() -> None:
    router = SoftMoERouter(D, N, max_tokens=14, generator=rng())
    assert router.phi.shape == (D, N * 3)
    assert [router.slots_for(t) for t in (1, 3, 4, 7, 8, 12, 100)] == [1, 1, 1, 1, 2, 3, 3]
    assert router.experts_per_token(3) == pytest.approx(4 / 3)  # one slot of each of the four experts
    assert router.experts_per_token(8) == 1.0
    assert SoftMoERouter(D, N, max_tokens=3).phi.shape == (D, N)
    fixed = SoftMoERouter(D, N)
    assert (fixed.slots, fixed.slots_for(1), fixed.slots_for(99)) == (1, 1, 1)
    assert SoftMoERouter(D, N, slots=5).slots_for(1) == 5
    with pytest.raises(ValueError, match="slots must be None with max_tokens, got 2"):
        SoftMoERouter(D, N, slots=2, max_tokens=8)


@pytest.mark.parametrize(("tokens", "used"), [(3, 1), (8, 2), (12, 3)])
def test_a_short_sequence_uses_the_first_slots_of_every_expert(tokens: int, used: int) -> None:
    router = SoftMoERouter(D, N, max_tokens=12, generator=rng())
    few = SoftMoERouter(D, N, slots=used)
    with torch.no_grad():
        few.phi.copy_(router.phi.view(D, N, 3)[..., :used].reshape(D, -1))
    x = torch.randn(2, tokens, D, generator=rng(1))
    got, want = router(x), few(x)
    assert got.slots is not None
    assert want.slots is not None
    assert got.slots.to_slots.shape == (2, tokens, N, used)
    torch.testing.assert_close(got.slots.to_slots, want.slots.to_slots)
    torch.testing.assert_close(got.probs, want.probs)


# -------------------------------------------------------------------------------------------------- Grassmann


def test_random_frames_are_not_the_identity() -> None:
    haar = GrassmannRouter(D, N, 3, init="haar", generator=rng()).frames
    identity = GrassmannRouter(D, N, 3, init="identity").frames
    assert torch.equal(identity, geometry.identity_frames(D, 3, N))
    assert torch.equal(haar, geometry.haar_frames(D, 3, N, generator=rng()))
    assert not torch.equal(haar, identity)
    assert torch.equal(GrassmannRouter(D, N, 3, generator=rng()).frames, haar)  # the default
    with pytest.raises(ValueError, match="init"):
        GrassmannRouter(D, N, 3, init="random")  # type: ignore[arg-type]
    for spoil, message in (
        (lambda f: f[:, :, :2], "init must have shape"),
        (lambda f: 1.001 * f, "init must hold orthonormal frames"),
    ):
        with pytest.raises(ValueError, match=message):
            GrassmannRouter(D, N, 3, init=spoil(haar.detach()))
    GrassmannRouter(D, N, 3, init=1.0004 * haar.detach())  # within 1e-3


@pytest.mark.parametrize("concentration", ["scalar", "diagonal"])
@pytest.mark.parametrize("linear", [False, True])
def test_the_normaliser_of_a_whole_space(concentration: Any, linear: bool) -> None:
    """At k = d every token has all of its energy inside. With equal κ, log Z = cκ, plus a von Mises–Fisher part."""
    d = 5
    router = GrassmannRouter(
        d, 3, d, concentration=concentration, linear=linear, prior="uniform", kappa=0.7, generator=rng()
    ).double()
    with torch.no_grad():
        router.frames.copy_(geometry.haar_frames(d, d, 3, generator=rng(), dtype=F64))
        want = torch.full((3,), router.energy_scale * float(router.kappa.flatten()[0]), dtype=F64)
        if router.mu is not None:
            router.mu.copy_(torch.randn(3, d, generator=rng(1)))
            for e in range(3):
                r = math.sqrt(d) * float(router.mu[e].norm())
                want[e] += float(mpmath.log(mpmath.hyp0f1(mpmath.mpf(d) / 2, mpmath.mpf(r) ** 2 / 4)))
    got: Tensor = -router.log_prior_correction().detach()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_metrics_of_the_frames() -> None:
    frames = torch.zeros(3, D, 2)
    frames[:, [0, 1], [0, 1]] = 1.0  # three equal subspaces
    frames[2] = 0.0
    frames[2, [0, 5], [0, 1]] = 1.0  # one direction in common
    router = GrassmannRouter(D, 3, 2, init=frames)
    with torch.no_grad():
        router.log_kappa.copy_(torch.tensor([0.5, 1.0, 3.0]).log())
    found = vars(router.read_metrics())
    assert found["max_overlap"] == pytest.approx(1.0)
    assert (found["kappa_min"], found["kappa_max"]) == pytest.approx((0.5, 3.0))
    assert found["orthonormality_error"] == pytest.approx(0.0, abs=1e-6)
    half = GrassmannRouter(D, 2, 2, init=frames[[0, 2]]).read_metrics()
    assert half.max_overlap == pytest.approx(0.5)


@pytest.mark.parametrize("backend", ["reference", "triton"])  # Triton runs here in its interpreter
@pytest.mark.parametrize("kind", ["candidates", "both"])
def test_candidates_of_budgets_per_sequence(kind: Any, backend: Any) -> None:
    router = GrassmannRouter(16, 4, 4, selection=Mass(0.9), generator=rng())
    router.budget.balances, router.backend = kind, backend
    x = torch.randn(2, 5, 16, generator=rng(1))
    expected = torch.zeros(5)
    for tau, row in zip((0.3, 0.9), x, strict=True):
        router.prior_sums.zero_()
        router.budget.tau.fill_(tau)
        router(row)
        expected += router.prior_sums
    router.prior_sums.zero_()
    router.budget.tau = torch.tensor([0.3, 0.9]).view(2, 1, 1)
    router(x)
    torch.testing.assert_close(router.prior_sums, expected)
    router.prior_sums.zero_()
    router.budget.use(TopK(4))  # one τ and one cap for all
    router.budget.cap = torch.tensor([1, 3], dtype=torch.int32).view(2, 1, 1)
    routing = router(x)
    # Nothing is drawn, so candidates are those computed.
    computed = (routing.selected / routing.selected.sum(-1, keepdim=True)).sum((0, 1))
    if kind == "candidates":
        torch.testing.assert_close(router.prior_sums[:4], computed)
