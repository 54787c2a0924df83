"""The state of a run in one process; tests/parallel has it for many."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from grmoe import MoE
from grmoe.optim import GrassmannAdam, split_parameters
from grmoe.runs.state import gather, restore


def build(groups: int = 1) -> tuple[nn.Module, list[Optimizer]]:
    torch.manual_seed(0)
    model = MoE(8, 8, 2)
    split = split_parameters(model)
    rest = [*split.rest, *split.kappa]
    cut = [{"params": rest[i::groups]} for i in range(groups)]
    return model, [AdamW(cut, lr=0.1), GrassmannAdam(split.frame_groups, lr=0.1)]


def step(model: nn.Module, optimizers: list[Optimizer], seed: int) -> None:
    x_TD = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    (model(x_TD) * x_TD).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_goes_on_to_the_bit(steps: int) -> None:
    """Also from before the first step."""
    model, optimizers = build()
    for seed in range(steps):
        step(model, optimizers, seed)
    again, fresh = build(groups=2)
    restore(again, fresh, copy.deepcopy(gather(model, optimizers)))
    assert same(model, again)
    for seed in range(100, 103):
        step(again, fresh, seed)
    apart = [p.detach().clone() for p in again.parameters()]
    for seed in range(100, 103):
        step(model, optimizers, seed)
    assert all(torch.equal(a, b) for a, b in zip(apart, model.parameters(), strict=True))


def test_every_step_has_the_same_entries() -> None:
    def keys(tree: Any) -> Any:
        return (
            {k: keys(v) for k, v in tree.items()} if isinstance(tree, dict) else getattr(tree, "shape", None)
        )

    model, optimizers = build()
    before = keys(gather(model, optimizers))
    step(model, optimizers, 0)
    assert keys(gather(model, optimizers)) == before


def test_looking_at_fresh_optimisers_changes_nothing() -> None:
    model, optimizers = build()
    untouched, _ = build()
    gather(model, optimizers)
    assert same(model, untouched)
    assert not any(optimizer.state for optimizer in optimizers)


def test_options_come_back_and_the_machine_keeps_its_own() -> None:
    model, optimizers = build()
    optimizers[0].param_groups[0].update(lr=0.3, peak_lr=0.7, betas=(0.5, 0.6), foreach=True)
    again, fresh = build(groups=2)
    restore(again, fresh, gather(model, optimizers))
    for group in fresh[0].param_groups:
        assert (group["lr"], group["peak_lr"], group["betas"]) == (0.3, 0.7, (0.5, 0.6))
        assert group["foreach"] is None


def test_groups_that_cannot_be_joined_are_refused() -> None:
    model, optimizers = build(groups=2)
    optimizers[0].param_groups[1]["lr"] = 0.01
    again, fresh = build()
    with pytest.raises(ValueError, match="saved with the same options"):
        restore(again, fresh, gather(model, optimizers))


def test_other_optimisers_are_refused() -> None:
    model, _ = build()
    with pytest.raises(ValueError, match="optimisers must be AdamW, Adam or GrassmannAdam, got SGD"):
        gather(model, [SGD(model.parameters(), lr=0.1)])
