"""Training on many processes goes where it goes on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import ALONE, backward, batch, tiny, whole
from processes import run
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from grmoe.model import GrmoeForCausalLM
from grmoe.optim import GrassmannAdam, split_parameters
from grmoe.parallel.shard import clip_gradients, shard, split_by_mesh, sync_metrics, sync_routers
from grmoe.parallel.world import ParallelConfig, World
from grmoe.routing import routers

STEPS = 6
WORLDS = {
    "fsdp": (ParallelConfig(), 2),
    "hsdp": (ParallelConfig(replicate=2), 2),
    "expert": (ParallelConfig(expert=2), 2),
    "fsdp × expert": (ParallelConfig(fsdp=2, expert=2), 4),
}


def build_optimizers(model: GrmoeForCausalLM, foreach: bool) -> list[Optimizer]:
    split = split_parameters(model)
    groups = [{"params": split.rest, "weight_decay": 0.1}, {"params": split.kappa, "weight_decay": 0.0}]
    if foreach:
        groups = split_by_mesh(groups)
    return [AdamW(groups, lr=0.01, foreach=foreach), GrassmannAdam(split.frame_groups, lr=0.05)]


def train(world: World, foreach: bool) -> dict[str, Any]:
    model = tiny(router_options={"linear": True})
    shard(model, world)
    optimizers = build_optimizers(model, foreach)
    losses = []
    for step in range(STEPS):
        losses.append(float(backward(model, world, batch(8, step), micro_batches=2)))
        clip_gradients(model.parameters(), 1.0, world)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        sync_routers(model, world)
        sync_routers(model, world)  # counts nothing twice
        model.update_priors(0.1)
    sync_metrics(model, world)
    local = [isinstance(p, DTensor) for p in routers(model)[0].parameters()]
    return {
        "losses": losses,
        "weights": {name: whole(t) for name, t in model.state_dict().items()},
        "metrics": model.routing_metrics(),
        "routers are whole": not any(local),
    }


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return train(ALONE, False)


# Multi-tensor updates, as GPUs want them, where parameters lie on two meshes and on none.
@pytest.mark.parametrize(
    ("arrangement", "foreach"), [*((name, False) for name in WORLDS), ("fsdp × expert", True)]
)
def test_steps_equal_those_of_one_process(arrangement: str, foreach: bool, single: dict[str, Any]) -> None:
    results = run(*WORLDS[arrangement], train, foreach)
    start = dict(tiny(router_options={"linear": True}).state_dict())
    for got in results:
        assert got["routers are whole"]
        assert got["losses"] == pytest.approx(single["losses"], abs=1e-5)
        for name, want in single["weights"].items():
            assert (got["weights"][name] - want).abs().max() < 1e-5, name
            assert (want - start[name]).abs().max() > 1e-3, f"{name} did not move"
        frames = got["weights"]["model.layers.1.mlp.router.frames"]
        gram = frames.mT @ frames
        assert (gram - torch.eye(gram.shape[-1])).abs().max() < 1e-5
        for name in got["weights"]:  # routers train on every process by itself: they must not drift apart
            assert torch.equal(got["weights"][name], results[0]["weights"][name]), name
        for ours, one in zip(got["metrics"], single["metrics"], strict=True):
            assert ours.tokens == one.tokens == STEPS * 8 * 12
            assert ours.gate_load == pytest.approx(one.gate_load, abs=1e-5)
            assert ours.leading_load == pytest.approx(one.leading_load, abs=1e-3)
            assert ours.entropy == pytest.approx(one.entropy, abs=1e-5)
