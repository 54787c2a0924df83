"""What a run has left, for comparison with another to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from grmoe.parallel.world import World
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import checkpoints_of, read_log
from grmoe.runs.state import gather
from grmoe.train.setup import build_trainer

TIMES = ("tokens_per_second", "mfu", "memory_gb", "seconds_left")


def state_of(config: TrainConfig, step: int) -> dict[str, Any]:
    """Weights, both optimisers' moments and their options in a checkpoint of any number of processes."""
    trainer = build_trainer(config, World(0, 1, 0, torch.device("cpu"), None))
    checkpoints = checkpoints_of(Path(config.out), config)
    checkpoint = next(c for c in checkpoints.all() if c.step == step)
    return checkpoints.load(checkpoint, gather(trainer.model, trainer.optimizers))


def story(config: TrainConfig) -> list[dict[str, Any]]:
    """The log without what the clock says."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_log(Path(config.out))]


def leftovers(config: TrainConfig) -> list[str]:
    """Files and folders that were to have another name."""
    paths = Path(config.out).rglob("*")
    return [
        p.name for p in paths if p.name.startswith(".writing") or p.name.endswith((".partial", ".replaced"))
    ]


def assert_same(a: TrainConfig, b: TrainConfig, steps: Iterable[int] = (20,)) -> None:
    """The same log, and the same checkpoints of these steps, to the bit."""
    assert story(a) == story(b)
    assert not leftovers(a)
    for step in steps:
        ours, theirs = state_of(a, step), state_of(b, step)
        for name, value in theirs["model"].items():
            assert torch.equal(ours["model"][name], value), name
        assert ours.keys() == theirs.keys()
        for name, share_N in theirs.get("leading", {}).items():
            assert torch.equal(ours["leading"][name], share_N), name
        for name, moments in theirs["moments"].items():
            for key, value in moments.items():
                assert torch.equal(ours["moments"][name][key], value), (name, key)
        # Groups are cut by where their parameters live: the same ones for the same processes.
        assert ours["groups"] == theirs["groups"]
