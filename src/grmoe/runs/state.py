"""The state of a model and its optimisers by parameter name, which any number of processes can read.

    state = gather(model, optimizers)                        # refers to the live tensors
    checkpoints.save(step, state)
    …
    state = checkpoints.load(latest, gather(model, optimizers))
    restore(model, optimizers, state)

Moments and options are stored per parameter. Sharding and parameter groups may differ between saving and loading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Adam, Optimizer

from grmoe import checks
from grmoe.optim import GrassmannAdam, QRAdam

# Options that change how a step is computed, but not its result. They are not saved.
_IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")


def gather(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """{"model": tensors, "moments": optimiser states, "groups": their options}, for `Checkpoints` to write or fill.

    With a leading term also {"leading": the routers' `leading_share`}.

    A parameter without a step has its initial moments, so that a checkpoint has the same entries at every step.
    """
    names = _names(model)
    moments, groups = {}, []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                moments[names[p]] = dict(optimizer.state.get(p) or _start(optimizer, p))
            options = {key: _plain(value) for key, value in group.items() if key not in _IMPLEMENTATION}
            groups.append({"params": [names[p] for p in group["params"]], **options})
    tensors = {name: tensor.detach() for name, tensor in _once(model)}
    leading = dict(_leading(model))
    # One string, because in a tree every option of every group would be a separate entry of the checkpoint.
    found = {"model": tensors, "moments": moments, "groups": json.dumps(groups)}
    return found | ({"leading": leading} if leading else {})


@torch.no_grad()
def restore(model: nn.Module, optimizers: Sequence[Optimizer], state: dict[str, Any]) -> None:
    """Put a loaded state into a model and its optimisers: weights, moments, rates and all other options.

    The optimisers keep its tensors. Do not pass a state that `gather` made from a model that continues training.
    """
    for name, tensor in _once(model):
        tensor.copy_(state["model"][name])
    for name, share_N in _leading(model):
        share_N.copy_(state["leading"][name])
    names = _names(model)
    options = {}
    for saved in json.loads(state["groups"]):
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k != "params"}
        options.update(dict.fromkeys(saved["params"], values))
    for optimizer in optimizers:
        packed = optimizer.state_dict()
        entries = {}
        for group, live in zip(packed["param_groups"], optimizer.param_groups, strict=True):
            members = [names[p] for p in live["params"]]
            same = all(options[name] == options[members[0]] for name in members)
            checks.require(
                same, f"parameters of one group must have been saved with the same options: {members}"
            )
            group.update(options[members[0]])
            for index, name in zip(group["params"], members, strict=True):
                if state["moments"][name]["step"] > 0:
                    entries[index] = state["moments"][name]
        optimizer.load_state_dict({"state": entries, "param_groups": packed["param_groups"]})


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Copy whole tensors into a model, which may be sharded. A learned α that the source lacks keeps its start."""
    for name, tensor in _once(model):
        if name not in weights and name.endswith("log_alpha"):
            continue
        checks.require(name in weights, f"{source} has no tensor {name}, which this model needs")
        whole = weights[name].to(tensor.device)
        same = whole.shape == tensor.shape
        checks.require(
            same, f"{name} must have shape {tuple(tensor.shape)}, got {tuple(whole.shape)} in {source}"
        )
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(whole)


def _all(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers. A tied parameter appears under each of its names."""
    # `state_dict`, because FSDP's hooks then return shards instead of gathered parameters. Compiling adds a prefix.
    for name, tensor in model.state_dict(keep_vars=True).items():
        yield name.replace("_orig_mod.", ""), tensor


def _once(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The same, but a tied parameter appears only under its first name."""
    seen = set()
    for name, tensor in _all(model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _leading(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`leading_share` of the routers that have one. They are of training alone, so no saved model has them."""
    for name, tensor in model.named_buffers():
        if name.endswith(".leading_share"):
            yield name.replace("_orig_mod.", ""), tensor


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {tensor: name for name, tensor in _once(model)}


def _start(optimizer: Optimizer, p: Tensor) -> dict[str, Tensor]:
    """The state of a parameter before its first step."""
    if isinstance(optimizer, GrassmannAdam | QRAdam):
        return optimizer.initial_state(p)
    checks.require(
        isinstance(optimizer, Adam), f"optimisers must be AdamW, Adam or GrassmannAdam, got {optimizer}"
    )
    moments = {name: torch.zeros_like(p, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros(()), **moments}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
