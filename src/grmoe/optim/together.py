"""The steps of several optimisers, beside each other on a GPU.

`GrassmannAdam` is a chain of some fifty short kernels. AdamW is a few long ones that wait for memory. On two streams
the chain runs in the gaps of the long kernels and takes no time of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch.optim import Optimizer


def step_together(optimizers: Sequence[Optimizer]) -> None:
    """Each optimiser's step. No parameter may belong to two of them.

    On a GPU the steps after the first run on a stream of their own. Whatever follows waits for all of them. Nothing
    waits on the host, and the whole can be captured in a CUDA graph.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    devices = {p.device for group in groups for p in group["params"][:1]}
    if len(optimizers) < 2 or len(devices) != 1 or (device := devices.pop()).type != "cuda":
        for optimizer in optimizers:
            optimizer.step()
        return
    first, *others = optimizers
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)  # for the gradients
    with torch.cuda.stream(side):
        for optimizer in others:
            optimizer.step()
    first.step()
    main.wait_stream(side)


@cache  # memory is kept per stream: one stream per device, so that each step finds the last one's
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Of high priority: its short kernels go first where both have work that could start."""
    return torch.cuda.Stream(device, priority=-1)
