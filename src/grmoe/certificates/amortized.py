"""How far an amortised gate is from the gate that it approximates.

Legend: N experts; `...` any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grmoe import checks
from grmoe.certificates.certificate import FINITE, Certificate, over_experts, range_of


def amortized_tv_bound(base_logits_N: Tensor, amortized_logits_N: Tensor) -> Certificate:
    """TV(q, g) ≤ tanh(range(amortised − base)/4) for the two softmaxes, sharp form; shape (...).

    Their likelihood ratio spans a factor e^range; two-valued ratios are the worst. Trivial value: 1.
    """
    base = over_experts("base_logits", base_logits_N)
    amortized = over_experts("amortized_logits", amortized_logits_N)
    same = base.shape[-1] == amortized.shape[-1]
    shapes = f"{tuple(base.shape)} and {tuple(amortized.shape)}"
    checks.require(same, f"base_logits and amortized_logits must share N, got {shapes}")
    r = range_of(amortized - base)
    holds = torch.isfinite(r)
    return Certificate(torch.where(holds, torch.tanh(r / 4), 1.0), holds, FINITE)
