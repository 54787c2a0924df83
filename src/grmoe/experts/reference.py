"""The specification of the experts: a plain loop over experts, for any dtype.

It reads the offsets on the host and adds with `index_add`, because only correctness counts here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grmoe.experts.dispatch import Dispatch
from grmoe.experts.weights import Weights


def reference_experts(x_TD: Tensor, dispatch: Dispatch, weights: Weights) -> Tensor:
    """y_t = Σ over t's assignments of weight · W_down act(W_up x_t), (T, D)."""
    used = dispatch.slot_TM < dispatch.num_rows
    weight_A = dispatch.weight_TM.new_zeros(dispatch.num_rows)
    weight_A = weight_A.index_put((dispatch.slot_TM[used],), dispatch.weight_TM[used])
    y_TD = torch.zeros_like(x_TD)
    start = 0
    for expert, end in enumerate(dispatch.offset_N.tolist()):
        token = dispatch.token_A[start:end]
        inner = weights.activate(x_TD[token] @ weights.up[expert].to(x_TD.dtype).T)
        rows = inner @ weights.down_proj[expert].to(x_TD.dtype).T
        y_TD = y_TD.index_add(0, token, rows * weight_A[start:end].unsqueeze(-1).to(rows.dtype))
        start = end
    return y_TD
