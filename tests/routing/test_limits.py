"""Defaults of routers and policies, and what happens exactly at a limit: one token, a tiny token, a full tile.

Legend: N experts, D model width.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grmoe import geometry
from grmoe.routing import (
    Dense,
    ExpertChoiceRouter,
    GrassmannRouter,
    GrassmannSoftMoERouter,
    HashRouter,
    LinearRouter,
    Mass,
    Router,
    SlotRouter,
    SoftmaxRouter,
    SoftMoERouter,
    SwitchRouter,
    Threshold,
    TopK,
    VMFRouter,
    base,
    counting,
    fused,
    load_balancing_loss,
)
from grmoe.routing.budget import Budget
from grmoe.routing.counting import LoadCounter
from grmoe.routing.fused import GateOperands, fuses, try_fused
from grmoe.routing.grassmann import ZERO_TOKEN, grassmann_logits_reference
from grmoe.routing.metrics import routing_sums
from grmoe.routing.packed import PackedCopy
from grmoe.routing.prior import next_log_prior

N, D = 4, 16
F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, D, generator=rng(seed))


# ------------------------------------------------------------------------------------------------------ defaults


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def test_the_defaults_of_every_router() -> None:
    x = tokens(2, 5)
    made: list[Router] = [SoftmaxRouter(D, N), SwitchRouter(D, N), ExpertChoiceRouter(D, N), HashRouter(D, N)]
    made += [SoftMoERouter(D, N), GrassmannSoftMoERouter(D, N), VMFRouter(D, N), GrassmannRouter(D, N, 3)]
    for router in made:
        assert router.eval()(x).probs.shape == (2, 5, N)
        assert (router.alpha, router.checked, router.backend) == (1.0, False, "auto")
        assert router.balance is isinstance(router, GrassmannRouter)
    assert defaults(Router) == {
        "selection": None,
        "alpha": 1.0,
        "balance": False,
        "identity": 0,
        "checked": False,
    }
    assert defaults(LinearRouter) == {"generator": None}
    losses = {"noise": 0.0, "z_loss": 0.0, "load_loss": 0.0}
    assert defaults(SoftmaxRouter) == {"top_k": None} | losses
    assert SoftmaxRouter(D, N).selection == TopK(2)
    assert defaults(SwitchRouter) == {"capacity_factor": 1.25, "load_loss": 0.01}
    assert defaults(ExpertChoiceRouter) == {"capacity_factor": 1.0}
    assert defaults(HashRouter) == {"seed": 0}
    assert defaults(SlotRouter) == {"slots": None, "max_tokens": None}
    assert defaults(SoftMoERouter) == {"generator": None}
    assert defaults(GrassmannSoftMoERouter) == {"slot_rank": 1, "kappa": 1.5, "generator": None}
    assert defaults(VMFRouter) == {"kappa": None, "generator": None}
    assert defaults(GrassmannRouter) == {
        "concentration": "scalar", "kappa": None, "scaling": "rank", "prior": "balanced", "amortizer": None,
        "amortizer_hidden": 64, "linear": False, "dial": "posterior", "init": "haar", "generator": None,
    }  # fmt: skip
    assert defaults(grassmann_logits_reference) == {"alpha": 1.0, "scale": 1.0, "h_TN": None}
    frames, kappa = geometry.haar_frames(D, 3, N, generator=rng()), torch.ones(N)
    energies = (x[0] @ frames).square().sum(-1).T
    torch.testing.assert_close(grassmann_logits_reference(x[0], frames, kappa).float(), energies)
    assert defaults(LoadCounter.add) == {"prior": None, "leads": False, "kernels": False}
    assert not fuses(x, Dense(), 10**6)
    assert defaults(GateOperands) == {"log_kappa": None, "energy_scale": 1.0, "posterior": True}
    assert {r.__name__: r.reads_prior for r in (Router, LinearRouter, VMFRouter, HashRouter, SoftMoERouter)} == {
        "Router": True, "LinearRouter": True, "VMFRouter": True, "HashRouter": False, "SoftMoERouter": False,
    }  # fmt: skip


def test_the_flags_of_every_policy() -> None:
    flags = {
        type(p).__name__: (p.renormalize, p.dense) for p in (Dense(), TopK(2), Mass(0.5), Threshold(0.1))
    }
    assert flags == {
        "Dense": (False, True),
        "TopK": (False, False),
        "Mass": (False, False),
        "Threshold": (False, False),
    }
    assert Mass(0.5).cap is None


def test_the_most_experts_a_token_can_get() -> None:
    assert Dense().max_experts(7) == 7
    assert TopK(3).max_experts(7) == 3
    assert [Mass(0.5, cap).max_experts(7) for cap in (None, 3, 7, 9)] == [7, 3, 7, 7]
    # 1/minimum experts fit, however the quotient rounds.
    found = [Threshold(m).max_experts(100) for m in (1.0, 0.51, 0.5, 1 / 3, 0.3, 0.1, 1 / 49, 0.001)]
    assert found == [1, 1, 2, 3, 3, 10, 49, 100]
    even = torch.full((1, 10), 0.1)
    assert int(Threshold(0.1)(even).sum()) == 10


def test_every_policy_against_a_loop() -> None:
    """Probabilities, masses and limits in sixteenths, which add up exactly: many are met exactly."""
    weights = torch.rand(40, 5, generator=rng()).cumsum(-1)
    cuts = (16 * weights / weights[:, -1:]).round().int()
    rows = (torch.diff(cuts, prepend=cuts.new_zeros(40, 1)) / 16).double()
    limits = [n / 16 for n in range(1, 17)]
    policies = [TopK(k) for k in range(1, 6)] + [Threshold(m) for m in limits]
    policies += [Mass(tau, cap) for tau in limits for cap in (None, 1, 2, 4, 5, 9)]
    for policy in policies:
        found = policy(rows)
        for row, mask in zip(rows.tolist(), found.tolist(), strict=True):
            ranked, count, held = sorted(row, reverse=True), 0, 0.0
            for p in ranked:
                if isinstance(policy, TopK):
                    wanted = count < policy.k
                elif isinstance(policy, Threshold):
                    wanted = p >= policy.minimum or count == 0
                else:
                    wanted = held < policy.tau and (policy.cap is None or count < policy.cap)
                count, held = count + wanted, held + p * wanted
            assert (
                sorted((p for p, kept in zip(row, mask, strict=True) if kept), reverse=True) == ranked[:count]
            )


# ---------------------------------------------------------------------------------------------- where kernels run


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("fusable", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_when_the_kernels_are_tried(
    backend: Any, fusable: bool, interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    counted: list[dict[str, Any]] = []
    monkeypatch.setattr(base, "INTERPRETED", interpreted)
    monkeypatch.setattr(base, "try_fused", lambda *given: tried.append(given))
    router = (GrassmannRouter(D, N, 3) if fusable else VMFRouter(D, N, balance=True)).train()
    monkeypatch.setattr(router.counter, "add", lambda routing, **options: counted.append(options))
    router.backend = backend
    router(tokens(3))
    router.eval()(tokens(3))
    kernels = backend == "triton" or (backend == "auto" and not interpreted)
    # Training learns the prior and keeps no packed copy.
    trains = [(router.budget, True), (None, False)]
    assert counted == [{"prior": prior, "leads": leads, "kernels": kernels} for prior, leads in trains]
    assert [given[-1] for given in tried] == ([None, router._packed.get] if kernels and fusable else [])


def test_the_kernel_needs_all_of_its_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One condition at a time: where the kernel runs, tokens of the right width, a known policy, no failure before."""
    x, failed = tokens(3), {"gate": False}
    monkeypatch.setattr(fused.runtime, "available", lambda x: x.shape[-1] == D)
    monkeypatch.setattr(fused.runtime, "has_failed", lambda name: failed[name])
    monkeypatch.setattr(fused.runtime, "attempt", lambda name, kernel, otherwise: name)

    class Own(Dense):
        pass

    assert fuses(x, Dense(), 256)
    assert not fuses(x, Dense(), 257)
    assert not fuses(x[:, 1:], Dense(), N)
    assert not fuses(x, Own(), N)
    one, operands = torch.tensor(1.0), GateOperands(torch.zeros(N, D), torch.zeros(N))
    packed: list[Tensor] = []
    dense = Budget(Dense(), N)

    def pack(_: GateOperands, x: Tensor) -> Tensor:
        packed.append(x)
        return x

    assert try_fused(x, lambda: operands, lambda: None, one, dense, False, None) == "gate"
    assert packed == []
    assert try_fused(x, lambda: operands, lambda: None, one, dense, False, pack) == "gate"
    assert len(packed) == 1
    assert try_fused(x, lambda: None, lambda: None, one, dense, False, pack) is None
    assert (
        try_fused(x, lambda: operands, lambda: None, one.expand(3), dense, False, pack) is None
    )  # no sequences
    assert try_fused(x, lambda: operands, lambda: None, one, Budget(Own(), N), False, pack) is None
    wide = GateOperands(torch.zeros(N, D, dtype=F64), torch.zeros(N))
    assert try_fused(x, lambda: wide, lambda: None, one, dense, False, pack) is None
    failed["gate"] = True
    assert not fuses(x, Dense(), N)
    assert len(packed) == 1


