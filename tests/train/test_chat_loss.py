"""Training on conversations: the loss is the mean over all targets of a step, whatever its micro-batches and processes.

Before, it was a mean over micro-batches of means, and a target counted more where there were few beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Processes
from torch import Tensor
from torch.nn.functional import cross_entropy

from grmoe.parallel.world import ParallelConfig, World, start, stop
from grmoe.runs.config import TrainConfig
from grmoe.train.objective import target_weights
from grmoe.train.passes import forward_passes
from grmoe.train.setup import Trainer, build_trainer
from grmoe.train.step import resolve, train_step

Settings = Callable[..., TrainConfig]
# The z-loss is a mean over tokens, so it is the same for all micro-batches. A loss of loads is not.
ROUTER: dict[str, Any] = {
    "router": "softmax", "router_options": {"z_loss": 0.5}, "router_aux_loss_coef": 0.7, "num_hidden_layers": 4,
}  # fmt: skip


def as_conversation(batch_BS: Tensor) -> Tensor:
    """Most tokens of each row become context, and in every fourth row all of them."""
    keep_B = torch.arange(len(batch_BS)) % 4 * 3
    place_S = torch.arange(batch_BS.shape[1])
    return torch.where(place_S >= keep_B[:, None], ~batch_BS, batch_BS)


def chat_trainer(config: TrainConfig, world: World | None = None) -> Trainer:
    trainer = build_trainer(config, world or start(ParallelConfig(), "cpu"))
    trainer.masked = True
    return trainer


def gradients(settings: Settings, micro: int, batch_BS: Tensor, **more: Any) -> dict[str, Tensor]:
    trainer = chat_trainer(settings(model=ROUTER, data={"micro_batch_size": micro}, **more))
    trainer.model.double()
    logged = torch.zeros(3, dtype=torch.float64)
    for loss, parts, _ in forward_passes(trainer, trainer.model, 0, batch_BS):
        loss.backward()
        logged += 0 if parts is None else torch.stack(parts)
    found = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return found | {"logged": logged}


@pytest.fixture
def batch_BS(settings: Settings) -> Tensor:
    trainer = chat_trainer(settings())
    rows: Tensor = next(trainer.data.batches(trainer.rows, trainer.length, 3))
    return as_conversation(rows)


@pytest.mark.parametrize(
    "more", [{}, {"elastic": {"distill": 2.0, "full_share": 0.0}}], ids=["", "distilled"]
)
def test_micro_batches_give_the_gradient_of_the_whole(
    settings: Settings, batch_BS: Tensor, more: dict[str, Any]
) -> None:
    whole = gradients(settings, 8, batch_BS, **more)
    for micro in (1, 2, 4):
        parts = gradients(settings, micro, batch_BS, **more)
        assert parts.keys() == whole.keys()
        for name, gradient in whole.items():
            assert (parts[name] - gradient).abs().max() < 1e-12, name


def test_context_is_not_distilled(settings: Settings, batch_BS: Tensor) -> None:
    """The divergence is a mean over targets: other tokens after the last target of a row change nothing."""
    more: dict[str, Any] = {"elastic": {"distill": 2.0, "full_share": 0.0}}
    place_S = torch.arange(batch_BS.shape[1])
    last_B = torch.where(batch_BS >= 0, place_S, 0).amax(1)
    other_BS = torch.where(place_S > last_B[:, None], ~torch.ones_like(batch_BS), batch_BS)
    assert not torch.equal(other_BS, batch_BS)
    a, b = (gradients(settings, 8, rows, **more)["logged"] for rows in (batch_BS, other_BS))
    assert float(a[2]) > 0
    assert torch.allclose(a[[0, 2]], b[[0, 2]], rtol=1e-12)


def test_the_gradient_is_the_one_by_hand(settings: Settings, batch_BS: Tensor) -> None:
    """From logits and router logits, in plain torch."""
    found = gradients(settings, 2, batch_BS, elastic={"unit": "off"})
    model = chat_trainer(settings(model=ROUTER, elastic={"unit": "off"})).model.double()
    ids_BS = torch.where(batch_BS < 0, ~batch_BS, batch_BS)
    output = model(input_ids=ids_BS[:, :-1], output_router_logits=True)
    targets = torch.where(batch_BS < 0, -100, batch_BS)[:, 1:].flatten()
    language = cross_entropy(output.logits.flatten(0, 1), targets, ignore_index=-100)
    routers = torch.stack([0.5 * r_TN.logsumexp(-1).square().mean() for r_TN in output.router_logits]).sum()
    (language + 0.7 * routers).backward()
    assert found["logged"][:2].tolist() == pytest.approx([language.item(), 0.7 * routers.item()], rel=1e-12)
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert (found[name] - p.grad).abs().max() < 1e-12, name


def test_a_step_without_targets_has_no_loss(settings: Settings, batch_BS: Tensor) -> None:
    context_BS = torch.where(batch_BS >= 0, ~batch_BS, batch_BS)
    found = gradients(settings, 2, context_BS, elastic={"distill": 2.0, "full_share": 0.0})
    # No cross-entropy, and nothing to learn from the full budget.
    assert (found["logged"][0], found["logged"][2]) == (0, 0)
    assert not found["model.norm.weight"].any()
    weights = target_weights(context_BS.split(2), World(0, 1, 0, torch.device("cpu"), None))
    assert [float(w) for w in weights] == [0.0] * 4


def chat_steps(config: TrainConfig) -> list[dict[str, float]]:
    world = start(config.parallel, "cpu")
    trainer = chat_trainer(config, world)
    batches = trainer.data.batches(config.data.batch_size, trainer.length, config.seed)
    found = []
    for step in range(2):
        own = as_conversation(next(batches)).split(trainer.rows)[world.rank]
        found.append(vars(resolve(trainer, train_step(trainer, step, own), step)))
    stop()
    return found


def test_two_processes_take_the_steps_of_one(settings: Settings) -> None:
    options: dict[str, Any] = {"model": ROUTER, "data": {"micro_batch_size": 2}}
    alone = chat_steps(settings(**options))
    for answer in Processes(2, chat_steps, settings(**options, parallel={"fsdp": 2})).answers():
        for got, want in zip(answer, alone, strict=True):
            assert got == pytest.approx(want, rel=1e-5)
