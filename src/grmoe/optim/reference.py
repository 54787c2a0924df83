"""One step of `GrassmannAdam` in plain formulas. The tests compare the fast version with it.

Legend: D model width d, K subspace rank k.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def reference_step(
    U_DK: Tensor,
    G_DK: Tensor,
    m_DK: Tensor,
    v: Tensor,
    count: int,
    *,
    lr: float = 0.02,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    manifold: Literal["grassmann", "stiefel"] = "grassmann",
    max_step: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor]:
    """(U, m, v) of one frame after step number `count` (from 1), with the polar factor by SVD.

    Entries of G beyond √(largest number)/(2√(dk)) count as that, so that ‖G‖² is a number.
    """

    def project(X_DK: Tensor) -> Tensor:
        A_KK = U_DK.mT @ X_DK
        return X_DK - U_DK @ (A_KK if manifold == "grassmann" else (A_KK + A_KK.mT) / 2)

    bound = (torch.finfo(G_DK.dtype).max / (4 * G_DK.numel())) ** 0.5
    H_DK = project(G_DK.clamp(-bound, bound))
    m_DK = project(betas[0] * m_DK) + (1 - betas[0]) * H_DK
    v = betas[1] * v + (1 - betas[1]) * H_DK.square().sum()
    xi_DK = -lr * m_DK / (1 - betas[0] ** count) / ((v / (1 - betas[1] ** count)).sqrt() + eps)
    xi_DK = xi_DK * min(1.0, max_step / max(float(xi_DK.norm()), 1e-300))
    left_DK, _, right_KK = torch.linalg.svd(U_DK + xi_DK, full_matrices=False)
    return left_DK @ right_KK, m_DK, v
