"""What one process sends in a training step, from the shapes of a model on the meta device.

`tests/parallel/test_cost.py` compares it, byte for byte, with what real processes send.

Legend: P processes, n processes of a group; R × F × E = P the mesh replicate × fsdp × expert; T tokens of a process
per step, D model width, N experts, K experts per token; c bytes of a weight in computations: 2 in bf16, 4 in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from grmoe import checks
from grmoe.layer import MoE
from grmoe.model.modeling_grmoe import GrmoeForCausalLM
from grmoe.parallel.shard import check_expert_split, expert_shard_dim, shard_dim
from grmoe.routing import all_routers, routers

FP32 = 4  # master weights, reduced gradients, moments, routers


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The mesh, and what each process computes in a step."""

    replicate: int = 1
    fsdp: int = 1
    expert: int = 1
    sequences: int = 8
    """Sequences per process and step."""
    length: int = 1024
    """Tokens per sequence."""
    micro_batches: int = 1
    """Micro-batches per step."""
    bf16: bool = True
    checkpointing: bool = False
    """Activation checkpointing."""

    def __post_init__(self) -> None:
        for name in ("replicate", "fsdp", "expert", "sequences", "length", "micro_batches"):
            checks.positive_int(name, getattr(self, name))
        checks.require(self.processes > 1, "a plan must have at least two processes, got one")
        checks.require(
            self.sequences % self.micro_batches == 0,
            f"micro_batches must divide the {self.sequences} sequences, got {self.micro_batches}",
        )

    @classmethod
    def on(cls, processes: int, *, replicate: int = 1, expert: int = 1, **step: Any) -> Plan:
        """A plan for a number of processes: `fsdp` gets all that the other two leave. `step`: the other fields."""
        others = replicate * expert
        checks.require(
            processes % others == 0,
            f"replicate × expert must divide the number of GPUs, got {replicate} × {expert} for {processes}",
        )
        return cls(replicate=replicate, fsdp=processes // others, expert=expert, **step)

    @property
    def processes(self) -> int:
        return self.replicate * self.fsdp * self.expert

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def compute_bytes(self) -> int:
        return 2 if self.bf16 else 4


# -- what FSDP gathers and reduces at once ---------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered and reduced together: a block, the experts of a block, or the rest (the root)."""

    kind: Literal["block", "experts", "root"]
    shard: int
    """Elements that a process holds, including padding."""
    n: int
    """Processes that share them: F·E, or F for experts that are already divided over E."""
    kept: bool
    """Stays gathered until the backward."""

    @property
    def whole(self) -> int:
        """Elements when gathered."""
        return self.n * self.shard


def groups(model: GrmoeForCausalLM, plan: Plan) -> list[Group]:
    """The groups that `shard` makes, in the order of the blocks, the root last.

    If a parameter is divided along a dimension of size d, every process holds ⌈d/n⌉ of it, with padding. So all
    processes allocate, send and reduce the same amount.
    """
    n, found = plan.fsdp * plan.expert, []
    done = {p for router in all_routers(model) for p in router.parameters()}
    layers = list(model.model.layers)
    for layer in layers:
        if plan.expert > 1 and isinstance(layer.mlp, MoE):
            check_expert_split(len(layer.mlp.experts.down_proj), plan.expert)
            weights = _new(layer.mlp.experts, done)
            held = sum(
                _part(p, expert_shard_dim(p.shape, plan.fsdp), plan.fsdp) // plan.expert for p in weights
            )
            found.append(Group("experts", held, plan.fsdp, kept=False))
        held = sum(_part(p, shard_dim(p.shape, n), n) for p in _new(layer, done))
        found.append(Group("block", held, n, kept=layer is layers[-1]))
    held = sum(_part(p, shard_dim(p.shape, n), n) for p in _new(model, done))
    return [*found, Group("root", held, n, kept=True)]


def _new(module: nn.Module, done: set[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters that are not in `done`. Adds them to it."""
    new = [p for p in module.parameters() if p not in done]
    done.update(new)
    return new


def _part(p: nn.Parameter, dim: int, n: int) -> int:
    return p.numel() // p.shape[dim] * math.ceil(p.shape[dim] / n)


# -- communication ---------------------------------------------------------------------------------------------

Op = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind that a process takes part in during a step.

    given: bytes of the whole tensors: the output of an all-gather, the input of the others.
    sent: bytes that leave a process, with the rings that NCCL and gloo use for large tensors:
        all-gather, reduce-scatter   (n−1)/n · given (gloo implements reduce-scatter as an all-reduce: twice that)
        all-reduce                   2 (n−1)/n · given: a reduce-scatter and an all-gather
        all-to-all                   (n−1)/n · given, for a balanced load: a process keeps its own part
    """

    what: str
    op: Op
    n: int
    """Processes of the group."""
    stride: int
    """Difference of the ranks of two neighbours."""
    calls: int
    given: int
    hidden: bool
    """FSDP overlaps it with the computation, on its own stream."""

    @property
    def sent(self) -> float:
        return (2 if self.op == "all-reduce" else 1) * (self.n - 1) / self.n * self.given


def traffic(model: GrmoeForCausalLM, plan: Plan) -> list[Traffic]:
    """All collectives of a step, without those of one process and those of zero bytes.

    weights      gather every group in c bytes, in each micro-batch: for the forward, and again for the backward unless
                 it was kept
    gradients    reduce every group in fp32, once, in the last micro-batch; if R > 1, then all-reduce the shards
    routers      reduce their gradients in fp32, once, over all processes
    rows         T·K rows of D numbers in c bytes per MoE layer: to the experts and back in the forward, the same in the
                 backward; with checkpointed activations, those of the forward once more
    row counts   N int64 before each time that rows are sent
    the rest     fp32: the norm of the gradient, three losses, the load of each expert; int64: the flag of a signal
    """
    c, E = plan.compute_bytes, plan.expert
    parts = groups(model, plan)
    found_routers = all_routers(model)
    config = model.config
    forwards = 2 if plan.checkpointing else 1
    layers = len(config.moe_layers)
    found = []
    for title, stride, members in (
        ("", 1, [g for g in parts if g.kind != "experts"]),
        ("expert ", E, [g for g in parts if g.kind == "experts"]),
    ):
        released = [g for g in members if not g.kept]
        found += [
            _gather(f"{title}weights, forward", members, plan, stride),
            _gather(f"{title}weights, backward", released, plan, stride),
            _reduce(f"{title}gradients", members, stride),
            Traffic(
                f"{title}gradients of the copies", "all-reduce", plan.replicate, plan.fsdp * E, len(members),
                FP32 * sum(g.shard for g in members), hidden=True,
            ),
        ]  # fmt: skip
    rows = round(plan.tokens * routers(model)[0].experts_per_token(plan.length)) * config.hidden_size * c
    counts = 8 * config.num_experts * plan.micro_batches
    exchanges = 2 * forwards + 2
    weights = sum(p.numel() for router in found_routers for p in router.parameters())
    small = FP32 * (1 + 3 + sum(router.prior_sums.numel() for router in found_routers)) + 8
    found += [
        Traffic(
            "rows", "all-to-all", E, 1, layers * exchanges * plan.micro_batches, layers * exchanges * rows,
            hidden=False,
        ),
        Traffic(
            "row counts", "all-to-all", E, 1, layers * forwards * plan.micro_batches,
            layers * forwards * counts, hidden=False,
        ),
        Traffic("routers", "all-reduce", plan.processes, 1, 1, FP32 * weights, hidden=False),
        Traffic("norm, losses, loads", "all-reduce", plan.processes, 1, 4, small, hidden=False),
    ]  # fmt: skip
    return [t for t in found if t.n > 1 and t.given]


def _gather(what: str, members: list[Group], plan: Plan, stride: int) -> Traffic:
    given = plan.micro_batches * plan.compute_bytes * sum(g.whole for g in members)
    n = members[0].n if members else 1
    return Traffic(what, "all-gather", n, stride, plan.micro_batches * len(members), given, hidden=True)


def _reduce(what: str, members: list[Group], stride: int) -> Traffic:
    n = members[0].n if members else 1
    given = FP32 * sum(g.whole for g in members)
    return Traffic(what, "reduce-scatter", n, stride, len(members), given, hidden=True)
