"""Experts as two grouped GEMMs, `torch.nn.functional.grouped_mm`: CPU and GPU, fp32, bf16 and fp16."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import grouped_mm

from grmoe.experts.dispatch import Dispatch, combine, gather
from grmoe.experts.weights import ExpertWeights


def grouped_experts(x_TD: Tensor, dispatch: Dispatch, weights: ExpertWeights) -> Tensor:
    """As `reference_experts`. Time follows the rows really used: a group ends at its offset.

    grouped_mm leaves rows past the last offset uninitialised; `combine` never looks at them, in the backward
    their gradient is zero, and a row's garbage stays in its row in between.
    """
    inner = grouped_mm(gather(x_TD, dispatch), weights.up.to(x_TD.dtype).mT, offs=dispatch.offset_N)
    rows = grouped_mm(weights.activate(inner), weights.down_proj.to(x_TD.dtype).mT, offs=dispatch.offset_N)
    return combine(rows, dispatch)
