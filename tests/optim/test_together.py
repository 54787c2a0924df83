"""`step_together`: every optimiser steps, with the result of one after the other."""

from __future__ import annotations

import torch
from torch.optim import AdamW, Optimizer

from grmoe import geometry
from grmoe.optim import GrassmannAdam, step_together


def parts() -> tuple[list[Optimizer], list[torch.nn.Parameter]]:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    frames = torch.nn.Parameter(geometry.haar_frames(8, 2, 3))
    return [AdamW([weight], lr=0.1), GrassmannAdam([frames], lr=0.1)], [weight, frames]


def test_every_optimiser_steps_once() -> None:
    (together, ours), (alone, theirs) = parts(), parts()
    for step in range(3):
        for each in (ours, theirs):
            torch.manual_seed(step)
            for p in each:
                p.grad = torch.randn_like(p)
        step_together(together)
        for optimizer in alone:
            optimizer.step()
        for mine, expected in zip(ours, theirs, strict=True):
            assert torch.equal(mine, expected)
    _, start = parts()
    assert not any(torch.equal(mine, old) for mine, old in zip(ours, start, strict=True))


def test_one_optimiser_or_none() -> None:
    (first, second), (weight, frames) = parts()
    weight.grad, frames.grad = torch.ones_like(weight), torch.ones_like(frames)
    before = frames.detach().clone()
    step_together([])
    step_together([second])
    assert not torch.equal(frames, before)
    assert not first.state
