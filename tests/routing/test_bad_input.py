"""Bad arguments raise and name themselves; NaN and Inf in one token stay with that token."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from grmoe.geometry import haar_frames
from grmoe.model.choices_grmoe import SLOT_ROUTERS
from grmoe.routing import (
    ROUTERS,
    EntropyTerm,
    ExpertChoiceRouter,
    GrassmannRouter,
    HashRouter,
    Mass,
    Router,
    SoftMoERouter,
    SwitchRouter,
    TopK,
    build_router,
    set_alpha,
    update_priors,
)

D, N = 8, 4
NAMES = tuple(ROUTERS)
NAN, INF = math.nan, math.inf


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(name: str, dim: int = D, num_experts: int = N, **options: Any) -> Router:
    own: dict[str, Any] = {"rank": 2} if name == "grassmann" else {}
    if name != "hash":
        own["generator"] = rng()
    return build_router(name, dim, num_experts, **{**own, **options})


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, D, generator=rng(seed))


# ----------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 1}, "num_experts must be an integer >= 2, got 1"),
        ({"num_experts": 4.0}, "num_experts must be an integer >= 2, got 4.0"),
        ({"dim": 0}, "dim must be an integer >= 1, got 0"),
        ({"alpha": -0.5}, "alpha must be a finite number >= 0, got -0.5"),
        ({"alpha": NAN}, "alpha must be a finite number >= 0, got nan"),
        ({"alpha": INF}, "alpha must be a finite number >= 0, got inf"),
        ({"alpha": 3e37}, r"alpha must be at most 1e\+30, got 3e\+37: logits would overflow"),
        ({"alpha": "2"}, "alpha must be a finite number >= 0, got '2'"),
        ({"alpha": True}, "alpha must be a finite number >= 0, got True"),
        ({"alpha": torch.tensor([1.0, 2.0])}, "alpha must be a finite number >= 0, got tensor"),
        ({"alpha": np.float32("nan")}, "alpha must be a finite number >= 0, got "),
    ],
    ids=str,
)
def test_bad_arguments_of_every_router(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, **options)


@pytest.mark.parametrize("wrong", [2, "topk", TopK, None], ids=repr)
def test_a_selection_that_is_none_is_named_before_the_first_token(wrong: Any) -> None:
    """The first forward pass once said "'int' object is not callable"."""
    router = make("grassmann")
    with pytest.raises(ValueError, match=r"selection must be a policy such as TopK\(2\), got "):
        router.selection = wrong
    assert router(tokens(3)).selected.all()  # the one it had
    if wrong is not None:
        with pytest.raises(ValueError, match=r"selection must be a policy such as TopK\(2\), got "):
            make("grassmann", selection=wrong)


NOT_ORTHONORMAL = haar_frames(D, 2, N, generator=rng()) * 1.1
WITH_NAN = torch.where(torch.arange(2) == 0, NAN, haar_frames(D, 2, N, generator=rng()))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grassmann", {"rank": D + 1}, f"rank must be at most dim = {D}, got {D + 1}"),
        ("grassmann", {"rank": 0}, "rank must be an integer >= 1, got 0"),
        ("grassmann", {"kappa": 0.0}, "kappa must be a finite number > 0, got 0.0"),
        ("grassmann", {"kappa": -1.0}, "kappa must be a finite number > 0, got -1.0"),
        ("grassmann", {"kappa": INF}, "kappa must be a finite number > 0, got inf"),
        (
            "grassmann",
            {"concentration": "full"},
            "concentration must be one of 'scalar', 'diagonal', got 'full'",
        ),
        ("grassmann", {"scaling": "l2"}, "scaling must be one of 'rank', 'unit', 'rms', 'raw', got 'l2'"),
        (
            "grassmann",
            {"scaling": "raw", "prior": "uniform"},
            "prior must be 'paper' or 'balanced' with scaling='raw', got 'uniform': "
            "the normaliser of an expert's likelihood then depends on the token's length",
        ),
        (
            "grassmann",
            {"prior": "learned"},
            "prior must be one of 'balanced', 'uniform', 'paper', got 'learned'",
        ),
        (
            "grassmann",
            {"amortizer": "mlp"},
            "amortizer must be one of None, 'affinity', 'input', 'matrix', got 'mlp'",
        ),
        ("grassmann", {"dial": "both"}, "dial must be one of 'posterior', 'likelihood', got 'both'"),
        (
            "grassmann",
            {"amortizer": "input", "amortizer_hidden": 0},
            "amortizer_hidden must be an integer >= 1, got 0",
        ),
        ("grassmann", {"init": "zeros"}, "init must be one of 'haar', 'identity', 'pca', got 'zeros'"),
        ("grassmann", {"init": torch.zeros(N, D, 3)}, r"init must have shape \(4, 8, 2\), got \(4, 8, 3\)"),
        (
            "grassmann",
            {"init": NOT_ORTHONORMAL},
            r"init must hold orthonormal frames, got max\|UᵀU−I\| = 0.21",
        ),
        ("grassmann", {"init": torch.zeros(N, D, 2)}, "init must hold orthonormal frames, got .* = 1"),
        ("grassmann", {"init": WITH_NAN}, f"init holds {N * D} non-finite values of {2 * N * D}"),
        (
            "grassmann",
            {"init": torch.ones(N, D, 2).long()},
            "init must be a floating-point tensor, got torch.int64",
        ),
        ("softmax", {"top_k": 0}, "top_k must be an integer >= 1, got 0"),
        ("softmax", {"top_k": N + 1}, f"top_k must be at most num_experts = {N}, got {N + 1}"),
        ("softmax", {"noise": -0.1}, "noise must be a finite number >= 0, got -0.1"),
        ("softmax", {"z_loss": NAN}, "z_loss must be a finite number >= 0, got nan"),
        ("softmax", {"load_loss": -1}, "load_loss must be a finite number >= 0, got -1"),
        ("switch", {"capacity_factor": 0.0}, "capacity_factor must be a finite number > 0, got 0.0"),
        ("switch", {"load_loss": INF}, "load_loss must be a finite number >= 0, got inf"),
        ("expert_choice", {"capacity_factor": -1.0}, "capacity_factor must be a finite number > 0, got -1.0"),
        ("hash", {"seed": -1}, "seed must be an integer >= 0, got -1"),
        ("soft_moe", {"slots": 0}, "slots must be an integer >= 1, got 0"),
        ("vmf", {"kappa": 0.0}, "kappa must be a finite number > 0, got 0.0"),
    ],
)
def test_bad_arguments_of_one_router(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, **options)


def test_unknown_router() -> None:
    known = ", ".join(map(repr, ROUTERS))
    with pytest.raises(ValueError, match=re.escape(f"router must be one of {known}, got 'topk'")):
        build_router("topk", D, N)


@pytest.mark.parametrize("name", NAMES)
def test_bad_tokens(name: str) -> None:
    router = make(name)
    for shape in ((3, D + 1), (D, 3), ()):
        with pytest.raises(ValueError, match=re.escape(f"x must have shape (..., {D}), got {shape}")):
            router(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"x must be a floating-point tensor, got torch.int64"):
        router(torch.zeros(3, D, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"token_ids must have shape \(2, 3\), got \(3,\)"):
        router(tokens(2, 3), torch.arange(3))
    assert router.read_metrics().tokens == 0  # a refused batch leaves no trace


def test_soft_moe_needs_a_sequence() -> None:
    with pytest.raises(ValueError, match=re.escape(f"x must have shape (..., tokens, {D}), got ({D},)")):
        make("soft_moe")(torch.zeros(D))


BAD_ALPHAS = [-1.0, NAN, INF, True, "1", None, 1e39]


@pytest.mark.parametrize("value", BAD_ALPHAS)
def test_bad_alpha(value: Any) -> None:
    router = make("softmax", alpha=0.5)
    with pytest.raises(ValueError, match=f"alpha must .*got {re.escape(repr(value))}"):
        router.alpha = value
    assert router.alpha == 0.5
    model = nn.ModuleList([make("softmax", alpha=0.5), make("vmf", alpha=0.25)])
    with pytest.raises(ValueError, match=f"alpha must .*got {re.escape(repr(value))}"):
        set_alpha(model, [2.0, value])
    assert [r.alpha for r in model] == [0.5, 0.25]  # nothing is set when one value is bad
    if isinstance(value, float):
        with pytest.raises(ValueError, match="alpha"):
            set_alpha(model, value)
    for count in ([], [1.0], [1.0, 1.0, 1.0]):
        with pytest.raises(ValueError, match=f"alpha must give 2 values, got {len(count)}"):
            set_alpha(model, count)
    assert [r.alpha for r in model] == [0.5, 0.25]
    with pytest.raises(ValueError, match="module must contain a router, got Linear without one"):
        set_alpha(nn.Linear(2, 2), 1.0)


@pytest.mark.parametrize("rate", [-0.1, NAN, INF])
def test_bad_rate(rate: float) -> None:
    for router in (make("grassmann"), make("softmax")):
        with pytest.raises(ValueError, match=f"rate must be a finite number >= 0, got {rate}"):
            router.update_prior(rate)


# --------------------------------------------------------------------------------------------- NaN and Inf

BAD = 3
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES if name not in ("expert_choice", *SLOT_ROUTERS, "switch")),
    ("switch", {"capacity_factor": 8.0}),
    ("softmax", {"selection": Mass(0.7), "balance": True}),
    ("vmf", {"balance": True}),
    ("grassmann", {"linear": True, "prior": "uniform"}),
    ("grassmann", {"amortizer": "affinity"}),
    ("grassmann", {"amortizer": "matrix", "scaling": "raw"}),
    ("grassmann", {"amortizer": "input", "concentration": "diagonal"}),
]
SPOIL: list[Callable[[Tensor], None]] = [
    lambda token: token.fill_(NAN),
    lambda token: token[2:3].fill_(NAN).sum(),
    lambda token: token[5:6].fill_(INF).sum(),
    lambda token: token[5:6].fill_(-INF).sum(),
    lambda token: token[0:2].copy_(torch.tensor([INF, -INF])).sum(),
]


def spoiled(spoil: Callable[[Tensor], object], count: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """A batch, the same with one spoiled token, and the mask of the others."""
    clean = tokens(count)
    bad = clean.clone()
    spoil(bad[BAD])
    assert not bool(torch.isfinite(bad[BAD]).all())
    return clean, bad, torch.arange(count) != BAD


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spoil", SPOIL)
def test_checked_mode_raises(name: str, spoil: Callable[[Tensor], object]) -> None:
    clean, bad, _ = spoiled(spoil)
    router = make(name, checked=True)
    router(clean)
    count = int((~torch.isfinite(bad)).sum())
    with pytest.raises(ValueError, match=f"x holds {count} non-finite values? of {bad.numel()}"):
        router(bad)
    assert router.read_metrics().tokens == len(clean)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
@pytest.mark.parametrize("spoil", SPOIL)
def test_a_bad_token_stays_alone(
    name: str, options: dict[str, Any], spoil: Callable[[Tensor], object]
) -> None:
    router = make(name, **options)
    clean, bad, others = spoiled(spoil)
    want, got = router.eval()(clean), router(bad)
    for field in ("logits", "probs", "selected", "weights"):
        assert torch.equal(getattr(got, field)[others], getattr(want, field)[others]), field
    assert bool(torch.isnan(got.probs[BAD]).all())  # and says so


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spoil", SPOIL)
def test_metrics_and_prior_stay_finite(name: str, spoil: Callable[[Tensor], object]) -> None:
    options = {"balance": True} if name != "grassmann" and ROUTERS[name].reads_prior else {}
    router, clean_router = make(name, **options), make(name, **options)
    clean, bad, others = spoiled(spoil)
    router(bad)
    metrics = router.read_metrics()
    assert (metrics.tokens, metrics.nonfinite_tokens) == (len(clean) - 1, 1)
    assert all(math.isfinite(v) for v in [*metrics.gate_load, *metrics.leading_load, metrics.entropy])
    assert math.isfinite(metrics.load_cv)
    assert math.isfinite(metrics.effective_experts_inverse)
    if name not in ("switch", "expert_choice"):  # their capacity counts the bad token too
        clean_router(clean[others])
        reference = clean_router.read_metrics()
        assert metrics.gate_load == pytest.approx(reference.gate_load, abs=1e-6)
        assert metrics.experts_per_token == reference.experts_per_token
        torch.testing.assert_close(router.prior_sums, clean_router.prior_sums)
    assert float(router.prior_sums[-1]) == (len(clean) - 1 if router.balance else 0)
    router.update_prior(0.1)
    assert bool(torch.isfinite(router.log_prior).all())
    only_bad = make(name, **options)
    only_bad(torch.full((2, D), NAN))
    only_bad.update_prior(0.1)
    assert torch.equal(only_bad.log_prior, torch.zeros(N))


@pytest.mark.parametrize("spoil", SPOIL)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax", {"z_loss": 0.1, "balance": True}),
        ("softmax", {"load_loss": 0.1, "balance": True}),
        ("switch", {"load_loss": 0.1}),
        ("grassmann", {}),
        ("vmf", {"balance": True}),
    ],
    ids=str,
)
def test_a_bad_token_spoils_the_loss_of_its_batch_and_nothing_after_it(
    name: str, options: dict[str, Any], spoil: Callable[[Tensor], object]
) -> None:
    """The loss says so, and the step is skipped. Then the router is as if that batch had never been."""
    router, other = make(name, **options), make(name, **options)
    clean, bad, _ = spoiled(spoil)
    for each in (router, other):
        if name in ("grassmann", "vmf"):
            each.entropy = EntropyTerm(0.1, 0.5)
            each.use_leading(0.1)
    for skip in (False, True):
        loss = router(bad if skip else clean).aux_loss
        assert bool(torch.isfinite(loss)) != skip
        loss.backward()
        update_priors([router], 0.1, torch.tensor(float(skip)))
    router.zero_grad()
    router.reset_metrics()
    other(clean)
    update_priors([other], 0.1)
    other.reset_metrics()
    for each in (router, other):
        each(clean).aux_loss.backward()
        update_priors([each], 0.1)
    assert router.read_metrics() == other.read_metrics()
    for (key, found), wanted in zip(router.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(found, wanted), key
    for p in router.parameters():
        assert p.grad is not None
        assert bool(torch.isfinite(p.grad).all())


@pytest.mark.parametrize("spoil", SPOIL)
def test_switch_gives_a_bad_token_no_place(spoil: Callable[[Tensor], object]) -> None:
    router = SwitchRouter(D, N, capacity_factor=0.4, generator=rng())
    _, bad, _ = spoiled(spoil, count=20)
    routing = router(bad)
    assert not bool(routing.selected[BAD].any())
    used = [0] * N
    for t in range(20):
        if t == BAD:
            continue
        best = int(routing.probs[t].argmax())
        kept = used[best] < 2  # ⌈0.4·20/4⌉
        used[best] += kept
        assert routing.selected[t].tolist() == [kept and e == best for e in range(N)]


@pytest.mark.parametrize("spoil", SPOIL)
@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_expert_choice_gives_a_bad_token_no_place(spoil: Callable[[Tensor], object], factor: float) -> None:
    router = ExpertChoiceRouter(D, N, capacity_factor=factor, generator=rng())
    clean, bad, others = spoiled(spoil, count=13)  # without the bad token the capacity is the same: 3
    routing, reference = router(bad), router(clean[others])
    assert not bool(routing.selected[BAD].any())
    assert torch.equal(routing.selected[others], reference.selected)
    torch.testing.assert_close(routing.probs[others], reference.probs)
    assert reference.selected.sum(0).tolist() == [3 if factor == 1.0 else 12] * N


@pytest.mark.parametrize("spoil", SPOIL)
def test_soft_moe_mixes_a_bad_token_into_nothing(spoil: Callable[[Tensor], object]) -> None:
    router = SoftMoERouter(D, N, slots=2, generator=rng())
    clean, bad, others = spoiled(spoil)
    routing, same, without = router(bad), router(clean), router(clean[others])
    assert routing.slots is not None
    assert same.slots is not None
    assert without.slots is not None
    assert torch.equal(routing.slots.to_slots[BAD], torch.zeros(N, 2))
    torch.testing.assert_close(routing.slots.to_slots[others], without.slots.to_slots)
    assert torch.equal(routing.slots.from_slots[others], same.slots.from_slots[others])
    assert torch.equal(routing.probs[others], same.probs[others])
    assert bool(torch.isnan(routing.probs[BAD]).all())
    # A bad token spoils no other sequence either.
    batch = torch.stack([bad, clean])
    assert torch.equal(router(batch).slots.to_slots[1], router(torch.stack([clean, clean])).slots.to_slots[1])  # type: ignore[union-attr]


def test_hash_with_ids_still_reports_a_bad_token() -> None:
    router = HashRouter(D, N)
    _, bad, others = spoiled(SPOIL[0])
    routing = router(bad, torch.arange(10))
    assert bool(torch.isnan(routing.probs[BAD]).all())
    assert bool(torch.isfinite(routing.probs[others]).all())


def test_extreme_but_finite_tokens() -> None:
    for options in ({}, {"linear": True}, {"prior": "uniform"}, {"scaling": "rms"}):
        router = GrassmannRouter(D, N, 2, generator=rng(), **options)  # type: ignore[arg-type]
        x = tokens(6)
        want = router(x)
        for factor in (1e-3, 1e6):
            scaled = (factor * x).requires_grad_()
            routing = router(scaled)
            torch.testing.assert_close(routing.probs, want.probs, rtol=0, atol=1e-5)
            (gradient,) = torch.autograd.grad(routing.probs.square().sum(), scaled)
            assert bool(torch.isfinite(gradient).all())
