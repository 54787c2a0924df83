"""Subspaces as points of the Grassmann manifold Gr(k, d).

A frame, a d×k matrix U with orthonormal columns, represents a subspace. Every quantity here depends on the subspace
alone: replacing U by UO with an orthogonal O changes nothing. All functions are batched over the leading dimensions
and differentiable where the quantity is.

Legend: N experts, D model width d, K subspace rank k, P tokens of a data sample; `...` any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grmoe import checks

__all__ = [
    "chordal_distance",
    "chordal_mean",
    "geodesic_distance",
    "haar_frames",
    "identity_frames",
    "largest_cosine",
    "largest_eigenvalue",
    "orthonormality_error",
    "orthonormalize",
    "overlap",
    "pairwise_angles",
    "pca_frames",
    "principal_angles",
    "random_overlap",
]


def orthonormalize(Y: Tensor) -> Tensor:
    """The Q factor of Y = QR with a positive diagonal in R: the same subspace, an orthonormal frame.

    The sign convention makes Q a continuous function of Y, and Haar distributed if Y is Gaussian.
    """
    checks.frames("Y", Y)
    Q, R = torch.linalg.qr(Y)
    sign = torch.where(torch.diagonal(R, dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(Y.dtype)
    # qr's Q is column-major; sharding and several kernels need it contiguous.
    return (Q * sign.unsqueeze(-2)).contiguous()


def haar_frames(
    dim: int,
    rank: int,
    num: int | tuple[int, ...] = (),
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Uniformly random frames, shape (*num, dim, rank): the Q factor of a Gaussian matrix.

    They are drawn in fp64 on the CPU and then moved, so that a seed gives the same frames on every device.
    """
    checks.subspace(dim, rank)
    batch = (num,) if isinstance(num, int) else tuple(num)
    gaussian = torch.randn(*batch, dim, rank, generator=generator, dtype=torch.float64)
    return orthonormalize(gaussian).to(dtype=dtype, device=device)


def pca_frames(
    data_PD: Tensor, rank: int, num: int, *, subset: float = 0.5, generator: torch.Generator | None = None
) -> Tensor:
    """Top principal directions of a different random subset of the data for each expert, (num, dim, rank).

    subset: the share of the rows each expert uses (paper, appendix "Sensitivity to Initialization").
    The data are not centred, because routing energies are measured from the origin.
    """
    checks.floating("data", data_PD)
    checks.require(data_PD.ndim == 2, f"data must have shape (tokens, dim), got {tuple(data_PD.shape)}")
    tokens, dim = data_PD.shape
    checks.subspace(dim, rank)
    checks.positive_int("num", num)
    size = max(1, round(checks.fraction("subset", subset) * tokens))
    checks.require(size >= rank, f"data must give each subset at least rank = {rank} rows, got {size}")
    checks.all_finite("data", data_PD)
    rows = torch.stack([torch.randperm(tokens, generator=generator)[:size] for _ in range(num)])
    sample_NPD = data_PD.to(torch.float64)[rows.to(data_PD.device)]
    _, V_NDD = torch.linalg.eigh(sample_NPD.mT @ sample_NPD)  # ascending eigenvalues
    # eigh is not exactly orthonormal when the sample is rank deficient; a QR repairs it.
    return orthonormalize(V_NDD[..., -rank:].flip(-1)).to(data_PD.dtype)


