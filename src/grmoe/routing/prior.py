"""The balanced prior's update rule: b ← b + η(1 − N·load), centred.

It is auxiliary-loss-free balancing, read as learning the prior p(z = e) of the Bayesian gate from the load.

Legend: N experts; `...` any leading dimensions (routers or seeds updated together).
"""

from __future__ import annotations

import torch
from torch import Tensor


def next_log_prior(log_prior: Tensor, sums: Tensor, rate: float) -> Tensor:
    """The log-prior (..., N) after one step of size η = `rate`.

    sums (..., N+1): each expert's summed share of tokens, then the number of tokens. Without tokens nothing moves.
    """
    tokens = sums[..., -1:]
    load = sums[..., :-1] / tokens.clamp(min=1)
    updated = log_prior + (rate * (1 - load.shape[-1] * load)).to(log_prior.dtype)
    return torch.where(tokens > 0, updated - updated.mean(-1, keepdim=True), log_prior)
