"""One real training step, and every byte its collectives were given, seen below FSDP, DTensor and our own code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from grmoe.model import GrmoeForCausalLM, preset
from grmoe.optim import GrassmannAdam
from grmoe.parallel.cost import Plan
from grmoe.parallel.world import World, any_process
from grmoe.routing import routers
from grmoe.runs.config import DataConfig, ElasticConfig, TrainConfig
from grmoe.train.setup import build_learner
from grmoe.train.step import train_step

OPS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
}
COUNTS = "all-to-all of counts"


@dataclass
class Seen:
    """Collectives of one kind in a group of n processes."""

    calls: int = 0
    given: int = 0
    sent: int = 0  # to other processes; known of an all-to-all, where the call says what goes where


class Collectives(TorchDispatchMode):
    """Sums up what c10d's operators are called with; an operator it does not know fails."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[str, int], Seen] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def count(self, name: str, args: Any) -> None:
        op = OPS[name]
        group = dist.ProcessGroup.unbox(args[1 if op == "all-reduce" else 2])
        whole = args[0][0] if op == "all-reduce" else args[0] if op == "all-gather" else args[1]
        if op == "all-to-all" and whole.dtype == torch.int64:
            op = COUNTS
        seen = self.seen.setdefault((op, group.size()), Seen())
        seen.calls += 1
        seen.given += whole.nbytes
        if op == "all-to-all":
            stay = args[4][group.rank()]
            seen.sent += whole.nbytes - stay * whole[0].nbytes if len(whole) else 0


@dataclass
class Step:
    seen: dict[tuple[str, int], Seen]
    held: dict[str, int]


def step(world: World, name: str, changes: dict[str, Any], plan: Plan) -> Step:
    """The second step of a run, for optimisers have their moments then: what was sent, and what was held."""
    micro, rows = plan.sequences // plan.micro_batches, plan.sequences * world.size
    config = TrainConfig(
        precision="bf16" if plan.bf16 else "fp32",
        activation_checkpointing=plan.checkpointing,
        data=DataConfig(batch_size=rows, micro_batch_size=micro),
        elastic=ElasticConfig(unit="off"),
    ).resolved()
    learner = build_learner(config, world, preset(name, **changes), plan.length)
    model, optimizers = learner.model, learner.optimizers
    seed = torch.Generator().manual_seed(world.rank)
    batch = torch.randint(model.config.vocab_size, (plan.sequences, plan.length + 1), generator=seed)
    train_step(learner, 0, batch)
    held: dict[str, int] = {}
    # The last one to step; gradients are still there.
    optimizers[-1].register_step_post_hook(lambda *_: held.update(held_bytes(model, optimizers)))
    with Collectives() as collectives:
        train_step(learner, 1, batch)
        any_process(world, False)
    return Step(collectives.seen, held)


def held_bytes(model: GrmoeForCausalLM, optimizers: list[Optimizer]) -> dict[str, int]:
    own = {p for router in routers(model) for p in router.parameters()}
    divided = [p for p in model.parameters() if p not in own]
    states = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}

    def moments(parameters: Iterable[Tensor]) -> int:
        return _bytes(t for p in parameters for key, t in states[p].items() if key != "step")

    workspaces = [t for o in optimizers if isinstance(o, GrassmannAdam) for t in o._workspaces.values()]
    return {
        "weights": _bytes(divided),
        "gradients": _bytes(p.grad for p in divided),
        "moments": moments(divided),
        "routers": _bytes(own) + _bytes(p.grad for p in own) + moments(own) + _bytes(workspaces),
    }


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    """Of the memory behind them, padding included, shared memory once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def wire(world: World, given: int) -> dict[str, float]:
    """Bytes that a collective of so many sends from each process, by the counters of the loopback device."""
    whole = torch.zeros(given, dtype=torch.uint8)
    part, other = whole[: given // world.size].clone(), torch.empty_like(whole)
    collectives = {
        "all-gather": lambda: dist.all_gather_single(whole, part),
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
    }
    found = {}
    for name, run in collectives.items():
        tries = []
        # Others may send something at the same time: the quietest of several tries.
        for _ in range(10):
            dist.barrier()
            before = _loopback()
            dist.barrier()
            run()
            dist.barrier()
            tries.append(_loopback() - before)
        found[name] = min(tries) / world.size
    return found


def _loopback() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split()[9])
