"""Frames, angles, distances and overlaps against closed forms, naive loops and the laws they must obey."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grmoe import geometry as G

F64 = torch.float64
# Products of a few dozen fp64 roundings of numbers of size one.
TOL = 1e-12

shapes = st.tuples(st.integers(1, 6), st.integers(0, 6)).map(lambda s: (s[0] + s[1], s[0]))
seeds = st.integers(0, 2**31 - 1)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def haar(dim: int, rank: int, num: int | tuple[int, ...] = (), seed: int = 0) -> Tensor:
    return G.haar_frames(dim, rank, num, generator=rng(seed), dtype=F64)


def tilted(U: Tensor, W: Tensor, angles: Tensor) -> Tensor:
    """A frame at the given principal angles from U; the columns of W are orthonormal and orthogonal to U."""
    return U * angles.cos() + W * angles.sin()


# ------------------------------------------------------------------------------------------------- frames


@given(shape=shapes, seed=seeds)
def test_orthonormalize(shape: tuple[int, int], seed: int) -> None:
    Y = torch.randn(3, *shape, generator=rng(seed), dtype=F64)
    Q = G.orthonormalize(Y)
    eye = torch.eye(shape[1], dtype=F64)
    torch.testing.assert_close(Q.mT @ Q, eye.expand(3, -1, -1), rtol=0, atol=TOL)
    R = Q.mT @ Y  # Y = QR: R upper triangular with a positive diagonal, and Q spans Y
    assert (torch.diagonal(R, dim1=-2, dim2=-1) > 0).all()
    torch.testing.assert_close(R.tril(-1), torch.zeros_like(R), rtol=0, atol=1e-11)
    torch.testing.assert_close(Q @ R, Y, rtol=0, atol=1e-11)
    assert Q.is_contiguous()
    torch.testing.assert_close(G.orthonormalize(Q), Q, rtol=0, atol=TOL)  # a frame is left alone


def test_haar_frames_are_frames() -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (F64, 1e-14)):
        U = G.haar_frames(32, 8, (2, 3), generator=rng(), dtype=dtype)
        assert U.shape == (2, 3, 32, 8)
        assert U.dtype == dtype
        assert U.is_contiguous()
        assert float(G.orthonormality_error(U)) < tolerance
    assert G.haar_frames(5, 2).shape == (5, 2)
    assert G.haar_frames(5, 2, 4).shape == (4, 5, 2)


def test_haar_frames_follow_the_seed() -> None:
    a = G.haar_frames(16, 4, 3, generator=rng(7))
    assert torch.equal(a, G.haar_frames(16, 4, 3, generator=rng(7)))
    assert not torch.equal(a, G.haar_frames(16, 4, 3, generator=rng(8)))
    # One stream for every dtype: the fp32 frame is the fp64 one, rounded.
    assert torch.equal(a, G.haar_frames(16, 4, 3, generator=rng(7), dtype=F64).float())


@pytest.mark.parametrize(("dim", "rank"), [(16, 2), (32, 8)])
def test_haar_law(dim: int, rank: int) -> None:
    n = 4000
    U, V = haar(dim, rank, n, seed=1), haar(dim, rank, n, seed=2)
    overlap = (U.mT @ V).square().sum((-2, -1))
    error = float(overlap.std()) / math.sqrt(n)
    assert abs(float(overlap.mean()) - rank**2 / dim) < 4 * error
    assert G.random_overlap(dim, rank) == rank**2 / dim
    # Invariant under rotations, hence E UUᵀ = (k/d)I and E U = 0; 4.5 standard errors for up to 1024 entries.
    P = U @ U.mT
    wrong = (P.mean(0) - rank / dim * torch.eye(dim, dtype=F64)).abs() / (P.std(0) / math.sqrt(n))
    assert float(wrong.max()) < 4.5
    wrong = U.mean(0).abs() / (U.std(0) / math.sqrt(n))
    assert float(wrong.max()) < 4.5


def test_pca_frames_find_the_subspace() -> None:
    truth = haar(20, 3)
    data = torch.randn(200, 3, generator=rng(1), dtype=F64) * torch.tensor([3.0, 2.0, 1.0]) @ truth.mT
    U = G.pca_frames(data, 3, 4, generator=rng(2))
    assert U.shape == (4, 20, 3)
    # eigh of the Gram matrix resolves null directions to √eps relative to the largest eigenvalue.
    assert float(G.chordal_distance(U, truth.expand_as(U)).max()) < 1e-6
    assert float(G.orthonormality_error(U)) < TOL
    assert torch.equal(U, G.pca_frames(data, 3, 4, generator=rng(2)))
    # Asked for more directions than the data have, it still returns a frame that holds them.
    wide = G.pca_frames(data, 5, 2, generator=rng(2))
    assert float(G.orthonormality_error(wide)) < TOL
    torch.testing.assert_close((wide.mT @ truth).square().sum((-2, -1)), torch.full((2,), 3.0, dtype=F64))


def test_pca_frames_differ_between_experts() -> None:
    data = torch.randn(100, 12, generator=rng(1)) + 0.5  # not centred: the energy is about the origin
    U = G.pca_frames(data, 2, 3, subset=0.3, generator=rng(2))
    assert U.dtype == torch.float32
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert float(G.chordal_distance(U[i], U[j])) > 0.05
    # The whole set leaves nothing to differ in, and no frame captures more of its energy than the best.
    whole = G.pca_frames(data, 2, 2, subset=1.0, generator=rng(2)).double()
    best = torch.linalg.eigvalsh((data.mT @ data).double())[-2:].sum()
    torch.testing.assert_close((data.double() @ whole[0]).square().sum(), best, rtol=1e-6, atol=0)
    assert float(G.chordal_distance(whole[0], whole[1])) < 1e-5  # fp32 frames


def test_identity_frames() -> None:
    U = G.identity_frames(7, 3, 4)
    assert U.dtype == torch.float32
    assert U.is_contiguous()
    eye = torch.eye(7)
    for e, columns in enumerate(([0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4])):
        assert torch.equal(U[e], eye[:, columns])
    assert G.identity_frames(4, 2, 2, dtype=F64).dtype == F64
    assert float(G.overlap(G.identity_frames(6, 2, 3))[0, 1]) == 0.0  # blocks share nothing until they wrap


# ----------------------------------------------------------------------------------- angles and distances


def test_two_planes_of_four_space() -> None:
    angles = torch.tensor([0.3, 1.1], dtype=F64)
    rotation = haar(4, 4, seed=3)
    U, W = rotation[:, :2], rotation[:, 2:]
    V = tilted(U, W, angles)
    torch.testing.assert_close(G.principal_angles(U, V), angles, rtol=0, atol=TOL)
    assert float(G.geodesic_distance(U, V)) == pytest.approx(1.140175425099138, abs=TOL)
    assert float(G.chordal_distance(U, V)) == pytest.approx(0.93892638219023, abs=TOL)


@given(rank=st.integers(1, 4), extra=st.integers(0, 3), seed=seeds)
def test_distances_from_known_angles(rank: int, extra: int, seed: int) -> None:
    basis = haar(2 * rank + extra, 2 * rank, seed=seed)
    angles = (torch.rand(rank, generator=rng(seed), dtype=F64) * math.pi / 2).sort().values
    U, V = basis[:, :rank], tilted(basis[:, :rank], basis[:, rank:], angles)
    torch.testing.assert_close(G.principal_angles(U, V), angles, rtol=0, atol=TOL)
    torch.testing.assert_close(G.geodesic_distance(U, V), angles.norm(), rtol=0, atol=TOL)
    torch.testing.assert_close(G.chordal_distance(U, V), angles.sin().norm(), rtol=0, atol=TOL)
    naive = (rank - (U.mT @ V).square().sum()).clamp(min=0).sqrt()  # eq:grassmann_dist, with its cancellation
    torch.testing.assert_close(G.chordal_distance(U, V), naive, rtol=0, atol=1e-7)


@given(shape=shapes, seed=seeds)
def test_distances_are_metrics_on_subspaces(shape: tuple[int, int], seed: int) -> None:
    dim, rank = shape
    U, V, W = haar(dim, rank, 3, seed=seed)
    O = haar(rank, rank, seed=seed + 1)
    for distance in (G.chordal_distance, G.geodesic_distance):
        d = {
            name: float(distance(*pair)) for name, pair in {"UV": (U, V), "VW": (V, W), "UW": (U, W)}.items()
        }
        assert float(distance(V, U)) == pytest.approx(d["UV"], abs=TOL)
        assert d["UW"] <= d["UV"] + d["VW"] + TOL
        assert float(distance(U @ O, V)) == pytest.approx(d["UV"], abs=TOL)  # of the subspace, not the frame
        assert float(distance(U, U @ O)) <= TOL
        assert rank == dim or d["UV"] > 1e-6
    angles = G.principal_angles(U, V)
    assert angles.shape == (rank,)
    assert bool((angles.diff() >= -TOL).all())
    assert float(angles.min()) >= 0
    assert float(angles.max()) <= math.pi / 2 + TOL


def test_small_angles_keep_their_digits() -> None:
    basis = haar(10, 4, seed=5)
    U, W = basis[:, :2], basis[:, 2:]
    for angle in (1e-3, 1e-6, 1e-9):
        angles = torch.tensor([angle, 3 * angle], dtype=F64)
        V = tilted(U, W, angles)
        # Rounding of V alone is 1e-16/1e-9 = 1e-7 of the smallest angle; arccos would give 0.
        torch.testing.assert_close(G.principal_angles(U, V), angles, rtol=1e-6, atol=0)
        torch.testing.assert_close(G.geodesic_distance(U, V), angles.norm(), rtol=1e-6, atol=0)
        torch.testing.assert_close(G.chordal_distance(U, V), angles.sin().norm(), rtol=1e-6, atol=0)


def test_gradients_of_distances() -> None:
    U, V = haar(7, 2, 2, seed=6).requires_grad_()
    for function in (G.chordal_distance, G.geodesic_distance, G.principal_angles):
        assert torch.autograd.gradcheck(function, (U.detach().requires_grad_(), V.detach().requires_grad_()))
    frames = haar(6, 2, 3, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(G.overlap, (frames,))
    off = ~torch.eye(3, dtype=torch.bool)  # on the diagonal all singular values are one: no gradient there
    assert torch.autograd.gradcheck(lambda F: G.largest_cosine(F)[off], (frames,))


def test_gradient_at_coinciding_subspaces() -> None:
    V = torch.eye(6, 2, dtype=F64)
    for distance in (G.chordal_distance, G.geodesic_distance):
        U = V.clone().requires_grad_()
        value = distance(U, V)
        value.backward()
        assert value.item() == 0.0
        assert torch.equal(U.grad, torch.zeros_like(U))
        # A generic frame is off itself by a rounding: no zero gradient there, but none above the slope of
        # V − UUᵀV, in which U stands twice.
        U = haar(6, 2, seed=11).requires_grad_()
        distance(U, U.detach() @ haar(2, 2, seed=12)).backward()
        assert float(U.grad.norm()) <= 2 + 1e-6


@given(shape=shapes, num=st.integers(1, 4), seed=seeds)
def test_chordal_mean_minimises_the_chordal_distances(shape: tuple[int, int], num: int, seed: int) -> None:
    dim, rank = shape
    frames, weight = haar(dim, rank, num, seed=seed), torch.rand(num, generator=rng(seed), dtype=F64) + 0.1

    def cost(V: Tensor) -> float:
        return float((weight * G.chordal_distance(frames, V.expand_as(frames)).square()).sum())

    mean = G.chordal_mean(frames, weight)
    assert float(G.orthonormality_error(mean)) < TOL
    best = cost(mean)
    # Of all subspaces: the sum of the eigenvalues that do not fit (Ky Fan), which nothing undercuts.
    spectrum = torch.linalg.eigvalsh(torch.einsum("n,ndk,nek->de", weight, frames, frames))
    assert best == pytest.approx(float(rank * weight.sum() - spectrum[-rank:].sum()), abs=1e-11)
    near = G.orthonormalize(mean + 0.1 * torch.randn(5, dim, rank, generator=rng(seed + 1), dtype=F64))
    for other in (*near, *haar(dim, rank, 5, seed=seed + 2), *frames):
        assert cost(other) >= best - 1e-11
    turned = frames @ haar(rank, rank, num, seed=seed + 3)
    assert cost(G.chordal_mean(turned, 3 * weight)) == pytest.approx(best, abs=1e-11)


def test_chordal_mean_of_known_subspaces() -> None:
    basis = haar(9, 4, seed=21)
    U, W = basis[:, :2], basis[:, 2:]
    angles = torch.tensor([0.2, 0.6], dtype=F64)
    pair = torch.stack([tilted(U, W, angles), tilted(U, W, -angles)])
    even = torch.ones(2, dtype=F64)
    assert float(G.chordal_distance(G.chordal_mean(pair, even), U)) < TOL  # halfway
    assert float(G.chordal_distance(G.chordal_mean(pair, torch.tensor([1.0, 0.0], dtype=F64)), pair[0])) < TOL
    turned = pair @ haar(2, 2, 2, seed=22)  # of the subspaces, not of the frames
    assert float(G.chordal_distance(G.chordal_mean(turned, even), U)) < TOL
    same = torch.stack([U, U @ haar(2, 2, seed=23), U])
    assert float(G.chordal_distance(G.chordal_mean(same, torch.tensor([0.2, 0.5, 0.3], dtype=F64)), U)) < TOL
    single = G.chordal_mean(pair.float(), even.float())
    assert single.dtype == torch.float32
    assert float(G.chordal_distance(single.double(), U)) < 1e-6


def test_batches_are_loops() -> None:
    U, V = haar(9, 3, (2, 4), seed=8), haar(9, 3, (2, 4), seed=9)
    for function in (G.principal_angles, G.chordal_distance, G.geodesic_distance):
        batched = function(U, V)
        for i in range(2):
            for j in range(4):
                torch.testing.assert_close(batched[i, j], function(U[i, j], V[i, j]), rtol=0, atol=TOL)
    weight = torch.rand(2, 4, generator=rng(8), dtype=F64)
    for i, mean in enumerate(G.chordal_mean(U, weight)):
        torch.testing.assert_close(mean, G.chordal_mean(U[i], weight[i]), rtol=0, atol=TOL)
    for function in (G.overlap, G.largest_cosine):
        batched = function(U)
        for i in range(2):
            torch.testing.assert_close(batched[i], function(U[i]), rtol=0, atol=TOL)


# ------------------------------------------------------------------------------------------------- overlap


@given(shape=shapes, num=st.integers(1, 4), seed=seeds)
def test_overlap_and_cosine_of_all_pairs(shape: tuple[int, int], num: int, seed: int) -> None:
    dim, rank = shape
    frames = haar(dim, rank, num, seed=seed)
    overlap, cosine = G.overlap(frames), G.largest_cosine(frames)
    assert overlap.shape == cosine.shape == (num, num)
    for i in range(num):
        for j in range(num):
            inner = frames[i].mT @ frames[j]
            assert float(overlap[i, j]) == pytest.approx(float((inner**2).sum()), abs=TOL)
            assert float(cosine[i, j]) == pytest.approx(float(torch.linalg.svdvals(inner)[0]), abs=TOL)
            # The chordal distance and the overlap are two readings of one number.
            distance = float(G.chordal_distance(frames[i], frames[j]))
            assert rank - float(overlap[i, j]) == pytest.approx(distance**2, abs=1e-11)
    assert overlap.diagonal().tolist() == pytest.approx([rank] * num, abs=TOL)


@given(shape=shapes, num=st.integers(2, 5), seed=seeds)
def test_angles_of_all_pairs_are_those_of_each(shape: tuple[int, int], num: int, seed: int) -> None:
    frames = haar(*shape, (2, num), seed)
    found = G.pairwise_angles(frames)
    assert found.shape == (2, num, num, shape[1])
    assert (found.diagonal(dim1=1, dim2=2) == 0).all()
    want = G.principal_angles(frames[:, :, None], frames[:, None])
    # arccos of a cosine good to 1e-15: half the digits of an angle near 0, as where 2k > d forces common directions
    torch.testing.assert_close(found, want, rtol=0, atol=1e-7)
    far = want > 0.01
    torch.testing.assert_close(found[far], want[far], rtol=0, atol=TOL)


def test_angles_near_zero_of_frames_in_fp32() -> None:
    basis = haar(64, 16, seed=3)
    U, W = basis[:, :8], basis[:, 8:]
    for angle in (0.0, 1e-3, 0.5):
        V = tilted(U, W, torch.full((8,), angle, dtype=F64))
        found = G.pairwise_angles(torch.stack([U, V]).float())[0, 1]
        # fp32 moves entries of the frames, and so the subspaces, by 1e-7; nothing is to be added to that
        torch.testing.assert_close(found.double(), torch.full((8,), angle, dtype=F64), rtol=0, atol=1e-6)


@given(size=st.integers(1, 6), squarings=st.integers(2, 20), seed=seeds)
def test_the_largest_eigenvalue_by_squaring_lies_within_its_bound(
    size: int, squarings: int, seed: int
) -> None:
    A = torch.randn(3, size, size, dtype=F64, generator=torch.Generator().manual_seed(seed))
    found, exact = G.largest_eigenvalue(A @ A.mT, squarings), torch.linalg.eigvalsh(A @ A.mT)[:, -1]
    assert bool((found >= exact * (1 - 1e-9)).all())
    assert bool((found <= exact * size ** (0.5**squarings) * (1 + 1e-9)).all())
    assert G.largest_eigenvalue(torch.zeros(size, size, dtype=F64), squarings) == 0.0


def test_orthogonal_and_equal_frames_have_cosines_zero_and_one() -> None:
    eye = torch.eye(12)
    assert float(G.largest_cosine(torch.stack([eye[:, :4], eye[:, 4:8]]))[0, 1]) == 0.0
    assert float(G.largest_cosine(torch.stack([eye[:, :4], eye[:, :4]]))[0, 1]) == pytest.approx(
        1.0, abs=1e-6
    )


def test_overlap_does_not_bound_the_cosine() -> None:
    """14 shared directions of 48 stay under the hinge 0.3·48 = 14.4, yet some token lies in both subspaces."""
    eye = torch.eye(768, dtype=F64)
    frames = torch.stack([eye[:, :48], eye[:, 34:82]])
    assert float(G.overlap(frames)[0, 1]) == 14.0 < 0.3 * 48
    assert float(G.largest_cosine(frames)[0, 1]) == pytest.approx(1.0, abs=TOL)
    assert G.random_overlap(768, 48) == 3.0


def test_orthonormality_error() -> None:
    frames = haar(8, 3, 4, seed=10)
    assert float(G.orthonormality_error(frames)) < 1e-14
    frames[2, :, 1] *= 1.1
    assert float(G.orthonormality_error(frames)) == pytest.approx(0.21, abs=TOL)  # 1.1² − 1
    frames[2, :, 1] = frames[2, :, 0]
    assert float(G.orthonormality_error(frames)) == pytest.approx(1.0, abs=TOL)


# ------------------------------------------------------------------------------------------------ bad input


def test_bad_input() -> None:
    U = haar(6, 2)
    with pytest.raises(ValueError, match=r"rank must be at most dim = 4, got 5"):
        G.haar_frames(4, 5)
    with pytest.raises(ValueError, match=r"rank must be at most dim = 4, got 5"):
        G.identity_frames(4, 5, 2)
    with pytest.raises(ValueError, match=r"rank must be at most dim = 4, got 5"):
        G.random_overlap(4, 5)
    with pytest.raises(ValueError, match=r"num must be an integer >= 1, got 0"):
        G.identity_frames(4, 2, 0)
    with pytest.raises(ValueError, match=r"Y must have shape .* got \(2, 3\)"):
        G.orthonormalize(torch.zeros(2, 3))
    for function in (G.chordal_distance, G.geodesic_distance, G.principal_angles):
        with pytest.raises(ValueError, match=r"U and V must share \(d, k\), got .*6, 2.* and .*6, 3"):
            function(U, haar(6, 3))
        with pytest.raises(ValueError, match=r"V must be a floating-point tensor, got torch.int64"):
            function(U, torch.zeros(6, 2, dtype=torch.int64))
    for function in (G.overlap, G.largest_cosine):
        with pytest.raises(ValueError, match=r"frames must have shape \(\.\.\., N, d, k\), got \(6, 2\)"):
            function(U)
    with pytest.raises(ValueError, match=r"frames must have shape \(\.\.\., N, d, k\), got \(6, 2\)"):
        G.chordal_mean(U, torch.ones(2))
    with pytest.raises(ValueError, match=r"weight must have shape \(\.\.\., 2\), got \(3,\)"):
        G.chordal_mean(haar(6, 2, 2), torch.ones(3))
    with pytest.raises(ValueError, match=r"weight must be >= 0"):
        G.chordal_mean(haar(6, 2, 2), torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match=r"frames must have shape .* got \(3,\)"):
        G.orthonormality_error(torch.zeros(3))


def test_bad_pca_input() -> None:
    data = torch.randn(10, 4, generator=rng())
    with pytest.raises(ValueError, match=r"data must have shape \(tokens, dim\), got \(2, 10, 4\)"):
        G.pca_frames(data.expand(2, 10, 4), 2, 2)
    with pytest.raises(ValueError, match=r"subset must be in \(0, 1\], got 0"):
        G.pca_frames(data, 2, 2, subset=0)
    with pytest.raises(ValueError, match=r"data must give each subset at least rank = 3 rows, got 2"):
        G.pca_frames(data, 3, 2, subset=0.2)
    with pytest.raises(ValueError, match=r"num must be an integer >= 1, got 0"):
        G.pca_frames(data, 2, 0)
    with pytest.raises(ValueError, match=r"data must be a floating-point tensor, got torch.int64"):
        G.pca_frames(data.long(), 2, 2)
    data[3, 1] = math.nan
    with pytest.raises(ValueError, match="data holds 1 non-finite value of 40"):
        G.pca_frames(data, 2, 2)
