"""Grassmannian Soft MoE: against loops, in the layer, trained on its manifold, counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grmoe import geometry
from grmoe.layer import MoE
from grmoe.model import GrmoeConfig, GrmoeForCausalLM, count
from grmoe.model.count import parameters
from grmoe.optim import ModelOptimizer
from grmoe.routing import GrassmannSoftMoERouter, grassmann_soft_moe_reference, routers

D, N = 12, 3


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(slots: int, rank: int, **options: float) -> GrassmannSoftMoERouter:
    router = GrassmannSoftMoERouter(D, N, slots=slots, slot_rank=rank, generator=rng(), **options).double()
    with torch.no_grad():
        router.log_kappa += 0.3 * torch.randn(N * slots, generator=rng(2), dtype=torch.float64)
    return router


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=rng(1), dtype=torch.float64)


@pytest.mark.parametrize(("slots", "rank"), [(1, 1), (4, 1), (2, 3)])
def test_the_layer_is_the_specification(slots: int, rank: int) -> None:
    router, x = make(slots, rank, alpha=1.5), tokens(2, 7)
    layer = MoE(D, 5, N, router, backend="reference").double()
    y, routing = layer.run(x)
    assert routing.slots is not None
    for b in range(2):
        to_slots, from_slots = grassmann_soft_moe_reference(x[b], router.frames, router.kappa, alpha=1.5)
        torch.testing.assert_close(routing.slots.to_slots[b].flatten(-2), to_slots, rtol=0, atol=1e-12)
        torch.testing.assert_close(routing.slots.from_slots[b].flatten(-2), from_slots, rtol=0, atol=1e-12)
        want = torch.zeros_like(x[b])
        for s in range(N * slots):
            up, down = layer.experts.up[s // slots], layer.experts.down_proj[s // slots]
            out_D = layer.experts.activate((to_slots[:, s] @ x[b]) @ up.T) @ down.T
            want = want + from_slots[:, s, None] * out_D
        torch.testing.assert_close(y[b], want, rtol=0, atol=1e-12)


def test_a_slot_depends_on_its_subspace_alone() -> None:
    """Not on the basis of the subspace, and not on the length or the sign of a token."""
    router, x = make(2, 3), tokens(6)
    before = router.slot_logits(x)
    with torch.no_grad():
        turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=rng(5), dtype=torch.float64))
        router.frames.copy_(router.frames @ turn)
    torch.testing.assert_close(router.slot_logits(-3 * x), before)
    assert bool((router.slot_logits(torch.zeros(1, D, dtype=torch.float64)) == 0).all())


def test_random_subspaces_have_mean_energy_one() -> None:
    router = GrassmannSoftMoERouter(64, 8, slots=16, slot_rank=2, kappa=1.0, generator=rng())
    energy = router.slot_logits(torch.randn(400, 64, generator=rng(1))).detach()
    assert float(energy.mean()) == pytest.approx(1.0, abs=0.02)


def test_a_short_sequence_uses_the_first_slots_of_every_expert() -> None:
    router = GrassmannSoftMoERouter(D, N, max_tokens=12, slot_rank=2, generator=rng()).double()
    few = make(2, 2)
    with torch.no_grad():
        few.frames.copy_(router.frames.unflatten(0, (N, 4))[:, :2].flatten(0, 1))
        few.log_kappa.copy_(router.log_kappa.unflatten(0, (N, 4))[:, :2].flatten())
    x = tokens(7)
    assert router.slots_for(7) == 2
    torch.testing.assert_close(router(x).probs, few(x).probs)


def test_in_a_language_model() -> None:
    """Its slots follow the length, its frames stay orthonormal, and no overlap penalty pulls at slots."""
    config = GrmoeConfig(
        vocab_size=40, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_experts=4, max_position_embeddings=32, router="grassmann_soft_moe", allow_noncausal_router=True,
        router_options={"slot_rank": 2}, router_kappa=2.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GrmoeForCausalLM(config).train()
    (router,) = routers(model)
    assert isinstance(router, GrassmannSoftMoERouter)
    assert (router.slots, router.frames.shape) == (8, (32, 16, 2))
    assert count(config, 16).experts_per_token == 1.0
    assert parameters(config) == count(config).total
    assert count(config, 16).active < count(config, 32).active  # half of the slots are not used
    assert float(model.overlap_penalty(0.0)) == 0.0
    optimizer = ModelOptimizer(model, lr=1e-2)
    ids, start = torch.randint(0, 40, (2, 32), generator=rng()), router.frames.detach().clone()
    losses = []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert not torch.equal(router.frames, start)
    assert float(geometry.orthonormality_error(router.frames.detach())) < 1e-5
    figures = router.read_metrics()
    assert figures.experts_per_token == 1.0
    assert figures.max_overlap is not None


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="slot_rank must be at most dim = 12, got 13"):
        GrassmannSoftMoERouter(D, N, slot_rank=13)
    with pytest.raises(ValueError, match="kappa must be a finite number > 0, got 0"):
        GrassmannSoftMoERouter(D, N, kappa=0)
    with pytest.raises(ValueError, match=r"balance must be False for GrassmannSoftMoERouter"):
        GrassmannSoftMoERouter(D, N, balance=True)
