"""Frames from the first batch: `model.router_options={init: pca}`.

Each MoE layer gets the principal directions of its own inputs (`GrassmannRouter.initialize_from`). The inputs come from
one pass of the new model, with random frames, over the first sequences of the first batch.

A new run does this once, before its first step. It depends on the seed and the data alone: every process reads the
same sequences, one at a time, and takes the frames of the first process. A resumed run has its frames in the
checkpoint, and a run that starts from other weights (`--from`) takes theirs.

Legend: B sequences, S tokens of a sequence, T tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grmoe.parallel.world import total
from grmoe.routing import GrassmannRouter, routers, uncounted
from grmoe.train.setup import Trainer

TOKENS = 8192  # enough for principal directions in some thousand dimensions


@torch.no_grad()
def frames_from_first_batch(trainer: Trainer) -> None:
    """Initialise all routers that wait for tokens. All processes call it together."""
    model, world, config = trainer.model, trainer.world, trainer.config
    waiting = [r for r in routers(model) if isinstance(r, GrassmannRouter) and r.awaits_tokens]
    if not waiting:
        return
    sequences = min(config.data.batch_size, -(-TOKENS // trainer.length))
    rows_BS = next(trainer.data.batches(sequences, trainer.length, config.seed))
    for number, (router, x_TD) in enumerate(zip(waiting, _inputs(trainer, waiting, rows_BS), strict=True)):
        generator = torch.Generator().manual_seed(config.seed * 10**5 + number)
        router.initialize_from(x_TD, generator)
        frames = router.frames
        frames.copy_(total(world, frames if world.first else torch.zeros_like(frames)))


def _inputs(trainer: Trainer, waiting: list[GrassmannRouter], rows_BS: Tensor) -> list[Tensor]:
    """What each router sees for these sequences, (T, D) each."""
    model, seen = trainer.model, [list[Tensor]() for _ in waiting]
    hooks = [
        router.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0].detach()))
        for router, kept in zip(waiting, seen, strict=True)
    ]
    model.eval()
    try:
        with uncounted(model):
            for row_S in rows_BS:  # alone, because the size of a batch changes the last bits
                trainer.run(model, row_S[None].to(trainer.world.device))
    finally:
        model.train()
        for hook in hooks:
            hook.remove()
    return [torch.cat([x.flatten(0, -2) for x in kept]) for kept in seen]
