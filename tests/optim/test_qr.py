"""Adam through QR: its gradient against finite differences, its step against QR in the forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from grmoe.geometry import haar_frames, orthonormality_error, orthonormalize
from grmoe.optim import ProjectedAdam, QRAdam
from grmoe.optim.qr import gradient_by_matrix
from grmoe.runs.state import gather, restore

F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loss_of(U: Tensor, C: Tensor) -> Tensor:
    """Depends on the columns, not on the subspace alone."""
    return (C * U).sum() + (U.square() * C).sum().square()


@pytest.mark.parametrize("shape", [(2, 6, 3), (1, 4, 4)])
def test_the_gradient_is_that_of_finite_differences(shape: tuple[int, ...]) -> None:
    A, C = (torch.randn(shape, generator=rng(seed), dtype=F64) for seed in (1, 2))
    U = orthonormalize(A).requires_grad_()
    (G,) = torch.autograd.grad(loss_of(U, C), U)
    found, h = gradient_by_matrix(A, G), 1e-6
    for index in range(A.numel()):
        step = torch.zeros(A.numel(), dtype=F64).index_fill(0, torch.tensor(index), h).view(shape)
        up, down = (loss_of(orthonormalize(A + sign * step), C) for sign in (1, -1))
        assert float(found.flatten()[index]) == pytest.approx(
            float((up - down) / (2 * h)), abs=1e-7, rel=1e-6
        )


def test_steps_are_those_of_qr_in_the_forward_pass() -> None:
    start, C = (
        haar_frames(12, 3, 4, generator=rng(), dtype=F64),
        torch.randn(4, 12, 3, generator=rng(1), dtype=F64),
    )
    p, A = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = QRAdam([{"params": [p], "manifold": "grassmann"}], lr=0.05, betas=(0.8, 0.9), eps=1e-3)
    plain = torch.optim.AdamW([A], lr=0.05, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.0)
    for _ in range(5):
        optimizer.zero_grad()
        plain.zero_grad()
        optimizer.step(lambda: float(_backward(loss_of(p, C))))
        _backward(loss_of(orthonormalize(A), C))
        plain.step()
        torch.testing.assert_close(p.detach(), orthonormalize(A.detach()))
        torch.testing.assert_close(optimizer.state[p]["matrix"], A.detach())
    assert not torch.allclose(p.detach(), start, atol=1e-2)


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


class Frames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Parameter(haar_frames(20, 4, 3, generator=rng()))
        self.idle = nn.Parameter(haar_frames(20, 4, 3, generator=rng(1)))
        self.optimizers = [QRAdam([self.frames, self.idle], lr=0.02)]

    def train_from(self, step: int, steps: int) -> None:
        for number in range(step, step + steps):
            self.frames.grad = torch.randn(self.frames.shape, generator=rng(number))
            self.optimizers[0].step()


def test_a_resumed_training_is_the_same_bit_for_bit() -> None:
    """The matrix cannot be found again from its frame: it is part of the checkpoint."""
    straight, broken, resumed = Frames(), Frames(), Frames()
    straight.train_from(0, 30)
    broken.train_from(0, 10)
    assert set(gather(resumed, resumed.optimizers)["moments"]["frames"]) == {
        "step",
        "exp_avg",
        "exp_avg_sq",
        "matrix",
    }
    restore(resumed, resumed.optimizers, gather(broken, broken.optimizers))
    resumed.train_from(10, 20)
    assert torch.equal(resumed.frames, straight.frames)
    assert torch.equal(resumed.idle, Frames().idle)  # no gradient, no step
    assert orthonormality_error(straight.frames.detach()) < 2e-6
    assert straight.optimizers[0].state[straight.frames]["matrix"].dtype == torch.float32


@pytest.mark.parametrize("kind", [QRAdam, ProjectedAdam])
def test_a_step_with_nan_that_the_device_skips_changes_nothing(
    kind: type[QRAdam] | type[ProjectedAdam],
) -> None:
    """Only torch's fused Adam knows `found_inf`; the others stop with an assertion. The trainer on a GPU sets it."""
    p = nn.Parameter(haar_frames(20, 4, 3, generator=rng()))
    optimizer = kind([p], lr=0.02, fused=True)
    optimizer.found_inf = torch.zeros(())  # type: ignore[union-attr]
    p.grad = torch.randn(p.shape, generator=rng(1))
    optimizer.step()
    before, moments = p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()}
    optimizer.found_inf = torch.ones(())  # type: ignore[union-attr]
    p.grad = torch.full(p.shape, torch.nan)
    optimizer.step()
    torch.testing.assert_close(p.detach(), before, rtol=0, atol=1e-6)  # QR once more
    assert all(torch.equal(optimizer.state[p][name], value) for name, value in moments.items())
