"""Adam followed by QR, against the formula."""

from __future__ import annotations

import torch
from torch import nn

from grmoe.geometry import haar_frames, orthonormality_error, orthonormalize
from grmoe.optim import ProjectedAdam


def test_a_step_is_adam_and_qr() -> None:
    g = torch.Generator().manual_seed(0)
    start = haar_frames(12, 3, 4, generator=g, dtype=torch.float64)
    p = nn.Parameter(start.clone())
    optimizer = ProjectedAdam([{"params": [p], "manifold": "grassmann"}], lr=0.05, betas=(0.8, 0.9), eps=1e-3)
    m = v = torch.zeros_like(start)
    expected = start
    for step in (1, 2, 3):
        grad = torch.randn(start.shape, generator=g, dtype=torch.float64)
        p.grad = grad.clone()
        optimizer.step()
        m, v = 0.8 * m + 0.2 * grad, 0.9 * v + 0.1 * grad.square()
        moved = expected - 0.05 * (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-3)
        expected = orthonormalize(moved)
        torch.testing.assert_close(p.detach(), expected)
    assert orthonormality_error(p.detach()) < 1e-12
    assert not torch.allclose(expected, start, atol=1e-2)


def test_frames_without_a_gradient_stay() -> None:
    p = nn.Parameter(haar_frames(8, 2, 3))
    before = p.detach().clone()
    ProjectedAdam([p]).step()
    assert torch.equal(p, before)
