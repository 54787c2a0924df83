"""The matrix Bingham distribution: a density of frames U, or of the subspaces they span (eq:bingham of the paper).

    p(U) = exp(tr(Λ MᵀUUᵀM)) / Z(Λ),      Z(Λ) = E exp(tr(Λ UUᵀ)) over uniform U = ₁F₁(k/2; d/2; Λ)

Λ = diag(λ_1 … λ_d), M ∈ O(d), and the density is with respect to the uniform measure on d×k frames. It depends on UUᵀ
alone, so U and UO have the same density. The gate does not use it: a token is a vector, and its likelihood is the
*vector* Bingham density of `grmoe.bingham`, the case k = 1. This module is for comparison with the paper's Eq. 2.

Z is a hypergeometric function of a matrix argument. Three ways to compute it:

- `log_normalizer_series`: the sum over zonal polynomials. Exact, for small k and moderate Λ.
- `log_normalizer_laplace`: Butler and Wood's calibrated Laplace approximation, where its integral exists.
- `log_normalizer_monte_carlo`: the mean over uniform frames. Its error is known only while Λ is small.

Legend: D ambient dimension d, K rank k of the frames, S draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from grmoe import checks

Partition = tuple[int, ...]
# Degrees of the series by the number of parts, so that it takes seconds. Else 20.
_MAX_DEGREE = {1: 500, 2: 50, 3: 30}


def log_density(frames: Tensor, eigenvalues_D: Tensor, orientation_DD: Tensor) -> Tensor:
    """log p without the normaliser: tr(Λ MᵀUUᵀM) = Σ_i λ_i ‖m_iᵀU‖² of frames (..., d, k); shape (...)."""
    D = len(_spectrum(eigenvalues_D))
    checks.frames("frames", frames)
    checks.require(
        frames.shape[-2] == D,
        f"frames must have shape (..., {D}, k) with {D} eigenvalues, got {tuple(frames.shape)}",
    )
    _orientation(orientation_DD, D)
    inner = orientation_DD.mT @ frames
    return (eigenvalues_D.unsqueeze(-1) * inner.square()).sum((-2, -1))


# -- the normaliser --------------------------------------------------------------------------------------------------


def log_normalizer_series(eigenvalues_D: Tensor, rank: int, tolerance: float = 1e-14) -> float:
    """log ₁F₁(k/2; d/2; Λ) = log Σ_κ (k/2)_κ/(d/2)_κ · C_κ(Λ)/|κ|!, over partitions κ of at most k parts.

    C_κ are the zonal polynomials and (a)_κ = Π_i (a − (i−1)/2)_(κ_i). More than k parts give zero, and so do more parts
    than Λ has eigenvalues other than zero. Two identities come first. The lowest eigenvalue leaves the exponent,
    because tr(UUᵀ) = k; then all terms are positive. And the complement, a frame of d−k columns, has the same density
    with −Λ; the one with fewer parts is summed.

    tolerance: the sum ends when a whole degree adds less than this share. Raises a `ValueError` where that takes more
    than 50 degrees at two parts, 30 at three or 20 at more.
    """
    spectrum_D = _spectrum(eigenvalues_D).double()
    D, K = len(spectrum_D), checks.positive_int("rank", rank)
    checks.subspace(D, K)
    if K == D:
        return float(spectrum_D.sum())
    work = [
        (min(k, variables), variables)
        for k, variables in (
            (K, int((spectrum_D > spectrum_D.min()).sum())),
            (D - K, int((spectrum_D < spectrum_D.max()).sum())),
        )
    ]
    if work[1] < work[0]:
        return float(spectrum_D.sum()) + _series(-spectrum_D, D - K, tolerance)
    return _series(spectrum_D, K, tolerance)


def _series(spectrum_D: Tensor, K: int, tolerance: float) -> float:
    D, lowest = len(spectrum_D), float(spectrum_D.min())
    # A variable that is zero does not change a zonal polynomial.
    values = tuple(v for v in (spectrum_D - lowest).tolist() if v > 0)
    parts = min(K, len(values))
    most = _MAX_DEGREE.get(parts, 20)
    total, cache = 1.0, dict[tuple[Partition, int], float]()
    for degree in range(1, most + 1):
        added = 0.0
        for kappa in _partitions(degree, parts):
            added += _coefficient(kappa, K / 2, D / 2) * _jack(kappa, values, len(values), cache)
        total += added
        if added <= tolerance * total:
            return K * lowest + math.log(total)
    raise ValueError(
        f"eigenvalues must span less for a series of {parts} parts, got λ_1 − λ_d = {max(values):g}: it needs more "
        f"than {most} degrees; use log_normalizer_laplace or log_normalizer_monte_carlo"
    )


def log_normalizer_laplace(eigenvalues_J: Tensor, multiplicities: Sequence[int], rank: int) -> Tensor:
    """Butler and Wood's (2002) calibrated Laplace approximation of log ₁F₁(k/2; d/2; Λ), 0-d.

    eigenvalues_J (J,) with their multiplicities, d in all. The eigenvalue of the largest multiplicity is subtracted
    from all, so that Λ − λI has rank r, with values x_1 … x_r. With a = k/2, b = d/2 and
    y_i = 2a / (b − x_i + √((x_i − b)² + 4a·x_i)),

        ₁F₁ ≈ b^(br − r(r+1)/4) · Π_(i≤j) (y_i y_j/a + (1−y_i)(1−y_j)/(b−a))^(−1/2)
              · Π_i (y_i/a)^a ((1−y_i)/(b−a))^(b−a) e^(x_i y_i).

    It is Laplace's method on an integral over r × r matrices, exact at Λ = 0. That integral exists for r ≤ k and
    r ≤ d−k. The paper's spectrum (k large eigenvalues, the others equal) has r = k. The error grows with Λ and k.
    While all |x_i| ≤ d/8 it is below 1 % of Z for k ≤ 3 (`tests/bingham/test_matrix.py`). Raises a `ValueError` outside
    these limits of r and x.
    """
    checks.floating("eigenvalues", eigenvalues_J)
    counts = [int(m) for m in multiplicities]
    checks.require(
        eigenvalues_J.ndim == 1 and len(counts) == len(eigenvalues_J) and min(counts, default=0) >= 1,
        f"multiplicities must name one count >= 1 for each of the eigenvalues, got {counts}",
    )
    D, K = sum(counts), checks.positive_int("rank", rank)
    checks.subspace(D, K)
    common = counts.index(max(counts))
    r = D - counts[common]
    checks.require(
        r <= min(K, D - K),
        f"eigenvalues must be equal for the Laplace approximation, all but min(k, d−k) = {min(K, D - K)}, "
        f"got {r} others: its integral does not exist; use log_normalizer_series or log_normalizer_monte_carlo",
    )
    values_J = eigenvalues_J.double()
    shift = values_J[common]
    others = [j for j in range(len(counts)) if j != common]
    index = torch.tensor([j for j in others for _ in range(counts[j])], dtype=torch.long)
    x_R = (values_J - shift)[index]
    largest = float(x_R.detach().abs().max()) if r else 0.0
    checks.require(
        largest <= D / 8 + 1e-9,
        f"eigenvalues must differ by at most d/8 = {D / 8:g} for the Laplace approximation, got {largest:g}: beyond "
        "that it is too inaccurate",
    )
    a, b = K / 2, D / 2
    y_R = 2 * a / (b - x_R + ((x_R - b).square() + 4 * a * x_R).sqrt())
    pair_RR = y_R[:, None] * y_R / a + (1 - y_R)[:, None] * (1 - y_R) / (b - a)
    log_R = pair_RR.log().triu().sum()
    each_R = a * (y_R / a).log() + (b - a) * ((1 - y_R) / (b - a)).log() + x_R * y_R
    return K * shift + (b * r - r * (r + 1) / 4) * math.log(b) - log_R / 2 + each_R.sum()


def log_normalizer_monte_carlo(
    eigenvalues_D: Tensor, rank: int, samples: int = 100_000, generator: torch.Generator | None = None
) -> tuple[float, float]:
    """(estimate, standard error) of log Z from uniform frames.

    Once Λ concentrates the density, no sample reaches where it is large. Then the standard error is wrong too.
    """
    spectrum_D = _spectrum(eigenvalues_D).double()
    checks.positive_int("samples", samples, at_least=2)
    checks.subspace(len(spectrum_D), rank)
    frames = _uniform(samples, len(spectrum_D), rank, generator)
    exponent_S = (spectrum_D.unsqueeze(-1) * frames.square()).sum((-2, -1))
    estimate = torch.logsumexp(exponent_S, 0) - math.log(samples)
    relative_S = torch.exp(exponent_S - estimate)
    return float(estimate), float(relative_S.std() / math.sqrt(samples))


# -- zonal polynomials -----------------------------------------------------------------------------------------------


def _partitions(degree: int, parts: int, largest: int | None = None) -> Iterator[Partition]:
    """Partitions of `degree` into at most `parts` parts, each a descending tuple without zeros."""
    if degree == 0:
        yield ()
    elif parts > 0:
        for first in range(min(degree, largest or degree), 0, -1):
            for rest in _partitions(degree - first, parts - 1, first):
                yield (first, *rest)


def _columns(kappa: Partition) -> Partition:
    """The conjugate partition κ'."""
    return tuple(sum(row > j for row in kappa) for j in range(kappa[0])) if kappa else ()


