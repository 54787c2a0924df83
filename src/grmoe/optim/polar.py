"""The polar factor Y (YᵀY)^{-1/2}: the orthonormal frame nearest to Y.

Legend: N frames, D model width d, K subspace rank k.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from grmoe.geometry import orthonormalize

# Frames with ‖UᵀU − I‖_F above this are re-orthonormalised by QR. A round trip through bf16 leaves about 3e-3 in a
# 768×48 frame, which the polar factor removes.
_DAMAGED = 1e-2

# Rows per partial sum of YᵀY on a GPU. It adds one row after the other: over 768 rows in fp32 that is wrong by 1.1e-6.
# Libraries of CPUs add in blocks by themselves.
_GPU_ROWS = 96


def gram_error(Y_NDK: Tensor, rows: int | None = None) -> Tensor:
    """YᵀY − I, from partial sums over about `rows` rows: shorter sums round less. Default: what the device needs."""
    N, D, K = Y_NDK.shape
    rows = rows or (_GPU_ROWS if Y_NDK.is_cuda else D)
    slices = max(c for c in range(1, max(1, D // rows) + 1) if D % c == 0)
    parts = Y_NDK.reshape(N * slices, D // slices, K)
    error_NKK = torch.bmm(parts.mT, parts)
    if slices > 1:
        error_NKK = error_NKK.view(N, slices, K, K).sum(1)
    error_NKK.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return error_NKK


def inverse_sqrt_minus_one(E_NKK: Tensor, low: float, high: float) -> Tensor:
    """Z = (I + E)^{-1/2} − I for symmetric E with spectrum in [low, high], by Newton–Schulz.

    The usual iteration is X ← X(I + R/2), R = I − (I+E)X². It is written here for Z = X − I, so that no small number
    is rounded next to a one: T = X² − I = 2Z + Z², R = −(E + T + ET), Z ← Z + (R + ZR)/2.

    It starts at the multiple of I that centres the interval, and takes the residual r to ¾r² + ¼r³. So the number of
    iterations that reaches the rounding error is known beforehand: 3 in fp32 and 4 in fp64 for [0, 0.25]. Nothing is
    read back from the device. One iteration on k×k matrices costs 3k³ instead of the 2dk² of the same iteration on a
    frame.
    """
    centre, residual = 1 + (low + high) / 2, (high - low) / (2 + high + low)
    start = centre**-0.5
    # The first iteration needs no product, because X is a multiple of the identity.
    Z_NKK = E_NKK * (-0.5 * start**3)
    Z_NKK.diagonal(dim1=-2, dim2=-1).add_(1.5 * start - 0.5 * start**3 - 1)
    residual = (3 + residual) / 4 * residual**2
    while residual > torch.finfo(E_NKK.dtype).eps / 4:
        T_NKK = torch.baddbmm(Z_NKK, Z_NKK, Z_NKK, beta=2)
        R_NKK = torch.baddbmm(E_NKK + T_NKK, E_NKK, T_NKK)  # minus the residual
        Z_NKK = torch.baddbmm(Z_NKK.sub(R_NKK, alpha=0.5), Z_NKK, R_NKK, alpha=-0.5)
        residual = (3 + residual) / 4 * residual**2
    return Z_NKK


def repair(U_NDK: Tensor) -> None:
    """Make frames orthonormal in place: by their polar factor in fp64, by QR where they are damaged.

    Waits for the device, because it reads whether any frame is damaged.
    """
    wide_NDK = U_NDK.double()
    error_NKK = gram_error(wide_NDK)
    bad_N = ~(torch.linalg.vector_norm(error_NKK, dim=(-2, -1)) <= _DAMAGED)  # NaN counts as damaged
    if bad_N.any():
        wide_NDK[bad_N] = orthonormalize(wide_NDK[bad_N])
        error_NKK[bad_N] = 0.0
    U_NDK.copy_(torch.baddbmm(wide_NDK, wide_NDK, inverse_sqrt_minus_one(error_NKK, -_DAMAGED, _DAMAGED)))


def note_orthonormal(params: Iterable[Tensor]) -> None:
    """Note on frames that they are orthonormal as they are now, so that nobody has to look (`take_note`)."""
    for p in params:
        p.orthonormal_at = p._version  # type: ignore[attr-defined]


def take_note(frames: Tensor) -> bool:
    """Whether nothing has written to the frames since `note_orthonormal`. Does not read the device.

    A note counts once. PyTorch's fused optimisers write without a trace, so what is orthonormal must be noted at every
    step.
    """
    return bool(frames.__dict__.pop("orthonormal_at", None) == frames._version)