def identity_frames(
    dim: int,
    rank: int,
    num: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Expert e gets columns e·rank … (e+1)·rank−1 of the identity, modulo dim."""
    checks.subspace(dim, rank)
    checks.positive_int("num", num)
    columns_NK = torch.arange(num * rank, device=device).view(num, rank) % dim
    return torch.nn.functional.one_hot(columns_NK, dim).to(dtype).mT.contiguous()


def _same_shape(U: Tensor, V: Tensor) -> None:
    checks.frames("U", U)
    checks.frames("V", V)
    checks.require(U.shape[-2:] == V.shape[-2:], f"U and V must share (d, k), got {U.shape} and {V.shape}")


def principal_angles(U: Tensor, V: Tensor) -> Tensor:
    """The k principal angles between two subspaces, ascending, in [0, π/2]; shape (..., k).

    arccos of the singular values of UᵀV loses half the digits of small angles. So the sines come from the part of V
    outside U (Björck & Golub): θ = atan2(sin θ, cos θ).
    """
    _same_shape(U, V)
    inner = U.mT @ V
    cosines = torch.linalg.svdvals(inner).clamp(max=1.0)  # descending
    sines = torch.linalg.svdvals(V - U @ inner).clamp(max=1.0).flip(-1)  # ascending
    return torch.atan2(sines, cosines)


def pairwise_angles(frames_NDK: Tensor) -> Tensor:
    """`principal_angles` of all pairs, (..., N, N, k), 0 on the diagonal; for reports, without a gradient.

    One GEMM and a stack of k×k SVDs replace a d×k SVD per pair. Angles are arccos of cosines in fp64, accurate to
    1e-15: their error is 1e-15/θ, and an angle of 0 comes out below 1e-7.
    """
    checks.frames("frames", frames_NDK)
    with torch.no_grad():
        # fp32 frames are orthonormal to 1e-7 only, which would turn an angle of 0 into 5e-4.
        inner_NNKK = _pairwise_inner(orthonormalize(frames_NDK.double()))
        N, K = inner_NNKK.shape[-3], inner_NNKK.shape[-1]
        first, second = torch.triu_indices(N, N, 1, device=frames_NDK.device)
        cosines_PK = torch.linalg.svdvals(inner_NNKK[..., first, second, :, :]).clamp(max=1.0)
        angles_NNK = inner_NNKK.new_zeros(*inner_NNKK.shape[:-2], K)
        angles_NNK[..., first, second, :] = angles_NNK[..., second, first, :] = cosines_PK.acos()
    return angles_NNK.to(frames_NDK.dtype)


def _safe_sqrt(x: Tensor) -> Tensor:
    """√x with gradient 0 instead of ∞ at 0, the distance of a subspace to itself."""
    zero = x <= 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def chordal_distance(U: Tensor, V: Tensor) -> Tensor:
    """√(k − ‖UᵀV‖²_F) = √Σ sin²θ (eq:grassmann_dist; the paper calls it the projection distance).

    Computed as ‖V − U UᵀV‖_F, which is the same number without cancellation.
    """
    _same_shape(U, V)
    outside = V - U @ (U.mT @ V)
    return _safe_sqrt(outside.square().sum((-2, -1)))


def chordal_mean(frames_NDK: Tensor, weight_N: Tensor) -> Tensor:
    """The subspace that minimises Σ_n w_n·chordal_distance(U_n, ·)², (..., d, k): the Fréchet mean of that distance.

    Σ w (k − ‖UₙᵀV‖²_F) is smallest where tr Vᵀ(Σ w UₙUₙᵀ)V is largest. That is at the top k eigenvectors of
    Σ w UₙUₙᵀ, the left singular vectors of [√w₁U₁ … √w_NU_N]. It is not unique where eigenvalues k and k+1 coincide,
    for example for two orthogonal subspaces of equal weight.
    """
    checks.frames("frames", frames_NDK)
    checks.require(
        frames_NDK.ndim >= 3, f"frames must have shape (..., N, d, k), got {tuple(frames_NDK.shape)}"
    )
    N, D, K = frames_NDK.shape[-3:]
    checks.floating("weight", weight_N)
    checks.require(
        weight_N.shape[-1:] == (N,), f"weight must have shape (..., {N}), got {tuple(weight_N.shape)}"
    )
    checks.require(bool((weight_N >= 0).all()), "weight must be >= 0")
    wide = frames_NDK.double() * weight_N.double().sqrt()[..., None, None]
    wide_D_NK = wide.transpose(-3, -2).reshape(*wide.shape[:-3], D, N * K)
    left, _, _ = torch.linalg.svd(wide_D_NK, full_matrices=False)
    return left[..., :K].contiguous().to(frames_NDK.dtype)


def geodesic_distance(U: Tensor, V: Tensor) -> Tensor:
    """√Σ θ², the length of the shortest path on the Grassmann manifold."""
    return _safe_sqrt(principal_angles(U, V).square().sum(-1))


def _pairwise_inner(frames_NDK: Tensor) -> Tensor:
    """UᵢᵀUⱼ for all pairs, shape (..., N, N, K, K), as one GEMM."""
    checks.frames("frames", frames_NDK)
    checks.require(
        frames_NDK.ndim >= 3, f"frames must have shape (..., N, d, k), got {tuple(frames_NDK.shape)}"
    )
    N, D, K = frames_NDK.shape[-3:]
    flat = frames_NDK.transpose(-3, -2).reshape(*frames_NDK.shape[:-3], D, N * K)
    return (flat.mT @ flat).unflatten(-1, (N, K)).unflatten(-3, (N, K)).transpose(-3, -2)


def overlap(frames_NDK: Tensor) -> Tensor:
    """‖UᵢᵀUⱼ‖²_F for all pairs of experts, shape (..., N, N); k on the diagonal, k²/d for random frames."""
    return _pairwise_inner(frames_NDK).square().sum((-2, -1))


def largest_cosine(frames_NDK: Tensor) -> Tensor:
    """cos of the smallest principal angle of each pair, σ_max(UᵢᵀUⱼ), shape (..., N, N).

    The overlap does not bound it: frames that share 14 of 48 directions pass the paper's hinge (overlap ≤ 14.4) and
    still have σ_max = 1.
    """
    return torch.linalg.matrix_norm(_pairwise_inner(frames_NDK), ord=2)


def largest_eigenvalue(gram_BB: Tensor, squarings: int) -> Tensor:
    """(tr S^p)^(1/p) of each positive semidefinite S of a stack, p = 2^squarings: between λ_max and B^(1/p)·λ_max."""
    tiny = torch.finfo(gram_BB.dtype).tiny  # for S = 0: A stays 0, the logarithm is −∞ and the bound 0
    trace = gram_BB.diagonal(dim1=-2, dim2=-1).sum(-1)
    # S^p is kept as e^(p·log) · A with tr A = 1, because S^p itself would leave the range of the dtype.
    log, A_BB = trace.log(), gram_BB / trace.clamp(min=tiny)[..., None, None]
    for i in range(1, squarings + 1):
        trace = A_BB.square().sum((-2, -1))  # tr A², because A is symmetric
        log = log + trace.log() / 2**i
        if i < squarings:
            A_BB = A_BB @ A_BB / trace.clamp(min=tiny)[..., None, None]
    return log.exp()


def random_overlap(dim: int, rank: int) -> float:
    """E‖UᵀV‖²_F = k²/d for independent Haar frames."""
    checks.subspace(dim, rank)
    return rank * rank / dim


def orthonormality_error(frames_NDK: Tensor) -> Tensor:
    """max |UᵀU − I| over the whole batch, a 0-d tensor."""
    checks.frames("frames", frames_NDK)
    eye = torch.eye(frames_NDK.shape[-1], dtype=frames_NDK.dtype, device=frames_NDK.device)
    return (frames_NDK.mT @ frames_NDK - eye).abs().amax()