def _hooks(kappa: Partition) -> Iterator[tuple[int, int]]:
    """Upper and lower hook lengths of every box, at α = 2: κ'_j − i + 2(κ_i − j + 1) and κ'_j − i + 1 + 2(κ_i − j)."""
    columns = _columns(kappa)
    for i, row in enumerate(kappa):
        for j in range(row):
            leg, arm = columns[j] - i - 1, row - j - 1
            yield leg + 2 * (arm + 1), leg + 1 + 2 * arm


def _coefficient(kappa: Partition, a: float, c: float) -> float:
    """(a)_κ/(c)_κ · C_κ/(n!·J_κ) = (a)_κ/(c)_κ · 2ⁿ / Π hooks, for the Jack polynomial J_κ with α = 2."""
    value = 1.0
    for i, row in enumerate(kappa):
        for j in range(row):
            value *= 2 * (a - i / 2 + j) / (c - i / 2 + j)
    for upper, lower in _hooks(kappa):
        value /= upper * lower
    return value


def _jack(
    kappa: Partition, values: Sequence[float], variables: int, cache: dict[tuple[Partition, int], float]
) -> float:
    """J_κ(x_1 … x_m) at α = 2 = Σ_μ J_μ(x_1 … x_(m−1)) x_m^(|κ|−|μ|) β_κμ, over horizontal strips κ/μ."""
    if not kappa:
        return 1.0
    if len(kappa) > variables:
        return 0.0
    key = (kappa, variables)
    if key not in cache:
        x, degree = values[variables - 1], sum(kappa)
        cache[key] = sum(
            _jack(mu, values, variables - 1, cache) * x ** (degree - sum(mu)) * _branching(kappa, mu)
            for mu in _strips(kappa)
            if len(mu) < variables
        )
    return cache[key]


