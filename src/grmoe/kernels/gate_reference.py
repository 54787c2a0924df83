"""The specification of the fused gate, and its gradients by autograd.

Legend: T tokens, D model width, N experts, K rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grmoe.kernels.combine import combine_weights


def gate_reference(
    x_TD: Tensor, matrix: Tensor, log_kappa: Tensor | None, prior_N: Tensor, alpha: Tensor, selected_TN: Tensor,
    energy_scale: float, posterior: bool, renormalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The specification, for a selection already made: (logits, probs, weights)."""
    x_TD = x_TD.to(matrix.dtype)
    if log_kappa is None:
        scores_TN = x_TD @ matrix.T
    else:
        norm_T1 = x_TD.square().sum(-1, keepdim=True).clamp(min=1e-12)
        squares_TNK = torch.einsum("td,ndk->tnk", x_TD, matrix).square()
        kappa = log_kappa.exp()
        scores_TN = (squares_TNK * (kappa if kappa.ndim == 2 else kappa.unsqueeze(-1))).sum(-1)
        scores_TN = scores_TN * energy_scale / norm_T1
    logits_TN = alpha * (scores_TN + prior_N) if posterior else alpha * scores_TN + prior_N
    probs_TN = torch.softmax(logits_TN, -1)
    return logits_TN, probs_TN, combine_weights(logits_TN, probs_TN, selected_TN, renormalize)


def backward_plain(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    x: Tensor, matrix: Tensor, log_kappa: Tensor | None, prior: Tensor, alpha: Tensor, selected: Tensor,
    options: tuple[float, bool, bool],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """The gate's backward by autograd through the specification, in case its kernel does not compile."""
    with torch.enable_grad():
        x, matrix, prior = (t.detach().requires_grad_() for t in (x, matrix, prior))
        leaves = [x, matrix, prior]
        if log_kappa is not None:
            log_kappa = log_kappa.detach().requires_grad_()
            leaves.append(log_kappa)
        values = gate_reference(x, matrix, log_kappa, prior, alpha, selected, *options)
        given = [(value, g) for value, g in zip(values, grads, strict=True) if g is not None]
        found = torch.autograd.grad([v for v, _ in given], leaves, [g for _, g in given])
    return found[0], found[1], None if log_kappa is None else found[3], found[2]
