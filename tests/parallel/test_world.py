"""Sizes that fit the processes, and what processes tell each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import ALONE
from processes import run

from grmoe.parallel.world import ParallelConfig, World, any_process, mean, start, stop, total


def alone(monkeypatch: pytest.MonkeyPatch, size: int = 1) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def test_alone_there_is_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    for config in (ParallelConfig(), ParallelConfig(fsdp=1)):
        world = start(config, "cpu")
        assert (world.rank, world.size, world.mesh, world.first) == (0, 1, None, True)
        assert not dist.is_initialized()
    stop()
    value = torch.tensor([1.0, 2.0])
    assert torch.equal(mean(ALONE, value), value)
    assert torch.equal(total(ALONE, value), value)
    assert any_process(ALONE, True)
    assert not any_process(ALONE, False)


@pytest.mark.parametrize(
    ("config", "size", "need", "command"),
    [
        (ParallelConfig(fsdp=2), 1, "fsdp=2, replicate=1, expert=1 need 2, got 1", "--nproc-per-node=2"),
        (
            ParallelConfig(expert=4),
            1,
            "replicate=1, expert=4 need a multiple of 4, got 1",
            "--nproc-per-node=4",
        ),
        (ParallelConfig(replicate=2, expert=2), 6, "need a multiple of 4, got 6", "--nproc-per-node=4"),
        (ParallelConfig(fsdp=2, replicate=3, expert=2), 8, "need 12, got 8", "--nproc-per-node=12"),
        (ParallelConfig(fsdp=1), 2, "need 1, got 2", "--nproc-per-node=1"),
    ],
)
def test_sizes_that_do_not_fit_say_what_would(
    config: ParallelConfig, size: int, need: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch, size)
    with pytest.raises(ValueError, match="parallel sizes must multiply to the number of processes") as caught:
        start(config, "cpu")
    assert need in str(caught.value)
    assert f"torchrun {command} " in str(caught.value)
    assert "or give other sizes: parallel.expert=1" in str(caught.value)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "mps", ""])
def test_a_device_is_one_we_know(device: str) -> None:
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:N, got"):
        start(ParallelConfig(), device)


def test_a_gpu_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="device must exist, got cuda:2 on a machine with 2 GPUs"):
        start(ParallelConfig(), "cuda:2")


@pytest.mark.parametrize("sizes", [{"expert": 0}, {"replicate": -1}, {"fsdp": 0}])
def test_a_size_is_positive(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(sizes))} must be an integer >= 1"):
        ParallelConfig(**sizes)


def talk(world: World) -> dict[str, Any]:
    assert world.mesh is not None
    value = torch.tensor([1.0, 10.0]) * (world.rank + 1)
    result = {
        "mesh": (world.mesh.mesh_dim_names, tuple(world.mesh.shape)),
        "first": world.first,
        "mean": mean(world, value),
        "total": total(world, value),
        "untouched": value,
        "any_process": [any_process(world, flag) for flag in (False, world.rank == 1, True)],
    }
    stop()
    return {**result, "left": not dist.is_initialized()}


def again(world: World) -> list[Any]:
    second = start(ParallelConfig(), "cpu")
    return [world.joined, second.joined, tuple(second.mesh.shape), total(second, torch.ones(1)).tolist()]  # type: ignore[union-attr]


def test_a_group_is_joined_once() -> None:
    """Processes that left and joined again, as trainings in a row did, could wait for each other forever."""
    for got in run(ParallelConfig(expert=2), 2, again):
        assert got == [True, False, (1, 2, 1), [2.0]]


def test_processes_count_together() -> None:
    for rank, got in enumerate(run(ParallelConfig(expert=2), 2, talk)):
        assert got["mesh"] == (("replicate", "fsdp", "expert"), (1, 1, 2))
        assert got["first"] == (rank == 0)
        assert got["mean"].tolist() == [1.5, 15.0]
        assert got["total"].tolist() == [3.0, 30.0]
        assert got["untouched"].tolist() == [rank + 1.0, 10.0 * (rank + 1)]
        assert got["any_process"] == [False, True, True]
        assert got["left"]
