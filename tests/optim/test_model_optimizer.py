"""`ModelOptimizer`: two optimisers that look like one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import grmoe
from grmoe.geometry import orthonormality_error
from grmoe.optim import GrassmannAdam, ModelOptimizer, optimizer_groups


def build() -> grmoe.MoE:
    torch.manual_seed(0)
    router = grmoe.GrassmannRouter(16, 4, 3, amortizer="input")
    return grmoe.MoE(16, 8, 4, router, selection=grmoe.routing.TopK(2))


def gradients(model: nn.Module, step: int) -> None:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model(x).square().sum().backward()


def train(model: nn.Module, optimizers: Iterable[Optimizer], steps: range) -> list[Tensor]:
    for step in steps:
        gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_it_is_adamw_and_grassmann_adam() -> None:
    model, apart = build(), build()
    groups, frames = optimizer_groups(apart, 1e-2, weight_decay=0.2)
    pair = [AdamW(groups, lr=1e-2, betas=(0.9, 0.95)), GrassmannAdam(frames)]
    optimizer = ModelOptimizer(model, lr=1e-2, weight_decay=0.2)
    assert equal(train(model, [optimizer], range(4)), train(apart, pair, range(4)))
    assert float(orthonormality_error(model.router.frames.detach())) < 1e-6  # type: ignore[arg-type]
    rates = {g["kind"]: g["lr"] for g in optimizer.param_groups}
    assert rates == {"weights": 1e-2, "kappa": 1e-2, "frames": 1e-2 * (16 * 3) ** 0.5}
    decays = {p: g.get("weight_decay", 0.0) for g in optimizer.param_groups for p in g["params"]}
    assert {p.ndim > 1 for p, decay in decays.items() if decay} == {True}
    assert decays[model.router.frames] == decays[model.router.log_kappa] == 0  # type: ignore[index]


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_a_saved_optimiser_continues_bit_for_bit(how: str) -> None:
    model = build()
    optimizer = ModelOptimizer(model, lr=1e-2)
    train(model, [optimizer], range(3))
    if how == "state_dict":
        other = build()
        again = ModelOptimizer(other, lr=0.5)  # rates are part of the state
        other.load_state_dict(model.state_dict())
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif how == "pickle":
        other, again = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        other, again = copy.deepcopy((model, optimizer))
    assert equal(train(model, [optimizer], range(3, 6)), train(other, [again], range(3, 6)))


def test_a_schedule_scales_every_rate() -> None:
    model = build()
    optimizer = ModelOptimizer(model, lr=1e-2)
    before = [g["lr"] for g in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5 * lr for lr in before]
    start = train(model, [optimizer], range(1))
    schedule.step()
    # Rates are zero. A retraction rounds frames that stand still.
    torch.testing.assert_close(train(model, [optimizer], range(1, 3)), start, atol=1e-6, rtol=0)


def test_a_closure_and_a_model_without_frames() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = ModelOptimizer(model, lr=1e-3)
    x = torch.ones(4, 3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return float(loss.detach())

    losses = [optimizer.step(closure) or 0.0 for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="empty parameter list"):
        ModelOptimizer(model)


def test_a_later_group_is_refused() -> None:
    """It would belong to neither optimiser, and would never be trained."""
    layer = grmoe.MoE(8, 4, 2)
    layer.experts.requires_grad_(False)
    optimizer = ModelOptimizer(layer)
    layer.experts.requires_grad_(True)
    with pytest.raises(ValueError, match="takes no more groups"):
        optimizer.add_param_group({"params": list(layer.experts.parameters())})
    copied = pickle.loads(pickle.dumps(optimizer))
    with pytest.raises(ValueError, match="takes no more groups"):
        copied.add_param_group({"params": list(layer.experts.parameters())})


def test_frames_of_each_size_have_their_own_rate() -> None:
    model = nn.ModuleList([grmoe.MoE(16, 8, 4), grmoe.MoE(64, 8, 4)])
    found = {
        tuple(p.shape): group["lr"] for group in optimizer_groups(model, lr=0.01)[1] for p in group["params"]
    }
    assert found == {(4, 16, 4): pytest.approx(0.08), (4, 64, 16): pytest.approx(0.32)}
    one = optimizer_groups(model, lr=0.01, frames_lr=0.5)[1]
    assert [(len(group["params"]), group["lr"]) for group in one] == [(2, 0.5)]
