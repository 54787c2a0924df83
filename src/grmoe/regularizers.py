"""The geometric term of the training objective: keep the expert subspaces apart.

Legend: N experts, M sampled pairs, D model width d, K subspace rank k; `...` any batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grmoe import checks
from grmoe.geometry import overlap, random_overlap

__all__ = ["overlap_penalty"]


def overlap_penalty(
    frames: Tensor,
    rho: float,
    *,
    relative: bool = False,
    num_pairs: int | Literal["auto"] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Σ_{e≠e'} max(0, ‖U_eᵀU_e'‖²_F − ρ₀k) (eq:subspace_reg) over frames (..., N, d, k); shape (...,).

    The sum is over ordered pairs, as in the paper: each pair of experts counts twice.

    The hinge is an absolute overlap ρ₀k. Random frames overlap by k²/d. At d = 768, k = 48 the paper's ρ₀ = 0.3 is a
    hinge of 14.4, while random frames overlap by 3.0, so the term is zero from the start. With `relative=True`, `rho`
    is in units of the random overlap, ρ₀ = rho·k/d. Then rho < 1 pushes frames further apart than random ones.

    Args:
        frames: (..., N, d, k), N ≥ 2, orthonormal columns.
        rho: ρ₀, or with `relative` a multiple of the random overlap; ≥ 0.
        relative: the unit of `rho`.
        num_pairs: None for all N(N−1)/2 pairs. M for a random sample of M pairs without replacement, weighted by
            #pairs/M, so that it is an unbiased estimate of the full sum. "auto" for the paper's M = 4N, or all pairs
            if there are fewer. A batch shares its sample. Only sampled frames are gathered.
        generator: source of the sample. Nothing is read back from the device.
    """
    checks.frames("frames", frames)
    checks.require(frames.ndim >= 3, f"frames must have shape (..., N, d, k), got {tuple(frames.shape)}")
    N, D, K = frames.shape[-3:]
    checks.require(N >= 2, f"frames must hold at least 2 experts, got N = {N}")
    checks.finite("rho", rho, at_least=0.0)
    hinge = rho * random_overlap(D, K) if relative else rho * K
    total = N * (N - 1) // 2
    size = total if num_pairs is None else min(4 * N, total) if num_pairs == "auto" else num_pairs
    ok = isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= total
    checks.require(ok, f'num_pairs must be None, "auto" or an integer in [1, {total}], got {num_pairs!r}')
    if size == total:
        return 2 * (overlap(frames) - hinge).relu().triu(1).sum((-2, -1))
    device = generator.device if generator is not None else frames.device
    sample_M = torch.randperm(total, generator=generator, device=device)[:size]
    pairs_2M = torch.triu_indices(N, N, 1, device=device)[:, sample_M].to(frames.device, non_blocking=True)
    left_MDK, right_MDK = (frames.index_select(-3, index_M) for index_M in pairs_2M)
    overlap_M = (left_MDK.mT @ right_MDK).square().sum((-2, -1))
    return (2 * total / size) * (overlap_M - hinge).relu().sum(-1)
