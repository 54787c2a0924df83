"""The processes that `torchrun` starts, arranged as a mesh replicate × fsdp × expert.

Every process computes its own part of the batch. `fsdp · expert` processes together hold one copy of the model, and
there are `replicate` copies. The experts of a copy are divided among `expert` processes.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grmoe import checks
from grmoe.hardware import use_device

_DIMS = ("replicate", "fsdp", "expert")


@dataclass(frozen=True)
class ParallelConfig:
    """How processes divide the model. The product of the three sizes is the number of processes."""

    fsdp: int | None = None
    """Processes that share the parameters of a copy of the model (FSDP). Default: all that the other two leave."""
    replicate: int = 1
    """Copies of the whole model (HSDP)."""
    expert: int = 1
    """Processes that share the experts of a copy of the model (expert parallelism)."""

    def __post_init__(self) -> None:
        checks.positive_int("replicate", self.replicate)
        checks.positive_int("expert", self.expert)
        if self.fsdp is not None:
            checks.positive_int("fsdp", self.fsdp)


@dataclass(frozen=True)
class World:
    """This process among all processes."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None
    """With the dimensions _DIMS; None if there is only one process."""
    joined: bool = False
    """Whether `start` joined the process group, or found it."""

    @property
    def first(self) -> bool:
        return self.rank == 0


def start(config: ParallelConfig, device: str = "auto") -> World:
    """Join the other processes, if there are any. A group that was joined before is used again: processes that leave a
    group and join again can wait for each other forever. A group that is joined here is left when the process ends.

    device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1". With "cuda", `torchrun` chooses the GPU.
    """
    rank, size, local_rank = (int(os.environ.get(k, d)) for k, d in _ENVIRONMENT.items())
    shape = _shape(config, size)
    place = use_device(device, local_rank)
    if size == 1:
        return World(rank, size, local_rank, place, None)
    joins = not dist.is_initialized()
    if joins:
        # gloo too, because flags, counts and the plans of checkpoints are on the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
        atexit.register(stop)
    mesh = init_device_mesh(place.type, shape, mesh_dim_names=_DIMS)
    return World(rank, size, local_rank, place, mesh, joins)


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def total(world: World, tensor: Tensor) -> Tensor:
    """Σ over all processes."""
    if world.mesh is None:
        return tensor
    summed = tensor.detach().clone()
    dist.all_reduce(summed)
    return summed


def mean(world: World, tensor: Tensor) -> Tensor:
    """Mean over all processes."""
    return tensor if world.mesh is None else total(world, tensor) / world.size


def any_process(world: World, flag: bool) -> bool:
    """Whether the flag is set on any process."""
    return bool(total(world, torch.tensor(int(flag))))


def smallest(world: World, number: int) -> int:
    """The smallest number over all processes."""
    value = torch.tensor(number)
    if world.mesh is not None:
        dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value)


_ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def _shape(config: ParallelConfig, size: int) -> tuple[int, int, int]:
    """Sizes of _DIMS. Raises with the command that starts the right number of processes."""
    others = config.replicate * config.expert
    fsdp = max(1, size // others) if config.fsdp is None else config.fsdp
    if others * fsdp == size:
        return config.replicate, fsdp, config.expert
    need = others * (config.fsdp or 1)
    asked = ", ".join(f"{name}={value}" for name, value in vars(config).items() if value is not None)
    raise ValueError(
        f"parallel sizes must multiply to the number of processes: {asked} need "
        f"{need if config.fsdp else f'a multiple of {need}'}, got {size}; "
        f"start them with: torchrun --nproc-per-node={need} -m grmoe train … or give other sizes: "
        "parallel.expert=1 parallel.replicate=1 (a checkpoint fits every size)"
    )
