"""The search for the layer where NaN or Inf first appears.

Legend: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grmoe.parallel.shard import clip_gradients
from grmoe.parallel.world import World, smallest
from grmoe.train.passes import forward_passes
from grmoe.train.setup import Learner

# The modules to check, by the last part of their names.
_CHECKED = ("embed_tokens", "self_attn", "mlp", "norm")


def find_nonfinite(trainer: Learner, step: int, batch_BS: Tensor) -> str | None:
    """Where NaN or Inf first appears: in the weights, else in the forward pass, else in the gradients. None if it does
    not appear again.

    Runs the step again, uncompiled, because clipping has spread a NaN over all gradients. All processes call this
    together and get the same answer, because one process may find in its shards or sequences what others do not.
    """
    model, world = trainer.model, trainer.world
    names = [name for name, _ in model.named_parameters()]

    def first_bad(tensors: list[Tensor | None]) -> int:
        bad = (i for i, t in enumerate(tensors) if t is not None and not _finite(t))
        return smallest(world, next(bad, len(tensors)))

    number = first_bad(list(model.parameters()))
    if number < len(names):
        return f"the weights {names[number]} hold NaN or Inf"

    calls: list[str] = []  # in the same order on all processes
    bad_calls: list[int] = []

    def check_output_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if not all(_finite(t) for t in tensors if isinstance(t, Tensor)):
                bad_calls.append(len(calls))
            calls.append(name)

        return hook

    checked = [(name, module) for name, module in model.named_modules() if name.endswith(_CHECKED)]
    hooks = [module.register_forward_hook(check_output_of(name)) for name, module in checked]
    trainer.zero_grad()
    losses: list[Tensor | None] = []
    try:
        for loss, _, _ in forward_passes(trainer, model, step, batch_BS.to(world.device)):
            losses.append(loss.detach())
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    number = smallest(world, min(bad_calls, default=len(calls)))
    if number < len(calls):
        return f"the output of {calls[number]} holds NaN or Inf"
    if first_bad(losses) < len(losses):
        return "every layer is finite: the loss overflowed"
    # From the loss backwards.
    number = first_bad([p.grad for p in reversed(list(model.parameters()))])
    if number < len(names):
        return f"the forward pass is finite, the gradient of {names[-1 - number]} is not"
    norm = clip_gradients([p for p in model.parameters() if p.grad is not None], math.inf, world)
    return "every gradient is finite: their norm overflowed" if first_bad([norm]) == 0 else None


def find_bad_state(state: dict[str, Any], world: World) -> str | None:
    """What of a state to save holds NaN or Inf: weights, or moments of an optimiser. None if nothing does.

    All processes call this together and get the same answer. A state with NaN cannot be trained further.
    """
    named = [(f"the weights {name}", tensor) for name, tensor in state["model"].items()]
    for name, moments in state["moments"].items():
        named += [(f"the moments of {name}", t) for t in moments.values() if isinstance(t, Tensor)]
    # One answer per device for all tensors, because reading them one by one would wait for the device each time.
    bad = smallest(world, _first_bad([tensor for _, tensor in named]))
    return None if bad == len(named) else named[bad][0]


def _first_bad(tensors: list[Tensor]) -> int:
    """The number of the first tensor with NaN or Inf in this process's part; their count if there is none."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    flags = [torch.isfinite(t).all() for t in local]
    devices = {flag.device for flag in flags}
    if all(bool(torch.stack([f for f in flags if f.device == device]).all()) for device in devices):
        return len(tensors)
    return next(i for i, flag in enumerate(flags) if not flag)


def _finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(torch.isfinite(local).all())
