"""The leading term of the training objective: even out which experts lead.

    L = N · Σ_e s_e · mean_t p_te

p is a token's gate. s_e is the share of the tokens that expert e led in the step before; it carries no gradient. An
expert leads a token where its weight is the largest. With one expert per token the leading ones compute alone.

One bias per expert, as in the balanced prior, evens out one budget only. This term teaches the gate itself: its
gradient by a logit, N·p_te·(s_e − Σ_f s_f·p_tf) per token, lowers the logits of experts that led too often. It is zero
where all lead as often.

In Switch's loss the shares are those of the same batch. Here they are a state, so the term is linear in the tokens:
micro-batches and processes add up to the same number.

Legend: N experts, T tokens (all leading dimensions together); `...` any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def leading_loss(probs: Tensor, share_N: Tensor) -> Tensor:
    """L of gates (..., N), 0-d; zero without tokens. It is one at uniform shares."""
    N = probs.shape[-1]
    probs_TN = probs.reshape(-1, N)
    # The mean first: then the backward pass needs no gates.
    mean_N = probs_TN.sum(0) / max(1, len(probs_TN))
    return N * (share_N.to(mean_N.dtype) * mean_N).sum()


def next_leading_share(share: Tensor, sums: Tensor) -> Tensor:
    """The shares (..., N) of a step with these sums of led tokens (..., N). Without tokens they stay."""
    tokens = sums.sum(-1, keepdim=True)
    return torch.where(tokens > 0, sums / tokens.clamp(min=1), share)
