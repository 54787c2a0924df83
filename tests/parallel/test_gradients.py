"""On any arrangement of processes, gradients are those of one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import ALONE, backward, batch, gradients, tiny, whole
from processes import run
from torch import Tensor
from torch.distributed.tensor import DTensor

from grmoe.parallel.shard import accumulate, clip_gradients, shard
from grmoe.parallel.world import ParallelConfig, World, mean
from grmoe.routing import Elastic, routers, set_draw, set_elastic, set_leading

WORLDS = {
    "fsdp": (ParallelConfig(), 2),
    "hsdp": (ParallelConfig(replicate=2, fsdp=1), 2),
    "expert": (ParallelConfig(fsdp=1, expert=2), 2),
    "fsdp × expert": (ParallelConfig(fsdp=2, expert=2), 4),
    "replicate × expert": (ParallelConfig(replicate=2, expert=2), 4),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "swiglu, tied": {},
    "random budgets": {
        "elastic": Elastic(),
        "num_experts_per_tok": 3,
        "leading": 0.5,
        "residual_loss_coef": 0.1,
        "embedding_multiplier": 5.0,
    },
    "gelu, untied, shared expert": {
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "shared_experts": 1,
        "identity_experts": 1,
        "attention_heads_per_token": 1,
    },
    # Any number of experts per token, none included: a dispatch list with unused rows.
    "threshold, linear term": {
        "selection": "threshold",
        "selection_tau": 0.3,
        "router_options": {"linear": True},
    },
    "diagonal, reference experts": {
        "router_options": {"concentration": "diagonal"},
        "experts_implementation": "reference",
    },
    "soft_moe": {"router": "soft_moe", "router_kappa": None, "allow_noncausal_router": True},
    "everything to one expert": {"num_experts_per_tok": 1, "favourite": 3},
    "everything to one expert, reference": {
        "num_experts_per_tok": 1,
        "favourite": 0,
        "experts_implementation": "reference",
    },
}
TOLERANCE = 1e-5
MAX_NORM = 0.5  # below every norm here


def build(
    favourite: int | None = None, elastic: Elastic | None = None, leading: float = 0.0, **changes: Any
) -> Any:
    model = tiny(**changes)
    set_elastic(model, elastic)
    set_leading(model, leading)
    for router in routers(model) if leading else ():
        router.leading_share.copy_(torch.tensor([0.6, 0.3, 0.1, 0.0]))  # uniform ones have no gradient
    if favourite is not None:
        for router in routers(model):
            router.log_prior[favourite] = 1000.0  # the other experts get no token at all
    return model


def measure(world: World, changes: dict[str, Any], micro_batches: int = 1) -> dict[str, Any]:
    """Loss, gradients, their norm and what clipping leaves of them."""
    model = build(**changes)
    shard(model, world)
    loss = backward(model, world, batch(8), micro_batches)
    before = gradients(model)
    norm = clip_gradients(model.parameters(), MAX_NORM, world)
    return {"loss": loss, "before": before, "norm": norm, "after": gradients(model)}


def measure_all(world: World, variants: list[str]) -> dict[str, dict[str, Any]]:
    return {name: measure(world, VARIANTS[name]) for name in variants}


@pytest.fixture(scope="module")
def single() -> dict[str, dict[str, Any]]:
    return measure_all(ALONE, list(VARIANTS))


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    assert set(got) == set(want)
    return {name: float((got[name] - want[name]).abs().max()) for name in want}


def test_a_wrong_factor_would_be_seen(single: dict[str, dict[str, Any]]) -> None:
    """Half or twice a gradient differs from it by far more than the tolerance, for every kind of parameter."""
    for variant, result in single.items():
        small = {name: float(g.abs().max()) for name, g in result["before"].items() if g.abs().max() < 1e-3}
        # With one expert a token and no choice, its gate is constant.
        assert all("router" in name and "favourite" in VARIANTS[variant] for name in small), (variant, small)
        assert result["norm"] > 2 * MAX_NORM


def test_the_variants_load_experts_as_they_say() -> None:
    computed = {}
    for variant, changes in VARIANTS.items():
        model = build(**changes)
        set_draw(model, 7)
        model(input_ids=batch(8))
        (metrics,) = model.routing_metrics()
        computed[variant] = metrics.experts_per_token
        if "favourite" in changes:
            assert sorted(metrics.leading_load) == [0.0, 0.0, 0.0, 1.0]
    assert computed["swiglu, tied"] == 2
    assert 1.2 < computed["random budgets"] < 2.8
    assert computed["threshold, linear term"] % 1 > 0.01


@pytest.mark.parametrize("arrangement", WORLDS)
def test_gradients_and_clipping_equal_those_of_one_process(
    arrangement: str, single: dict[str, dict[str, Any]]
) -> None:
    config, size = WORLDS[arrangement]
    variants = list(VARIANTS)[: 8 if size == 2 else 4]  # two cores: four processes take their time
    for results in run(config, size, measure_all, variants):
        for variant in variants:
            got, want = results[variant], single[variant]
            assert got["loss"] == pytest.approx(float(want["loss"]), abs=1e-6)
            for when in ("before", "after"):
                worst = differences(got[when], want[when])
                assert max(worst.values()) < TOLERANCE, (variant, when, worst)
            assert float(got["norm"]) == pytest.approx(float(want["norm"]), rel=1e-6)


@pytest.mark.parametrize("arrangement", ["fsdp", "fsdp × expert"])
def test_accumulation_gives_the_same(arrangement: str, single: dict[str, dict[str, Any]]) -> None:
    config, size = WORLDS[arrangement]
    variant = "random budgets"
    for result in run(config, size, measure, VARIANTS[variant], 2):
        worst = differences(result["before"], single[variant]["before"])
        assert max(worst.values()) < TOLERANCE, worst


def sharded_before_the_last(world: World) -> list[bool]:
    model = tiny()
    shard(model, world)
    rows = batch(2, world.rank)
    seen = []
    for last in (False, True):
        accumulate(model, world, last)
        model(input_ids=rows, labels=rows).loss.backward()
        seen.append(any(isinstance(p.grad, DTensor) for p in model.parameters()))
    return seen


def test_only_the_last_micro_batch_communicates() -> None:
    config, size = WORLDS["expert"]
    assert run(config, size, sharded_before_the_last) == [[False, True]] * size


def twice(world: World) -> bool:
    """Bit for bit the same on repeat, with checkpointed activations as without."""
    results = []
    for checkpointing in (False, False, True):
        model = tiny()
        if checkpointing:
            model.gradient_checkpointing_enable()
        shard(model, world)
        loss = backward(model, world, batch(8))
        results.append({"loss": loss, **gradients(model)})
    return all(torch.equal(other[k], results[0][k]) for other in results[1:] for k in results[0])


def test_deterministic_also_with_activation_checkpointing() -> None:
    config, size = WORLDS["fsdp × expert"]
    assert run(config, size, twice) == [True] * size


def in_bf16(world: World) -> dict[str, Any]:
    model = tiny()
    shard(model, world, bf16=True)
    frames, seen = routers(model)[0].frames, []
    hook = routers(model)[0].register_forward_hook(
        lambda m, x, out: seen.append((m.frames.dtype, out.logits.dtype))
    )
    loss = backward(model, world, batch(8))
    hook.remove()
    masters = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}
    weights = {name: whole(p) for name, p in model.named_parameters()}
    return {
        "loss": loss,
        "dtypes": masters,
        "router": seen,
        "sharded": isinstance(frames, DTensor),
        "gradients": gradients(model),
        "weights": weights,
    }


@pytest.mark.parametrize("arrangement", ["fsdp", "expert"])
def test_bf16_computes_in_bf16_and_keeps_the_rest(
    arrangement: str, single: dict[str, dict[str, Any]]
) -> None:
    want = single["swiglu, tied"]
    for got in run(*WORLDS[arrangement], in_bf16):
        assert got["dtypes"] == {torch.float32}
        assert got["router"] == [(torch.float32, torch.float32)]
        assert not got["sharded"]
        for name, p in tiny().named_parameters():
            assert torch.equal(got["weights"][name], p), name
        # Three significant digits of bf16, through two blocks; equal would mean that nothing was in bf16.
        assert 1e-6 < abs(float(got["loss"] - want["loss"])) < 0.05
        dot = sum((got["gradients"][k] * g).sum() for k, g in want["before"].items())
        lengths = [
            sum(g.square().sum() for g in gs.values()).sqrt() for gs in (got["gradients"], want["before"])
        ]
        assert dot / (lengths[0] * lengths[1]) > 0.98


def refused(world: World) -> list[str]:
    messages = []
    for changes in ({"num_experts": 5, "router_rank": 3}, {"experts_implementation": "eager"}):
        try:
            shard(tiny(**changes), world)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_divided_is_refused() -> None:
    for messages in run(*WORLDS["expert"], refused):
        assert len(messages) == 2
        assert "parallel.expert must divide the number of experts, got 2 for 5" in messages[0]
        assert "got 'eager'" in messages[1]


def test_alone_clipping_is_torchs() -> None:
    ours, theirs = tiny(), tiny()
    for model in (ours, theirs):
        backward(model, ALONE, batch(2))
    norm = clip_gradients(ours.parameters(), MAX_NORM, ALONE)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert mean(ALONE, norm) is norm
