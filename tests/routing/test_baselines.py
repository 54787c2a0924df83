"""The baseline routers against their formulas, written out as loops."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grmoe.routing import (
    Elastic,
    ExpertChoiceRouter,
    GrassmannRouter,
    HashRouter,
    Mass,
    SoftmaxRouter,
    SoftMoERouter,
    SwitchRouter,
    VMFRouter,
    load_balancing_loss,
    set_draw,
    set_elastic,
    step_key,
)

F64 = torch.float64
D, N = 10, 4


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(*shape: int, seed: int = 1, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, D, generator=rng(seed), dtype=F64).to(dtype)


def naive_gate(x: Tensor, weight: Tensor, alpha: float, prior: Tensor) -> Tensor:
    rows = [[alpha * (float(w @ t) + float(b)) for w, b in zip(weight, prior, strict=True)] for t in x]
    return torch.tensor(rows, dtype=F64)


# ------------------------------------------------------------------------------------------------- softmax


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_softmax(top_k: int) -> None:
    router = SoftmaxRouter(D, N, top_k, alpha=1.5, generator=rng()).double()
    router.log_prior.copy_(torch.randn(N, generator=rng(2)))
    x = tokens(12)
    routing = router(x)
    logits = naive_gate(x, router.weight.detach(), 1.5, router.log_prior)
    torch.testing.assert_close(routing.logits.detach(), logits, rtol=0, atol=1e-12)
    probs = logits.softmax(-1)
    for t in range(len(x)):
        best = sorted(range(N), key=lambda e: -float(probs[t, e]))[:top_k]
        want = [float(probs[t, e]) if e in best else 0.0 for e in range(N)]
        assert routing.weights[t].tolist() == pytest.approx(want, abs=1e-12)
        assert routing.selected[t].tolist() == [e in best for e in range(N)]
    (gradient,) = torch.autograd.grad(routing.weights.square().sum(), router.weight)
    assert bool((gradient.abs().amax(-1) > 0).all())


def test_softmax_takes_another_selection() -> None:
    router = SoftmaxRouter(D, N, selection=Mass(0.9))
    assert router.selection == Mass(0.9)
    assert SoftmaxRouter(D, N).selection.k == 2  # type: ignore[attr-defined]


def test_softmax_noise() -> None:
    router = SoftmaxRouter(D, N, noise=0.5, generator=rng()).double()
    x = tokens(2000)
    clean = router.eval()(x).logits
    assert torch.equal(router(x).logits, clean)
    torch.manual_seed(0)
    noise = (router.train()(x).logits - clean).detach()
    # 8000 draws: four standard errors of the mean and of the standard deviation.
    assert abs(float(noise.mean())) < 4 * 0.5 / math.sqrt(8000)
    assert float(noise.std()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(16000))
    assert not torch.equal(router(x).logits, router(x).logits)
    quiet = SoftmaxRouter(D, N, generator=rng()).double()
    assert torch.equal(quiet(x).logits, clean)


def test_softmax_noise_is_drawn_once_per_pass() -> None:
    """With an α of the weights it was drawn twice, and the weights belonged to another draw than the choice."""
    router, x = SoftmaxRouter(D, N, noise=2.0, alpha=3.0, generator=rng()).double(), tokens(200)
    clean = router.eval()(x).logits
    router.train()
    router.budget.set_weight_alpha(1.0)
    torch.manual_seed(0)
    routing = router(x)
    noise = routing.logits - clean / 3
    assert float(noise.std()) == pytest.approx(2.0, abs=4 * 2.0 / math.sqrt(2 * 200 * N))
    wanted = torch.zeros_like(routing.selected).scatter(-1, (clean + noise).topk(2).indices, True)
    assert torch.equal(routing.selected, wanted)
    assert not torch.equal(wanted, torch.zeros_like(wanted).scatter(-1, clean.topk(2).indices, True))


def test_softmax_noise_has_its_size_with_a_learned_alpha() -> None:
    router, x = SoftmaxRouter(D, N, noise=0.5, alpha=4.0, generator=rng()).double(), tokens(2000)
    router.learn_alpha()
    clean = router.eval()(x).logits
    torch.manual_seed(0)
    noise = (router.train()(x).logits - clean).detach()
    assert float(noise.std()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(2 * 2000 * N))


def test_softmax_losses() -> None:
    x = tokens(3, 5)
    plain = SoftmaxRouter(D, N, generator=rng()).double()
    assert plain(x).aux_loss.item() == 0.0
    router = SoftmaxRouter(D, N, z_loss=0.3, load_loss=0.7, generator=rng()).double()
    routing = router(x)
    z = share = 0.0
    for t in range(15):
        z += math.log(sum(math.exp(v) for v in routing.logits.reshape(15, N)[t].tolist())) ** 2 / 15
    probs, selected = routing.probs.reshape(15, N), routing.selected.reshape(15, N)
    for e in range(N):
        f = int(selected[:, e].sum()) / (15 * 2)
        share += N * f * float(probs[:, e].detach().mean())
    assert routing.aux_loss.item() == pytest.approx(0.3 * z + 0.7 * share, abs=1e-12)
    z_only = SoftmaxRouter(D, N, z_loss=0.3, generator=rng()).double()
    assert z_only(x).aux_loss.item() == pytest.approx(0.3 * z, abs=1e-12)
    (gradient,) = torch.autograd.grad(routing.aux_loss, router.weight)
    assert float(gradient.abs().max()) > 0


@pytest.mark.parametrize("rule", ["mass", "count"])
def test_the_load_loss_counts_the_full_budget(rule: Any) -> None:
    """With random budgets the loss and its gradient are those of the same gate without them."""
    x = tokens(3, 5)
    found = []
    for elastic in (None, Elastic("token", rule)):
        router = SoftmaxRouter(D, N, top_k=3, load_loss=0.7, generator=rng()).double().train()
        set_elastic(router, elastic)
        set_draw(router, step_key(0, 0))
        routing = router(x)
        (gradient,) = torch.autograd.grad(routing.aux_loss, router.weight)
        found.append((routing.selected.sum(), routing.aux_loss.detach(), gradient))
    (full, *wanted), (drawn, *ours) = found
    assert drawn < full
    for a, b in zip(ours, wanted, strict=True):
        assert torch.equal(a, b)


def test_load_balancing_loss() -> None:
    uniform = torch.full((8, N), 1 / N)
    turns = torch.eye(N, dtype=torch.bool).repeat(2, 1)
    assert float(load_balancing_loss(uniform, turns)) == pytest.approx(1.0)
    one = torch.eye(N)[torch.zeros(8, dtype=torch.long)]
    assert float(load_balancing_loss(one, one > 0)) == pytest.approx(N)  # all on one expert
    assert float(load_balancing_loss(uniform.view(2, 4, N), turns.view(2, 4, N))) == pytest.approx(1.0)
    assert float(load_balancing_loss(uniform, torch.zeros_like(turns))) == 0.0  # nothing assigned
    assert float(load_balancing_loss(uniform[:0], turns[:0])) == 0.0
    probs = torch.rand(6, N, generator=rng()).softmax(-1).requires_grad_()
    selected = torch.rand(6, N, generator=rng(1)) > 0.5
    value = load_balancing_loss(probs, selected)
    want = sum(
        N * int(selected[:, e].sum()) / int(selected.sum()) * float(probs[:, e].detach().mean())
        for e in range(N)
    )
    assert value.item() == pytest.approx(want, rel=1e-6)
    (gradient,) = torch.autograd.grad(value, probs)
    torch.testing.assert_close(gradient, (N * selected.sum(0) / selected.sum() / 6).expand(6, N))


# -------------------------------------------------------------------------------------------------- switch


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), T=st.integers(1, 30), factor=st.sampled_from((0.25, 0.5, 1.0, 1.25, 4.0)))
def test_switch(seed: int, T: int, factor: float) -> None:
    router = SwitchRouter(D, N, capacity_factor=factor, alpha=2.0, generator=rng(seed)).double()
    x = tokens(T, seed=seed + 1)
    routing = router(x)
    logits = naive_gate(x, router.weight.detach(), 2.0, torch.zeros(N))
    torch.testing.assert_close(routing.logits.detach(), logits, rtol=0, atol=1e-11)
    probs, used = logits.softmax(-1), Counter[int]()
    capacity = math.ceil(factor * T / N)
    asked = [0] * N
    for t in range(T):
        best = int(probs[t].argmax())
        asked[best] += 1
        want = [0.0] * N
        if used[best] < capacity:
            used[best] += 1
            want[best] = float(probs[t, best])
        assert routing.weights[t].tolist() == pytest.approx(want, abs=1e-11)
        assert routing.selected[t].tolist() == [w > 0 for w in want]
    loss = 0.01 * sum(N * asked[e] / T * float(probs[:, e].mean()) for e in range(N))
    assert routing.aux_loss.item() == pytest.approx(loss, abs=1e-12)


def test_switch_leading_dimensions_are_one_queue() -> None:
    router = SwitchRouter(D, N, capacity_factor=0.5, generator=rng())
    x = tokens(3, 8, dtype=torch.float32)
    flat = router(x.view(24, D)).selected
    assert torch.equal(router(x).selected.view(24, N), flat)
    assert int((~flat.any(-1)).sum()) > 0  # some are dropped
    assert int(flat.sum(0).max()) <= 3


def test_switch_loss_of_a_uniform_router() -> None:
    router = SwitchRouter(N, N, load_loss=1.0)
    with torch.no_grad():
        router.weight.copy_(1e-4 * torch.eye(N))  # almost uniform probabilities, each expert asked once
    assert router(torch.eye(N)).aux_loss.item() == pytest.approx(1.0, abs=1e-3)


# ------------------------------------------------------------------------------------------- expert choice


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), T=st.integers(1, 30), factor=st.sampled_from((0.1, 0.5, 1.0, 2.0, 8.0)))
def test_expert_choice(seed: int, T: int, factor: float) -> None:
    router = ExpertChoiceRouter(D, N, capacity_factor=factor, alpha=0.5, generator=rng(seed)).double()
    x = tokens(T, seed=seed + 1)
    routing = router(x)
    logits = naive_gate(x, router.weight.detach(), 0.5, torch.zeros(N))
    probs = logits.softmax(-1)
    torch.testing.assert_close(routing.probs.detach(), probs, rtol=0, atol=1e-12)
    capacity = min(T, max(1, math.floor(factor * T / N)))
    for e in range(N):
        taken = set(routing.selected[:, e].nonzero().flatten().tolist())
        assert taken == set(sorted(range(T), key=lambda t: -float(probs[t, e]))[:capacity])
    assert torch.equal(routing.weights, torch.where(routing.selected, routing.probs, 0.0))


def test_expert_choice_leading_dimensions_are_one_pool() -> None:
    router = ExpertChoiceRouter(D, N, generator=rng())
    x = tokens(3, 8, dtype=torch.float32)
    selected = router(x).selected
    assert selected.shape == (3, 8, N)
    assert selected.sum((0, 1)).tolist() == [6] * N
    assert torch.equal(selected.view(24, N), router(x.view(24, D)).selected)


# ---------------------------------------------------------------------------------------------------- hash


def naive_hash(token: int, seed: int) -> int:
    def lowbias32(word: int) -> int:
        word = (word ^ word >> 16) * 0x7FEB352D % 2**32
        word = (word ^ word >> 15) * 0x846CA68B % 2**32
        return word ^ word >> 16

    return lowbias32((token + lowbias32((seed + 0x9E3779B9) % 2**32)) % 2**32) % N


def earlier_hash(token: int, seed: int) -> int:
    mixed = ((token + 1 + seed) * 0x9E3779B97F4A7C15) % 2**64
    mixed = mixed - 2**64 if mixed >= 2**63 else mixed
    return ((mixed >> 29) & 0x7FFFFFFF) % N


@given(ids=st.lists(st.integers(0, 2**40), min_size=1, max_size=20), seed=st.integers(0, 1000))
def test_hash_of_token_ids(ids: list[int], seed: int) -> None:
    router = HashRouter(D, N, seed=seed)
    routing = router(torch.zeros(len(ids), D), torch.tensor(ids))
    want = torch.eye(N)[[naive_hash(i, seed) for i in ids]]
    assert torch.equal(routing.probs, want)
    assert torch.equal(routing.weights, want)
    assert torch.equal(routing.selected, want > 0)
    assert bool(torch.isfinite(routing.logits).all())


@pytest.mark.parametrize("num_experts", [4, 7, 8])
def test_hash_is_balanced(num_experts: int) -> None:
    router = HashRouter(D, num_experts)
    count = 100_000
    for ids in (torch.arange(count), torch.randint(0, 2**40, (count,), generator=rng())):
        chosen = router(torch.zeros(count, 1).expand(count, D), ids).probs.argmax(-1)
        load = torch.bincount(chosen, minlength=num_experts).double()
        expected = count / num_experts
        # χ² with up to 7 degrees of freedom exceeds 40 with probability 1e-6.
        assert float(((load - expected) ** 2 / expected).sum()) < 40


def test_hash_groups_neither_neighbours_nor_the_tokens_of_another_layer() -> None:
    ids, count = torch.arange(20_000), 8
    chosen = [HashRouter(D, count, seed=s)(torch.zeros(len(ids), D), ids).probs.argmax(-1) for s in range(4)]
    first, pairs = chosen[0], torch.randint(0, len(ids), (2, 100_000), generator=rng())
    for step in (1, 2, 3, 8):
        assert float((first[step:] == first[:-step]).double().mean()) == pytest.approx(1 / count, abs=0.02)
    together = pairs[:, first[pairs[0]] == first[pairs[1]]]
    for other in chosen[1:]:
        again = (other[together[0]] == other[together[1]]).double().mean()
        assert float(again) == pytest.approx(1 / count, abs=0.02)


def test_models_with_the_earlier_hash_keep_it() -> None:
    router = HashRouter(D, N, seed=3)
    old = {"projection_DB": torch.randn(D, 16, generator=torch.Generator().manual_seed(3))}
    router.load_state_dict(router.state_dict() | old)
    chosen = router(torch.zeros(50, D), torch.arange(50)).probs.argmax(-1)
    assert chosen.tolist() == [earlier_hash(i, 3) for i in range(50)]
    router.load_state_dict(HashRouter(D, N, seed=3).state_dict())
    chosen = router(torch.zeros(50, D), torch.arange(50)).probs.argmax(-1)
    assert chosen.tolist() == [naive_hash(i, 3) for i in range(50)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_hash_loads_its_own_state_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    saved = HashRouter(D, N, seed=3).state_dict()
    torch.set_default_dtype(dtype)
    try:
        HashRouter(D, N, seed=3).load_state_dict(saved)
    finally:
        torch.set_default_dtype(torch.float32)


def test_hash_of_content() -> None:
    router, twin = HashRouter(D, N, seed=3), HashRouter(D, N, seed=3)
    x = tokens(4000, dtype=torch.float32)
    first = router(x).probs.argmax(-1)
    assert torch.equal(twin(x).probs.argmax(-1), first)
    assert torch.equal(router(x.flip(0)).probs.argmax(-1).flip(0), first)  # same content, same expert
    assert torch.equal(router(3 * x).probs.argmax(-1), first)  # signs of projections
    assert not torch.equal(HashRouter(D, N, seed=4)(x).probs.argmax(-1), first)
    assert not torch.equal(router(x, torch.arange(4000)).probs.argmax(-1), first)  # ids come first when given
    # Patterns of 16 signs are not equally likely: balanced within a factor of two is what can be asked.
    load = torch.bincount(first, minlength=N) / 4000
    assert float(load.min()) > 0.5 / N
    assert float(load.max()) < 2 / N


def test_hash_learns_nothing() -> None:
    router = HashRouter(D, N)
    assert list(router.parameters()) == []
    x = tokens(50, dtype=torch.float32)
    before = router(x).probs
    router.alpha = 0.0
    assert torch.equal(router(x).probs, before)


# ------------------------------------------------------------------------------------------------ Soft MoE


@pytest.mark.parametrize("slots", [1, 3])
def test_soft_moe(slots: int) -> None:
    router = SoftMoERouter(D, N, slots=slots, alpha=1.5, generator=rng()).double()
    B, T = 2, 6
    x = tokens(B, T)
    routing = router(x)
    assert routing.slots is not None
    dispatch, combine = routing.slots.to_slots.detach(), routing.slots.from_slots.detach()
    assert dispatch.shape == combine.shape == (B, T, N, slots)
    torch.testing.assert_close(dispatch.sum(1), torch.ones(B, N, slots, dtype=F64))
    torch.testing.assert_close(combine.sum((-2, -1)), torch.ones(B, T, dtype=F64))

    scale, phi = float(router.log_scale.detach().exp()), router.phi.detach()
    for b in range(B):
        logits = torch.empty(T, N * slots, dtype=F64)
        for t in range(T):
            for s in range(N * slots):
                cosine = (x[b, t] @ phi[:, s]) / (x[b, t].norm() * phi[:, s].norm())
                logits[t, s] = scale * cosine
        want = logits.softmax(0).view(T, N, slots)
        torch.testing.assert_close(dispatch[b], want, rtol=0, atol=1e-12)
        want = (1.5 * logits).softmax(1).view(T, N, slots)
        torch.testing.assert_close(combine[b], want, rtol=0, atol=1e-12)
        # The gate of a token is its combine mass on each expert's slots, in logits too.
        torch.testing.assert_close(routing.probs[b].detach(), want.sum(-1), rtol=0, atol=1e-12)
        torch.testing.assert_close(routing.logits[b].detach().softmax(-1), want.sum(-1), rtol=0, atol=1e-12)
        # Each sequence is mixed on its own.
        alone = router(x[b])
        torch.testing.assert_close(alone.slots.to_slots, routing.slots.to_slots[b], rtol=0, atol=1e-13)  # type: ignore[union-attr]
    assert bool(routing.selected.all())
    assert torch.equal(routing.weights, routing.probs)


def test_soft_moe_scale() -> None:
    router = SoftMoERouter(400, 64, slots=2, generator=rng())
    logits = router.slot_logits(torch.randn(500, 400, generator=rng(1))).detach()
    assert float(logits.std()) == pytest.approx(1.0, abs=0.05)
    torch.testing.assert_close(router.slot_logits(torch.zeros(1, 400)), torch.zeros(1, 128))
    x = tokens(2, 5, dtype=torch.float32)
    small = SoftMoERouter(D, N, generator=rng())
    torch.testing.assert_close(small(1e4 * x).probs, small(x).probs)


# --------------------------------------------------------------------------------------------- von Mises–Fisher


def test_vmf() -> None:
    router = VMFRouter(D, N, alpha=0.5, generator=rng()).double()
    with torch.no_grad():
        router.log_kappa.copy_(torch.randn(N, generator=rng(2)))
        router.weight.mul_(torch.tensor([[0.1], [1.0], [5.0], [30.0]]))  # only directions count
    router.log_prior.copy_(torch.randn(N, generator=rng(3)))
    x = tokens(9)
    want = torch.empty(9, N, dtype=F64)
    for t in range(9):
        for e in range(N):
            w = router.weight[e].detach()
            cosine = float(w @ x[t]) / float(w.norm() * x[t].norm())
            want[t, e] = 0.5 * (
                float(router.log_kappa[e].detach().exp()) * cosine + float(router.log_prior[e])
            )
    torch.testing.assert_close(router(x).logits.detach(), want, rtol=0, atol=1e-12)
    torch.testing.assert_close(router(1e5 * x).logits.detach(), want, rtol=0, atol=1e-12)
    assert float((router(-x).logits.detach() - want).abs().max()) > 0.1  # signed


def test_vmf_zero_token_and_start() -> None:
    router = VMFRouter(D, N, generator=rng())
    torch.testing.assert_close(router.log_kappa.exp(), torch.full((N,), math.sqrt(D)))
    torch.testing.assert_close(VMFRouter(D, N, kappa=7.0).log_kappa.exp(), torch.full((N,), 7.0))
    router.log_prior.copy_(torch.tensor([0.5, -0.5, 1.0, -1.0]))
    x = tokens(3, dtype=torch.float32)
    x[1] = 0.0
    x.requires_grad_()
    logits = router(x).logits
    assert torch.equal(logits[1], router.log_prior)
    (gradient,) = torch.autograd.grad(logits.square().sum(), x)
    assert torch.equal(gradient[1], torch.zeros(D))
    assert float(gradient[[0, 2]].abs().min()) > 0


def test_rank_one_grassmann_is_unsigned_vmf() -> None:
    """With one direction an expert, the subspace gate sees the square of the cosine the vMF gate sees."""
    grassmann = GrassmannRouter(D, N, 1, scaling="unit", prior="paper", kappa=1.0, generator=rng()).double()
    vmf = VMFRouter(D, N, kappa=1.0).double()
    with torch.no_grad():
        vmf.weight.copy_(grassmann.frames.squeeze(-1))
    x = tokens(9)
    torch.testing.assert_close(grassmann(x).logits, vmf(x).logits.square(), rtol=1e-6, atol=0)  # fp32 frames
    torch.testing.assert_close(grassmann(-x).logits, grassmann(x).logits)
