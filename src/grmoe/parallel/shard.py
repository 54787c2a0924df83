"""Shard a model over processes: FSDP2, expert parallelism, and the same gradients as on a single process.

The loss is the mean over processes of the mean over their tokens, and so is every gradient:
    weights of blocks, embedding, head   sharded over fsdp × expert, reduced by FSDP
    experts                              divided over expert (see `experts.py`), then sharded over fsdp by FSDP
    routers                              a full copy on every process, because frames need whole columns;
                                         reduced by `finish_gradients`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from grmoe import checks
from grmoe.experts import ExpertWeights
from grmoe.layer import MoE
from grmoe.model.block_grmoe import OWN_EXPERTS, GrmoeDecoderLayer
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.model.modeling_grmoe import GrmoeForCausalLM
from grmoe.parallel.experts import ExpertParallel
from grmoe.parallel.world import World, mean, total
from grmoe.routing import all_routers


def shard(model: GrmoeForCausalLM, world: World, bf16: bool = False) -> None:
    """Shard the model in place. Does nothing if there is only one process.

    Every process must have the same weights, for example from the same seed. (`build_model` shards while it builds.)
    Create optimisers afterwards, because sharding replaces the parameters.
    bf16: gather weights and compute in bf16, reduce gradients and keep master weights in fp32. Routers use fp32.
    """
    if world.mesh is None:
        return
    sharding = Sharding(model.config, world.mesh, bf16)
    blocks = list(model.model.layers)
    for block in blocks:
        sharding.block(block, last=block is blocks[-1])
    sharding.root(model)


class Sharding:
    """Shards a model over a mesh: the blocks in any order, then the rest (the root)."""

    def __init__(self, config: GrmoeConfig, mesh: DeviceMesh, bf16: bool) -> None:
        if mesh["expert"].size() > 1:
            name = config._experts_implementation
            checks.require(
                name in OWN_EXPERTS,
                f"experts_implementation must be one of {OWN_EXPERTS} with parallel.expert > 1, got {name!r}",
            )
            check_expert_split(config.num_experts, mesh["expert"].size())
        self.mesh, self.dense = mesh, _dense_mesh(mesh)
        self.policy = MixedPrecisionPolicy()
        if bf16:
            self.policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def block(self, block: GrmoeDecoderLayer, last: bool) -> None:
        """last: whether this is the last block that the forward pass computes."""
        if self.mesh["expert"].size() > 1 and isinstance(block.mlp, MoE):
            _divide_experts(block.mlp, self.mesh, self.policy)
        self._divide(block, keep=last)

    def root(self, model: GrmoeForCausalLM) -> None:
        self._divide(model, keep=True)

    def _divide(self, module: nn.Module, keep: bool) -> None:
        """keep: leave the weights gathered after the forward, because the backward needs them first."""
        fully_shard(
            module,
            mesh=self.dense,
            mp_policy=self.policy,
            ignored_params={p for router in all_routers(module) for p in router.parameters()},
            shard_placement_fn=lambda p: Shard(shard_dim(p.shape, self.dense.shape[-1])),
            reshard_after_forward=not keep,
        )


def check_expert_split(experts: int, processes: int) -> None:
    checks.require(
        experts % processes == 0,
        f"parallel.expert must divide the number of experts, got {processes} for {experts}",
    )


def shard_dim(shape: Sequence[int], processes: int) -> int:
    """The dimension to shard. If it does not divide evenly, the last shards are padded."""
    if len(shape) < 3:
        return 0
    # With few experts and many processes, sharding the experts would give most processes padding only.
    return next((dim for dim, size in enumerate(shape) if size % processes == 0), 0)


def expert_shard_dim(shape: Sequence[int], processes: int) -> int:
    """The dimension to shard of experts that are already divided among processes along the first dimension."""
    even = [dim for dim in (1, 2) if shape[dim] % processes == 0]
    checks.require(
        bool(even),
        f"parallel.fsdp must divide a side of the experts' matrices, got {processes} for {tuple(shape)}",
    )
    return even[0]


def _dense_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh for everything but experts: fsdp × expert is one dimension to FSDP."""
    replicate, fsdp, expert = mesh.shape
    if expert == 1:
        return mesh["replicate", "fsdp"] if replicate > 1 else mesh["fsdp"]
    sizes, names = (replicate, fsdp * expert), ("replicate", "shard")
    flat = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=names)
    return flat if replicate > 1 else flat["shard"]


