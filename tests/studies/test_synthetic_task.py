"""The synthetic task is the distribution the paper describes, at the overlap it claims."""

from __future__ import annotations

import pytest
import torch

from grmoe import geometry
from grmoe.studies.synthetic.task import EASY, HARD, Setting, Task, apply_experts, frames_with_overlap


def test_tokens_have_the_stated_covariance() -> None:
    task = Task(Setting("s", rho=0.3, sigma2=0.25), 2, num_experts=2, dim=12, rank=3, seed=3)
    x, label = task.tokens(60_000)
    eye = torch.eye(12)
    for s in range(2):
        for e in range(2):
            mine = x[s][label[s] == e] / task.scale
            U = task.frames_SNDK[s, e]
            P = U @ U.T
            # An entry of a sample covariance of 30000 unit-variance tokens has a standard error near 0.006.
            assert (mine.T @ mine / len(mine) - (P + 0.25 * (eye - P))).abs().max() < 0.03
            assert mine.mean(0).abs().max() < 0.03
    shares = torch.bincount(label.flatten(), minlength=2) / label.numel()
    assert (shares - 0.5).abs().max() < 0.01
    assert float(x.square().mean()) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("rho", "dim", "rank", "num"),
    [
        (0.1, 128, 16, 8),
        (0.4, 128, 16, 8),
        (0.02, 128, 16, 8),
        (0.0, 128, 16, 8),
        (0.2, 24, 6, 6),
        (0.9, 24, 6, 4),
    ],
)
def test_overlap_is_what_was_asked_for(rho: float, dim: int, rank: int, num: int) -> None:
    g = torch.Generator().manual_seed(0)
    frames = frames_with_overlap(rho, dim, rank, num, batch=3, generator=g)
    i, j = torch.triu_indices(num, num, offset=1)
    overlap = geometry.overlap(frames)[:, i, j] / rank
    # Bisection to 2^-20 of the tilt; the mean is met for each batch entry by itself.
    assert (overlap.mean(-1) - rho).abs().max() < 1e-4
    assert geometry.orthonormality_error(frames) < 1e-5


def test_impossible_overlap_is_refused_by_name() -> None:
    # Six rank-6 subspaces of R^24 cannot all be orthogonal: the mean overlap is at least (36/24 − 1)/5 = 0.1.
    with pytest.raises(ValueError, match=r"rho must be in \[0\.1, 1\) .* got 0\.05"):
        frames_with_overlap(0.05, 24, 6, 6, batch=1)
    frames = frames_with_overlap(0.1001, 24, 6, 6, batch=1, generator=torch.Generator().manual_seed(0))
    i, j = torch.triu_indices(6, 6, offset=1)
    assert float(geometry.overlap(frames)[0, i, j].mean()) / 6 == pytest.approx(0.1, abs=2e-3)


def test_targets_are_the_own_class_map() -> None:
    task = Task(EASY, 2, num_experts=3, dim=16, rank=2, out_dim=5, seed=1)
    x, label = task.tokens(7)
    y = task.targets(x, label)
    for s in range(2):
        for b in range(7):
            torch.testing.assert_close(y[s, b], x[s, b] @ task.maps_SNDO[s, label[s, b]])
    every = apply_experts(x, task.maps_SNDO)
    torch.testing.assert_close(every[1, 3, 2], x[1, 3] @ task.maps_SNDO[1, 2])


@pytest.mark.parametrize(
    ("setting", "rank", "expected"),
    [(EASY, 16, 0.9999), (HARD, 16, 0.57), (EASY, 8, 0.989)],
)
def test_bayes_oracle_scores_as_known(setting: Setting, rank: int, expected: float) -> None:
    if rank == 8:  # the known value is for random frames
        setting = Setting("random", rho=8 / 128, sigma2=setting.sigma2)
    task = Task(setting, 8, rank=rank, seed=0)
    x, label = task.tokens(4000)
    accuracy = float((task.oracle(x) == label).double().mean())
    # 32000 tokens: standard error under 0.003; eight draws of the frames add about as much.
    assert accuracy == pytest.approx(expected, abs=0.01)


def test_oracle_is_the_bayes_rule() -> None:
    """argmax of the Gaussian log density with the true covariances, computed the long way."""
    task = Task(HARD, 1, num_experts=3, dim=10, rank=3, seed=2)
    x, _ = task.tokens(50)
    logs = []
    for e in range(3):
        P = task.frames_SNDK[0, e] @ task.frames_SNDK[0, e].T
        cov = (P + 0.5 * (torch.eye(10) - P)) * task.scale**2
        logs.append(torch.distributions.MultivariateNormal(torch.zeros(10), cov).log_prob(x[0]))
    assert torch.equal(torch.stack(logs).argmax(0), task.oracle(x)[0])


def test_a_seed_fixes_the_task() -> None:
    a, b, c = Task(EASY, 2, seed=5), Task(EASY, 2, seed=5), Task(EASY, 2, seed=6)
    assert torch.equal(a.frames_SNDK, b.frames_SNDK)
    assert torch.equal(a.tokens(5)[0], b.tokens(5)[0])
    assert not torch.equal(a.frames_SNDK, c.frames_SNDK)


def test_bad_noise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sigma2 must be in \(0, 1\), got 1\.5"):
        Task(Setting("bad", 0.1, 1.5), 1)
