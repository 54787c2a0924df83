"""The search for the layer where NaN or Inf first appears.

Legend: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from grmoe.parallel.world import smallest
from grmoe.train.passes import forward_passes
from grmoe.train.setup import Trainer

# The modules to check, by the last part of their names.
_CHECKED = ("embed_tokens", "self_attn", "mlp", "norm")


def find_nonfinite(trainer: Trainer, step: int, batch_BS: Tensor) -> str:
    """Where NaN or Inf first appears: in the weights, else in the forward pass, else in the gradients.

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
    try:
        for loss, _, _ in forward_passes(trainer, model, step, batch_BS.to(world.device)):
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    number = smallest(world, min(bad_calls, default=len(calls)))
    if number < len(calls):
        return f"the output of {calls[number]} holds NaN or Inf"
    # From the loss backwards.
    number = first_bad([p.grad for p in reversed(list(model.parameters()))])
    if number < len(names):
        return f"the forward pass is finite, the gradient of {names[-1 - number]} is not"
    return "every layer is finite: the loss overflowed"


def _finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(torch.isfinite(local).all())
