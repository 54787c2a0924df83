"""The loss of a language model from its last hidden states, without storing the logits.

Legend: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from grmoe.kernels import runtime

IGNORED = -100  # PyTorch's target that does not count
TOKENS = 16384  # logits exist for this many tokens at once: 1.6 GB in bf16 with 50257 words
# The same for `token_losses`, in numbers. GPU: 1,335 tokens with 50257 words. CPU: 8 MB, more is not faster.
LOGITS = {"cuda": 2**26, "cpu": 2**21}
COMPARED = 2048  # the same for `divergence`, which has several such tensors in fp32


def next_token_loss(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, count: Tensor) -> Tensor:
    """Σ_t −log softmax(W x_t)[target_t] / count, without targets of −100. Products in x's dtype, the rest in fp32."""
    if runtime.runs_on(x_TD) and not runtime.INTERPRETED:
        from grmoe.kernels.cross_entropy import linear_cross_entropy

        return runtime.attempt(
            "cross entropy",
            lambda: linear_cross_entropy(x_TD, weight_VD, target_T, count, IGNORED, TOKENS),
            lambda: next_token_loss_reference(x_TD, weight_VD, target_T, count),
        )
    return next_token_loss_reference(x_TD, weight_VD, target_T, count)


@torch.no_grad()
def token_losses(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor) -> Tensor:
    """−log softmax(W x_t)[target_t] of each token, (T,); 0 for a target of −100. Without a gradient.

    Products in x's dtype, the rest in fp32. Logits exist for a part of the tokens.
    """
    at_once = max(1, LOGITS.get(x_TD.device.type, LOGITS["cpu"]) // len(weight_VD))

    def by_parts() -> Tensor:
        parts = zip(x_TD.split(at_once), target_T.split(at_once), strict=True)
        return torch.cat([token_losses_reference(x_PD, weight_VD, target_P) for x_PD, target_P in parts])

    if runtime.runs_on(x_TD) and not runtime.INTERPRETED:
        from grmoe.kernels.cross_entropy import linear_token_losses

        return runtime.attempt(
            "cross entropy",
            lambda: linear_token_losses(x_TD, weight_VD, target_T, IGNORED, at_once),
            by_parts,
        )
    return by_parts()


def divergence(x_TD: Tensor, teacher_TD: Tensor, weight_VD: Tensor, counts_T: Tensor) -> Tensor:
    """Mean of KL(softmax(W t) ‖ softmax(W x)) over the tokens that count: how far predictions from x are from those of
    a teacher t. 0 if none counts.

    The teacher's predictions carry no gradient. Logits exist for a part of the tokens, and are computed again in the
    backward. Products in x's dtype, the rest in fp32.
    """
    total = torch.zeros((), device=x_TD.device)
    parts = zip(*(t.split(COMPARED) for t in (x_TD, teacher_TD, counts_T)), strict=True)
    for x_PD, teacher_PD, counts_P in parts:
        sum_of_part = checkpoint(
            divergence_reference, x_PD, teacher_PD, weight_VD, counts_P, use_reentrant=False
        )
        total = total + sum_of_part
    return total / counts_T.sum().clamp(min=1)


def divergence_reference(x_TD: Tensor, teacher_TD: Tensor, weight_VD: Tensor, counts_T: Tensor) -> Tensor:
    """The specification, summed over tokens: from all logits at once."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    log_q_TV = F.log_softmax((x_TD @ weight_VD.to(x_TD.dtype).T).to(wide), -1)
    with torch.no_grad():
        log_p_TV = F.log_softmax((teacher_TD @ weight_VD.to(teacher_TD.dtype).T).to(wide), -1)
    each_T = F.kl_div(log_q_TV, log_p_TV, reduction="none", log_target=True).sum(-1)
    return torch.where(counts_T, each_T, 0.0).sum()


def next_token_loss_reference(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, count: Tensor) -> Tensor:
    """The specification: the same from all logits at once."""
    return _cross_entropy(x_TD, weight_VD, target_T, "sum") / count


def token_losses_reference(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor) -> Tensor:
    """The specification: the same from all logits at once."""
    return _cross_entropy(x_TD, weight_VD, target_T, "none")


def _cross_entropy(x_TD: Tensor, weight_VD: Tensor, target_T: Tensor, reduction: str) -> Tensor:
    logits_TV = x_TD @ weight_VD.to(x_TD.dtype).T
    wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return F.cross_entropy(wide_TV, target_T, ignore_index=IGNORED, reduction=reduction)
