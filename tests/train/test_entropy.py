"""The entropy term: against a loop over tokens, its limits, and the same step however it is divided."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from grmoe.parallel.world import ParallelConfig, start
from grmoe.routing import EntropyTerm, GrassmannRouter, HashRouter, gate_entropy, set_entropy
from grmoe.runs.config import TrainConfig
from grmoe.train.setup import build_trainer
from grmoe.train.step import StepResult, resolve, train_step

Settings = Callable[..., TrainConfig]


def test_the_term_is_the_mean_over_tokens_of_the_square() -> None:
    torch.manual_seed(0)
    router = GrassmannRouter(12, 5, 3).double().train()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    plain = router(x).aux_loss
    set_entropy(router, EntropyTerm(0.25, 0.4))
    routing = router(x)
    squares = []
    for gate in routing.probs.reshape(-1, 5).tolist():
        entropy = -sum(g * math.log(g) for g in gate)
        squares.append((entropy - 0.4 * math.log(5)) ** 2)
    assert plain.item() == 0.0
    assert routing.aux_loss.item() == pytest.approx(0.25 * sum(squares) / len(squares), rel=1e-12)
    assert float(router.eval()(x).aux_loss) == 0.0  # a term of training alone


def test_gates_of_zero_and_one_have_a_finite_gradient() -> None:
    logits = torch.tensor([[500.0, 0.0, -500.0], [0.0, 0.0, 0.0]], requires_grad=True)
    assert gate_entropy(logits).tolist() == pytest.approx([0.0, math.log(3)])
    EntropyTerm(1.0, 0.5)(logits).backward()
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())
    assert float(EntropyTerm(1.0, 0.5)(torch.zeros(0, 3))) == 0.0


@pytest.mark.parametrize("target", [0.0, 0.35, 1.0])
def test_gates_reach_the_target(target: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 4, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        EntropyTerm(1.0, target)(logits).backward()
        optimizer.step()
    assert gate_entropy(logits).tolist() == pytest.approx([target * math.log(4)] * 6, abs=0.05)


def test_wrong_settings_are_refused(settings: Settings) -> None:
    with pytest.raises(ValueError, match=r"target must be a share of log N, at most 1, got 1\.2"):
        EntropyTerm(0.1, 1.2)
    with pytest.raises(ValueError, match=r"entropy_target must be a share of log N, at most 1, got 2"):
        settings(routing={"entropy_target": 2.0})
    with pytest.raises(ValueError, match="needs a gate that learns, got a HashRouter"):
        set_entropy(HashRouter(8, 4), EntropyTerm(0.1, 0.5))
    with pytest.raises(ValueError, match=r"routing.entropy_weight must be 0 with the router 'hash'"):
        settings(model={"router": "hash"}, routing={"entropy_weight": 0.1}).resolved()


def test_a_step_is_the_same_however_it_is_divided(settings: Settings) -> None:
    """Gradient accumulation and activation checkpointing; several processes are in `test_train_parallel`."""

    def first_step(**changes: object) -> StepResult:
        config = settings(
            routing={"entropy_weight": 0.5, "entropy_target": 0.3}, elastic={"unit": "off"}, **changes
        )
        trainer = build_trainer(config, start(ParallelConfig(), "cpu"))
        trainer.model.double()
        batch = next(trainer.data.batches(trainer.rows, trainer.length, 0, 0, 1))
        return resolve(trainer, train_step(trainer, 0, batch), 0)

    whole = first_step()
    assert whole.router_loss > 0.05
    assert vars(first_step(data={"micro_batch_size": 2})) == pytest.approx(vars(whole), rel=1e-9)
    assert vars(first_step(activation_checkpointing=True)) == pytest.approx(vars(whole), rel=1e-9)
