"""The overlap penalty against eq:subspace_reg as a double loop, and its samples against the full sum."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grmoe.geometry import haar_frames
from grmoe.regularizers import overlap_penalty


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frames_of(num: int | tuple[int, ...], dim: int = 10, rank: int = 3, seed: int = 0) -> Tensor:
    return haar_frames(dim, rank, num, generator=rng(seed), dtype=torch.float64)


def naive(frames: Tensor, rho: float) -> float:
    """Σ_{e≠e'} max(0, ‖U_eᵀU_e'‖²_F − ρ₀k), one ordered pair at a time."""
    N, _, K = frames.shape
    total = 0.0
    for e in range(N):
        for other in range(N):
            if e != other:
                total += max(0.0, float((frames[e].T @ frames[other]).square().sum()) - rho * K)
    return total


@settings(max_examples=40, deadline=None)
@given(
    num=st.integers(2, 7),
    dim=st.integers(3, 9),
    rank=st.integers(1, 3),
    rho=st.floats(0.0, 1.0),
    seed=st.integers(0, 10**6),
)
def test_equals_the_double_loop_and_ignores_rotations(
    num: int, dim: int, rank: int, rho: float, seed: int
) -> None:
    U = frames_of(num, dim, rank, seed)
    got = overlap_penalty(U, rho)
    assert float(got) == pytest.approx(naive(U, rho), rel=1e-12, abs=1e-12)
    relative = overlap_penalty(U, rho * dim / rank, relative=True)
    assert float(relative) == pytest.approx(float(got), rel=1e-9, abs=1e-9)
    O = haar_frames(rank, rank, num, generator=rng(seed + 1), dtype=torch.float64)
    assert float(overlap_penalty(U @ O, rho)) == pytest.approx(float(got), rel=1e-9, abs=1e-9)
    order = torch.randperm(num, generator=rng(seed))
    assert float(overlap_penalty(U[order], rho)) == pytest.approx(float(got), rel=1e-12, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(num=st.integers(2, 8), low=st.floats(0.0, 1.0), high=st.floats(0.0, 1.0), seed=st.integers(0, 10**6))
def test_decreases_in_rho_down_to_zero(num: int, low: float, high: float, seed: int) -> None:
    U = frames_of(num, seed=seed)
    low, high = sorted((low, high))
    assert float(overlap_penalty(U, low)) >= float(overlap_penalty(U, high)) >= 0
    assert float(overlap_penalty(U, 1.0)) == pytest.approx(0, abs=1e-12)  # no overlap exceeds k


def test_extremes() -> None:
    same = frames_of(1).expand(4, 10, 3)
    assert float(overlap_penalty(same, 0.25)) == pytest.approx(4 * 3 * 3 * 0.75, rel=1e-12)
    apart = torch.eye(9, dtype=torch.float64).view(9, 3, 3).transpose(0, 1)
    assert float(overlap_penalty(apart, 0.0)) == 0


def test_batches() -> None:
    U = frames_of((2, 3, 5))
    got = overlap_penalty(U, 0.2)
    assert got.shape == (2, 3)
    for b, row in enumerate(got):
        assert row.tolist() == pytest.approx([naive(x, 0.2) for x in U[b]], rel=1e-12)
    sampled = overlap_penalty(U, 0.2, num_pairs=4, generator=rng(1))
    assert sampled.shape == (2, 3)
    alone = overlap_penalty(U[1, 2], 0.2, num_pairs=4, generator=rng(1))
    assert float(sampled[1, 2]) == pytest.approx(float(alone), rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"relative": True}, {"num_pairs": 6}])
def test_gradient(options: dict[str, Any]) -> None:
    U = frames_of(5).requires_grad_()
    rho = 0.8 if options.get("relative") else 0.2
    assert float(overlap_penalty(U.detach(), rho, relative=bool(options.get("relative")))) > 0
    assert torch.autograd.gradcheck(lambda x: overlap_penalty(x, rho, **options, generator=rng(2)), (U,))


def test_the_papers_hinge_never_acts_on_random_frames() -> None:
    """k²/d = 3.0 at k = 48, d = 768 against a hinge at 0.3·48 = 14.4."""
    U = haar_frames(768, 48, 8, generator=rng())
    assert float(overlap_penalty(U, 0.3)) == 0
    active = float(overlap_penalty(U, 0.5, relative=True))
    assert active == pytest.approx(8 * 7 * 1.5, rel=0.05)  # 3.0 − 1.5 for each of the 56 ordered pairs


def test_one_sampled_pair_is_unbiased_exactly() -> None:
    """With M = 1 the sample is one of 6 pairs; the mean over all outcomes is the full sum."""
    U = frames_of(4)
    values = {round(float(overlap_penalty(U, 0.1, num_pairs=1, generator=rng(s))), 9) for s in range(200)}
    assert len(values) == 6
    assert sum(values) / 6 == pytest.approx(naive(U, 0.1), rel=1e-7)


def test_samples_are_unbiased() -> None:
    U, draws = frames_of(9), 2000
    g = rng(3)
    values = torch.stack([overlap_penalty(U, 0.25, num_pairs=7, generator=g) for _ in range(draws)])
    error = float(values.std()) / math.sqrt(draws)
    # Four standard errors: a correct estimator fails once in 16 000 seeds, a missing factor 36/7 always.
    assert abs(float(values.mean()) - naive(U, 0.25)) < 4 * error
    assert error < 0.05 * naive(U, 0.25)


def test_auto() -> None:
    few, many = frames_of(8), frames_of(12)
    assert torch.equal(
        overlap_penalty(few, 0.1, num_pairs="auto"), overlap_penalty(few, 0.1)
    )  # 28 pairs < 32
    a = overlap_penalty(many, 0.1, num_pairs="auto", generator=rng(1))
    assert torch.equal(a, overlap_penalty(many, 0.1, num_pairs=48, generator=rng(1)))
    assert not torch.equal(a, overlap_penalty(many, 0.1))


def test_samples_are_without_replacement() -> None:
    """14 of 15 pairs leave out exactly one; a pair drawn twice would match none of the 15 candidates."""
    U = frames_of(6)
    overlaps = [float((U[i].T @ U[j]).square().sum()) for i in range(6) for j in range(i + 1, 6)]
    candidates = [2 * (sum(overlaps) - one) * 15 / 14 for one in overlaps]
    for seed in range(20):
        got = float(overlap_penalty(U, 0.0, num_pairs=14, generator=rng(seed)))
        assert min(abs(got - candidate) for candidate in candidates) < 1e-10


def test_only_sampled_frames_get_a_gradient() -> None:
    U = frames_of(6).requires_grad_()
    overlap_penalty(U, 0.0, num_pairs=1, generator=rng(5)).backward()
    assert U.grad is not None
    assert int((U.grad.abs().amax((-2, -1)) > 0).sum()) == 2


@pytest.mark.parametrize(
    ("frames", "rho", "options", "message"),
    [
        (frames_of(3), -0.1, {}, "rho"),
        (frames_of(3), math.nan, {}, "rho"),
        (frames_of(3), math.inf, {}, "rho"),
        (frames_of(1), 0.1, {}, "at least 2"),
        (frames_of(()), 0.1, {}, "frames"),
        (frames_of(3).mT, 0.1, {}, "frames"),
        (frames_of(3), 0.1, {"num_pairs": 0}, "num_pairs"),
        (frames_of(3), 0.1, {"num_pairs": 4}, "num_pairs"),
        (frames_of(3), 0.1, {"num_pairs": True}, "num_pairs"),
        (frames_of(3), 0.1, {"num_pairs": 1.5}, "num_pairs"),
        (frames_of(3), 0.1, {"num_pairs": "all"}, "num_pairs"),
    ],
)
def test_bad_input(frames: Tensor, rho: float, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overlap_penalty(frames, rho, **options)