def _strips(kappa: Partition) -> Iterator[Partition]:
    """All μ with κ_1 ≥ μ_1 ≥ κ_2 ≥ μ_2 ≥ …"""

    def rows(i: int) -> Iterator[Partition]:
        if i == len(kappa):
            yield ()
            return
        lowest = kappa[i + 1] if i + 1 < len(kappa) else 0
        for rest in rows(i + 1):
            for row in range(lowest, kappa[i] + 1):
                yield (row, *rest)

    for mu in rows(0):
        yield tuple(row for row in mu if row)


@cache
def _branching(kappa: Partition, mu: Partition) -> float:
    """β_κμ = Π_(s∈κ) B_κ(s) / Π_(s∈μ) B_μ(s): upper hooks in columns where κ and μ have the same length, lower hooks
    in the others (Dumitriu, Edelman, Shuman 2007)."""
    ours, theirs = _columns(kappa), _columns(mu)
    value = 1.0
    for nu, columns, power in ((kappa, ours, 1), (mu, theirs, -1)):
        for i, row in enumerate(nu):
            for j in range(row):
                leg, arm = columns[j] - i - 1, row - j - 1
                same = j < len(theirs) and ours[j] == theirs[j]
                hook = leg + 2 * (arm + 1) if same else leg + 1 + 2 * arm
                value *= float(hook) ** power
    return value


# -- sampling --------------------------------------------------------------------------------------------------------


