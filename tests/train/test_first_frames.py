"""`init=pca`: frames from the layers' inputs of the first batch, once, for any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes
from torch import Tensor

from grmoe import geometry
from grmoe.layer import MoE
from grmoe.parallel.world import ParallelConfig, start, stop
from grmoe.routing import routers
from grmoe.runs.config import TrainConfig
from grmoe.runs.open import open_model
from grmoe.train import loop
from grmoe.train.first_frames import frames_from_first_batch
from grmoe.train.loop import train
from grmoe.train.setup import Trainer, build_trainer

Settings = Callable[..., TrainConfig]
PCA: dict[str, Any] = {"num_hidden_layers": 4, "router_options": {"init": "pca"}}


def frames(model: torch.nn.Module) -> list[Tensor]:
    return [router.frames.detach().clone() for router in routers(model)]  # type: ignore[union-attr, operator]


def first_frames(config: TrainConfig) -> list[Tensor]:
    trainer = build_trainer(config, start(config.parallel, "cpu"))
    frames_from_first_batch(trainer)
    stop()
    return frames(trainer.model)


def by_hand(trainer: Trainer) -> list[Tensor]:
    """Principal directions of half of the tokens that each layer sees, for each expert another half."""
    seen: list[list[Tensor]] = []
    for module in trainer.model.modules():
        if isinstance(module, MoE):
            kept: list[Tensor] = []
            module.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0].detach()))
            seen.append(kept)
    rows = next(trainer.data.batches(8, trainer.length, trainer.config.seed))
    for row in rows:
        trainer.model.eval()(input_ids=row[None, :-1])
    found = []
    for layer, kept in enumerate(seen):
        x_TD = torch.cat(kept).flatten(0, -2).double()
        x_TD = x_TD / x_TD.norm(dim=-1, keepdim=True)
        g, experts = torch.Generator().manual_seed(3 * 10**5 + layer), []
        for _ in range(4):
            half = x_TD[torch.randperm(len(x_TD), generator=g)[: len(x_TD) // 2]]
            experts.append(torch.linalg.svd(half, full_matrices=False)[2][:8].T)
        found.append(torch.stack(experts))
    return found


def test_frames_are_principal_directions_of_each_layers_inputs(settings: Settings) -> None:
    alone = start(ParallelConfig(), "cpu")
    trainer, twin = (build_trainer(settings(seed=3, model=PCA), alone) for _ in range(2))
    haar = frames(trainer.model)
    frames_from_first_batch(trainer)
    for found, before, want in zip(frames(trainer.model), haar, by_hand(twin), strict=True):
        assert float(geometry.chordal_distance(found.double(), want).max()) < 1e-5
        assert float(geometry.chordal_distance(found, before).min()) > 0.5
        assert float(geometry.orthonormality_error(found)) < 1e-6
    assert trainer.model.training
    for router in routers(trainer.model):  # the pass is not part of what is measured
        assert not router.counter.sums.any()
        assert not router.prior_sums.any()
    again = frames(trainer.model)
    frames_from_first_batch(trainer)
    assert all(torch.equal(a, b) for a, b in zip(again, frames(trainer.model), strict=True))


def test_two_processes_start_with_the_frames_of_one(settings: Settings) -> None:
    alone = first_frames(settings(model=PCA))
    config = settings(model=PCA, parallel={"expert": 2})  # which shards everything else too
    first, second = Processes(2, first_frames, config).answers()
    for own, other, want in zip(first, second, alone, strict=True):
        assert torch.equal(own, other)
        assert float(geometry.chordal_distance(own, want).max()) < 1e-4


def test_only_a_new_run_looks_at_its_first_batch(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run has its frames in the checkpoint: stopped and resumed, it is the run without a stop.

    The optimiser `qr` starts at the frames that the model has at the first step, and keeps its matrix in checkpoints.
    """
    calls = []

    def watched(trainer: Trainer) -> None:
        calls.append(trainer.config.out)
        frames_from_first_batch(trainer)

    monkeypatch.setattr(loop, "frames_from_first_batch", watched)
    options: dict[str, Any] = {
        "model": PCA,
        "optim": {"warmup": 1, "frames_method": "qr"},
        "validation": {"tokens": 100},
    }
    straight, broken = (settings(name, steps=2, **options) for name in ("straight", "broken"))
    train(straight)

    train_step = loop.train_step

    def fails(trainer: Trainer, step: int, batch: Tensor) -> Any:
        if step == 1:
            raise KeyboardInterrupt
        return train_step(trainer, step, batch)

    monkeypatch.setattr(loop, "train_step", fails)
    every = settings("broken", steps=2, checkpoint={"every": 1}, **options)
    with pytest.raises(KeyboardInterrupt):
        train(every)
    monkeypatch.setattr(loop, "train_step", train_step)
    train(every, resume=True)
    a, b = (open_model(Path(c.out), "last").model.state_dict() for c in (straight, broken))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert calls == [straight.out, broken.out]
    train(settings("other", steps=1, start_from=straight.out, **options))  # has its frames from elsewhere
    assert calls == [straight.out, broken.out]
