"""Combine weights in PyTorch: what every path computes, and the reference of the kernels (`grmoe.kernels.select`).

Legend: N experts; `...` any leading dimensions of the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def combine_weights(logits: Tensor, probs: Tensor, selected: Tensor, renormalize: bool) -> Tensor:
    """Weights (..., N): the gates g of the selected experts, with `renormalize` divided by their sum; 0 elsewhere.

    A bias may select experts whose gates all underflow to zero, and 0/0 is NaN. But g_e/Σg is the softmax over the
    selected experts. From their logits it is finite, and so is its gradient. A row with NaN in its gate stays NaN.
    """
    if not renormalize:
        return torch.where(selected, probs, 0.0)
    # Not −∞: a row without any selected expert gets zeros, not NaN.
    among = torch.softmax(torch.where(selected, logits, torch.finfo(logits.dtype).min), dim=-1)
    return torch.where(probs == probs, torch.where(selected, among, 0.0), probs)