def _divide_experts(moe: MoE, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Each process keeps N/E experts. FSDP shards another dimension of them."""
    experts, group = moe.experts, mesh["expert"]
    for name, p in list(experts.named_parameters()):
        part = p.detach().chunk(group.size())[group.get_local_rank()].clone()
        divided = DTensor.from_local(part, group, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(divided, requires_grad=p.requires_grad))

    def placement(p: nn.Parameter) -> Shard:
        return Shard(expert_shard_dim(p.shape, mesh["fsdp"].size()))

    shards = mesh["replicate", "fsdp"] if mesh["replicate"].size() > 1 else mesh["fsdp"]
    fully_shard(experts, mesh=shards, mp_policy=policy, shard_placement_fn=placement)
    register_fsdp_forward_method(experts, ExpertWeights.run.__name__)
    moe.transport = ExpertParallel(group.get_group())


# -- gradients -------------------------------------------------------------------------------------------------


def accumulate(model: nn.Module, world: World, last: bool) -> None:
    """Call before the backward of a micro-batch: gradients are reduced over processes only in the last one.

    Until then each process holds the full gradients of all weights it computes with.
    """
    if world.mesh is not None:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)


@torch.no_grad()
def finish_gradients(model: nn.Module, world: World) -> None:
    """Call after the last backward of a step: average the gradients of routers, which FSDP does not reduce."""
    if world.mesh is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for p in model.parameters():
        if p.grad is not None and not isinstance(p, DTensor):
            by_dtype[p.grad.dtype].append(p.grad)
    for grads in by_dtype.values():
        _write(mean(world, _flat(grads)), grads)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, world: World) -> Tensor:
    """Scale the gradients by min(1, max_norm / (‖g‖ + 1e-6)). Returns ‖g‖ of the whole model.

    Each process adds the squares it holds, divided by the number of processes that hold the same elements. Nothing is
    read on the host.
    """
    parameters = list(parameters)
    if world.mesh is None:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    grads = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    copies = [world.size / _shards(g) for g in grads]
    squares = torch._foreach_pow(torch._foreach_norm(local), 2)
    norm = total(world, torch.stack(torch._foreach_div(squares, copies)).sum()).sqrt_()
    torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp_(max=1.0))
    return norm


def _shards(tensor: Tensor) -> int:
    """Number of parts that a tensor is divided into."""
    parts = 1
    if isinstance(tensor, DTensor):
        for dim, placement in enumerate(tensor.placements):
            parts *= 1 if placement.is_replicate() else tensor.device_mesh.size(dim)
    return parts


def split_by_mesh(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split parameter groups so that each has parameters of one mesh only. Multi-tensor optimisers need that."""
    cut: list[dict[str, Any]] = []
    for group in groups:
        by_mesh: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            by_mesh[p.device_mesh if isinstance(p, DTensor) else None].append(p)
        cut.extend({**group, "params": params} for params in by_mesh.values())
    return cut


# -- what routers count ----------------------------------------------------------------------------------------


@torch.no_grad()
def sync_routers(model: nn.Module, world: World) -> None:
    """Call before `update_priors`: give every process the loads and leads of all tokens.

    It averages the sums. A load is a ratio of two sums, so calling it twice counts nothing twice.
    """
    counters = [router.counter for router in all_routers(model)]
    sums = [counter.prior_sums for counter in counters]
    sums += [counter.leading_sums for counter in counters if counter.leading_sums is not None]
    if world.mesh is not None and sums:
        _write(mean(world, _flat(sums)), sums)


@torch.no_grad()
def sync_metrics(model: nn.Module, world: World) -> None:
    """Call before reading metrics: give every process the totals of all processes.

    Reset the metrics after reading them, because a second call without a reset would count tokens several times.
    """
    sums = [router.counter.sums for router in all_routers(model)]
    if world.mesh is not None and sums:
        _write(total(world, _flat(sums)), sums)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def _write(flat: Tensor, tensors: list[Tensor]) -> None:
    parts = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])