def sample_frames(
    eigenvalues_D: Tensor,
    orientation_DD: Tensor,
    rank: int,
    num: int,
    *,
    sweeps: int = 50,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`num` independent frames (num, d, k) by Gibbs sampling (Hoff 2009): as many chains, each from a uniform frame.

    Given the other columns, a column is u = Bz with B an orthonormal basis of their complement. z has the vector
    Bingham density ∝ exp(zᵀBᵀABz), A = MΛMᵀ, which is drawn exactly. A sweep draws every column once. Then it
    multiplies U by a random orthogonal matrix, which the density allows. For k = 1 one sweep is exact. Otherwise
    `sweeps` must be enough for the chain to forget its start.
    """
    spectrum_D = _spectrum(eigenvalues_D).double()
    D, K = len(spectrum_D), checks.positive_int("rank", rank)
    checks.subspace(D, K)
    checks.positive_int("num", num)
    checks.positive_int("sweeps", sweeps)
    M_DD = _orientation(orientation_DD, D).double()
    A_DD = (M_DD * spectrum_D) @ M_DD.mT
    U_SDK = _uniform(num, D, K, generator)
    if K < D:
        for _ in range(sweeps):
            for j in range(K):
                others = torch.cat([U_SDK[..., :j], U_SDK[..., j + 1 :]], -1)
                B_SDF = torch.linalg.qr(others, mode="complete").Q[..., K - 1 :]
                z_SF = _draw_vectors(B_SDF.mT @ A_DD @ B_SDF, generator)
                U_SDK[..., j] = (B_SDF @ z_SF.unsqueeze(-1)).squeeze(-1)
            U_SDK = U_SDK @ _uniform(num, K, K, generator)
    return U_SDK.to(eigenvalues_D.dtype)


def _uniform(num: int, D: int, K: int, generator: torch.Generator | None) -> Tensor:
    """Uniform frames (num, D, K), as `grmoe.geometry.haar_frames`: QR with a positive diagonal of R."""
    Q, R = torch.linalg.qr(torch.randn(num, D, K, generator=generator, dtype=torch.float64))
    return Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def _draw_vectors(A_SFF: Tensor, generator: torch.Generator | None) -> Tensor:
    """One exact draw from each vector Bingham density ∝ exp(zᵀA_s z), (S, F).

    Rejection from an angular central Gaussian, as in `grmoe.bingham.sampling`, for a stack of matrices at once.
    """
    values_SF, V_SFF = torch.linalg.eigh(A_SFF)
    beta_SF = values_SF[:, -1:] - values_SF
    F = beta_SF.shape[-1]
    low, high = torch.full_like(beta_SF[:, :1], 1e-12), torch.full_like(beta_SF[:, :1], float(F))
    for _ in range(60):  # Σ 1/(b + 2β) = 1
        middle = (low + high) / 2
        above = (1 / (middle + 2 * beta_SF)).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    b_S1 = high
    omega_SF = 1 + 2 * beta_SF / b_S1
    log_M_S = (-(F - b_S1) / 2 + F / 2 * (F / b_S1).log()).squeeze(-1)
    drawn_SF, open_S = torch.zeros_like(beta_SF), torch.arange(len(beta_SF))
    while len(open_S):
        size = (len(open_S), F)
        y = torch.randn(size, generator=generator, dtype=torch.float64) * omega_SF[open_S].rsqrt()
        z = y / y.norm(dim=-1, keepdim=True)
        energy = (beta_SF[open_S] * z.square()).sum(-1)
        b = b_S1[open_S].squeeze(-1)
        log_accept = -energy + F / 2 * torch.log1p(2 * energy / b) - log_M_S[open_S]
        accepted = torch.rand(len(open_S), generator=generator, dtype=torch.float64).log() < log_accept
        drawn_SF[open_S[accepted]] = z[accepted]
        open_S = open_S[~accepted]
    return (V_SFF @ drawn_SF.unsqueeze(-1)).squeeze(-1)


def _spectrum(eigenvalues_D: Tensor) -> Tensor:
    checks.floating("eigenvalues", eigenvalues_D)
    checks.require(
        eigenvalues_D.ndim == 1 and len(eigenvalues_D) >= 2,
        f"eigenvalues must have shape (d,) with d >= 2, got {tuple(eigenvalues_D.shape)}",
    )
    return checks.all_finite("eigenvalues", eigenvalues_D)


def _orientation(orientation_DD: Tensor, D: int) -> Tensor:
    checks.floating("orientation", orientation_DD)
    shape = tuple(orientation_DD.shape)
    checks.require(shape == (D, D), f"orientation must have shape ({D}, {D}), got {shape}")
    error = float((orientation_DD.mT @ orientation_DD - torch.eye(D, dtype=orientation_DD.dtype)).abs().max())
    checks.require(error < 1e-3, f"orientation must be orthogonal, got max|MᵀM − I| = {error:.2g}")
    return orientation_DD