def test_counts_come_from_torch_where_the_kernel_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts instead of torch, unless it is not asked for, cannot run here, or has failed."""
    state = {"available": True, "failed": False, "fails now": False}
    tried: list[str] = []

    def attempt(name: str, kernel: Any, otherwise: Any) -> None:
        tried.append(name)
        state["failed"] = state["fails now"]

    monkeypatch.setattr(counting, "available", lambda probs: state["available"])
    monkeypatch.setattr(counting, "has_failed", lambda name: state["failed"])
    monkeypatch.setattr(counting, "attempt", attempt)
    routing, slots = SoftmaxRouter(D, N).route(tokens(5), None), SoftMoERouter(D, N).route(tokens(2, 5), None)

    def count(given: Any = routing, kernels: bool = True, **changes: bool) -> tuple[int, int]:
        """(tokens that torch counted, how often the kernel was tried)."""
        state.update({"available": True, "failed": False, "fails now": False} | changes)
        tried.clear()
        counter = LoadCounter(N)
        counter.add(given, kernels=kernels)
        return counter.read().tokens if counter.sums.any() else 0, len(tried)

    assert count() == (0, 1)
    assert count(kernels=False) == (5, 0)
    assert count(available=False) == (5, 0)
    assert count(failed=True) == (5, 0)
    assert count(**{"fails now": True}) == (5, 1)
    assert count(slots) == (10, 0)


def test_the_packed_copy_is_dropped_when_a_router_changes_its_mode_or_place() -> None:
    router = GrassmannRouter(D, N, 3)
    kept: Any = "kept"
    for change in (router.train, router.eval, router.float, lambda: router.train(False)):
        router._packed._kept = kept
        change()
        assert router._packed._kept is None
    assert router.eval().train().training
    assert not router.train(False).training
    with torch.inference_mode():
        assert PackedCopy().get(GateOperands(router.frames, router.log_prior), tokens(2)) is None


def test_a_subclass_tells_every_base_of_it() -> None:
    told: list[str] = []

    class Registered:
        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**options)
            told.append(cls.__name__)

    type("Mixed", (SoftmaxRouter, Registered), {})
    assert told == ["Mixed"]
    assert [r._fusable for r in (Router, SoftmaxRouter, GrassmannRouter, VMFRouter, HashRouter)] == [
        False, True, True, False, False,
    ]  # fmt: skip
    for name in ("scores", "energies", "amortized", "kappa", "select", "noise_like"):
        own = type("Own", (GrassmannRouter,), {name: getattr(GrassmannRouter, name)})
        assert not own._fusable  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------- at the limits


def test_a_batch_of_one_token_is_a_batch() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    # One assignment, to the first expert: N·1·½.
    assert float(load_balancing_loss(probs, TopK(1)(probs))) == pytest.approx(4 * 0.5)
    router = SoftmaxRouter(D, N, z_loss=0.5, generator=rng())
    routing = router(tokens(1))
    assert routing.aux_loss.item() == pytest.approx(0.5 * routing.logits.logsumexp(-1).square().item())
    sums = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0])
    want = 0.1 * torch.tensor([-3.0, 1.0, 1.0, 1.0])
    torch.testing.assert_close(next_log_prior(torch.zeros(N), sums, 0.1), want)


def test_the_share_of_a_token_that_several_experts_compute() -> None:
    counter, router = LoadCounter(N), SoftmaxRouter(D, N, top_k=2, generator=rng())
    routing = router(tokens(5))
    counter.add(routing, prior=Budget(TopK(2), N))
    torch.testing.assert_close(counter.prior_sums[:N], routing.selected.sum(0) / 2)


@pytest.mark.parametrize("kind", ["grassmann", "linear", "vmf", "soft_moe"])
def test_tiny_tokens_fade_out_below_a_norm_of_one_millionth(kind: str) -> None:
    """‖x‖² has a floor of 1e-12: above it a gate sees the direction alone, below it the score falls with ‖x‖."""
    assert ZERO_TOKEN == 1e-12
    make: dict[str, Callable[[], Router]] = {
        "grassmann": lambda: GrassmannRouter(D, N, 3, generator=rng()),
        "linear": lambda: GrassmannRouter(D, N, 3, linear=True, kappa=1e-30, generator=rng()),
        "vmf": lambda: VMFRouter(D, N, generator=rng()),
        "soft_moe": lambda: SoftMoERouter(D, N, generator=rng()),
    }
    router = make[kind]().double()
    if isinstance(router, GrassmannRouter) and router.mu is not None:
        torch.nn.init.normal_(router.mu, generator=rng(2))
    x = tokens(3).double()
    x = x / x.norm(dim=-1, keepdim=True)

    def scores(norm2: float) -> Tensor:
        return router(math.sqrt(norm2) * x).logits.detach()

    full = scores(1.0)
    torch.testing.assert_close(scores(1.2e-12), full)
    if kind in ("vmf", "linear"):  # a direction has no meaning at all there
        assert float(scores(0.99e-12).abs().max()) < 1e-20
    elif kind == "grassmann":
        torch.testing.assert_close(scores(0.25e-12), full / 4)  # energies fall with ‖x‖²
    else:
        torch.testing.assert_close(scores(0.25e-12), full / 2)


def test_columns_of_soft_moe_have_length_one_down_to_a_millionth() -> None:
    router = SoftMoERouter(D, N, generator=rng()).double()
    x, phi = tokens(2, 5).double(), router.phi.detach().clone()
    full = router(x).logits
    for length, share in ((1.1e-6, 1.0), (0.5e-6, 0.5)):
        with torch.no_grad():
            router.phi.copy_(length * phi)
        torch.testing.assert_close(router(x).logits, share * full)


def test_a_zero_token_has_no_gradient() -> None:
    router = GrassmannRouter(D, N, 3, linear=True, generator=rng()).double()
    assert router.mu is not None
    torch.nn.init.normal_(router.mu, generator=rng(2))
    x = torch.zeros(2, D, dtype=F64, requires_grad=True)
    (router(x).logits * torch.arange(N)).sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_logits_of_the_hash_are_zero_and_minus_ten_thousand() -> None:
    router = HashRouter(D, N, seed=3)
    assert router.projection_DB.shape == (D, 16)
    x = tokens(50)
    routing = router(x)
    assert sorted(set(routing.logits.flatten().tolist())) == [-1e4, 0.0]
    # Bit b of the content's id is the sign of projection b.
    ids = sum((x @ router.projection_DB > 0)[:, b].long() * 2**b for b in range(16))
    assert torch.equal(router(x, ids).logits, routing.logits)


def test_projections_of_another_seed_are_refused() -> None:
    saved = HashRouter(D, N, seed=3).state_dict()
    HashRouter(D, N, seed=3).load_state_dict(saved)
    with pytest.raises(ValueError, match="seed must be the one the checkpoint was saved with, got 4"):
        HashRouter(D, N, seed=4).load_state_dict(saved)
    with torch.device("meta"):
        unread = HashRouter(D, N, seed=4)
    unread.projection_DB = unread.projection_DB.to("meta")
    unread.check_seed()  # nothing to compare yet


def test_how_many_experts_a_capacity_gives() -> None:
    switch = SwitchRouter(D, N, capacity_factor=0.5)
    assert [switch.capacity(t) for t in (1, 8, 9)] == [1, 1, 2]
    assert (
        SwitchRouter(8, 10, capacity_factor=1.1).capacity(100) == 11
    )  # 1.1·100 is above 110 in floating point
    assert [switch.experts_per_token(t) for t in (2, 8, 9)] == [1.0, 0.5, 8 / 9]
    choice = ExpertChoiceRouter(D, N, capacity_factor=0.5)
    assert [choice.capacity(t) for t in (1, 8, 17)] == [1, 1, 2]
    assert ExpertChoiceRouter(8, 2, capacity_factor=0.58).capacity(100) == 29  # and 0.58·100 is below 58
    assert [choice.experts_per_token(t) for t in (1, 8, 17)] == [4.0, 0.5, 8 / 17]
    assert SoftmaxRouter(D, N, top_k=N).experts_per_token(9) == 4.0


def test_initial_frames_may_be_wrong_by_a_thousandth() -> None:
    frames = geometry.haar_frames(D, 3, N, generator=rng())
    for factor, good in ((1.00045, True), (1.0006, False), (0.9994, False)):  # UᵀU − I is twice that
        if good:
            made = GrassmannRouter(D, N, 3, init=factor * frames)
            assert float(geometry.orthonormality_error(made.frames.detach())) < 1e-6
        else:
            with pytest.raises(ValueError, match="init must hold orthonormal frames"):
                GrassmannRouter(D, N, 3, init=factor * frames)


def test_sums_of_one_pass_by_hand() -> None:
    probs = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], [[0.2, 0.3, 0.5], [math.nan, 0.5, 0.5]]])
    selected = torch.tensor(
        [[[True, True, False], [False, False, False]], [[False, True, True], [True, True, True]]]
    )
    weights = torch.where(selected, probs, 0.0)
    weights[0, 0] = torch.tensor([0.4, 0.6, 0.0])
    entropy = math.log(2) - sum(p * math.log(p) for p in (0.2, 0.3, 0.5))
    inverse = 2 + 1 + 1 / (0.04 + 0.09 + 0.25)
    want = [1.7, 0.8, 0.5, 0, 1, 1, 1, 2, 1, entropy, inverse, 3, 1]
    assert routing_sums(probs, weights, selected).tolist() == pytest.approx(want)
    with_slots = [*want[:6], 5, 5, 5, *want[9:]]
    assert routing_sums(probs, weights, selected, 5).tolist() == pytest.approx(with_slots)


def test_top_k_and_selection_must_not_contradict_each_other() -> None:
    same = SoftmaxRouter(D, N, top_k=2, selection=TopK(2, renormalize=True))
    assert same.selection == TopK(2, renormalize=True)
    for other in (TopK(1), Mass(0.5)):
        with pytest.raises(ValueError, match=r"top_k = 2 and selection = .* both say how many experts"):
            SoftmaxRouter(D, N, top_k=2, selection=other)
