"""The leading term: against a loop over tokens, what is counted for it, and the same step however it is divided.

Legend: T tokens, N experts, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grmoe.parallel.world import ParallelConfig, start
from grmoe.routing import (
    GrassmannRouter,
    HashRouter,
    Router,
    SoftmaxRouter,
    SoftMoERouter,
    SwitchRouter,
    leading_loss,
    routers,
    set_leading,
    uncounted,
    update_priors,
)
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import checkpoints_of, saved_config
from grmoe.runs.open import open_model
from grmoe.train.loop import train
from grmoe.train.setup import Trainer, build_trainer
from grmoe.train.step import resolve, train_step

Settings = Callable[..., TrainConfig]
SHARES = (0.5, 0.0, 0.1, 0.15, 0.25)


def share_of(router: nn.Module) -> Tensor:
    assert isinstance(router, Router)
    assert router.leading_share is not None
    return router.leading_share


def leads_of(router: Router) -> Tensor:
    assert router.counter.leading_sums is not None
    return router.counter.leading_sums


# -- the formula -----------------------------------------------------------------------------------------------


def test_the_term_against_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    router = GrassmannRouter(12, 5, 3).double().train()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    plain = router(x).aux_loss
    set_leading(router, 0.25)
    assert share_of(router).tolist() == [0.2] * 5
    assert router(x).aux_loss.item() == pytest.approx(0.25, rel=1e-12)  # uniform shares: the weight
    share_of(router).copy_(torch.tensor(SHARES, dtype=torch.float64))
    routing = router(x)
    gates = routing.probs.reshape(-1, 5).tolist()
    wanted = sum(5 * s * g for gate in gates for s, g in zip(SHARES, gate, strict=True)) / len(gates)
    assert plain.item() == 0.0
    assert routing.aux_loss.item() == pytest.approx(0.25 * wanted, rel=1e-12)
    assert float(router.eval()(x).aux_loss) == 0.0  # a term of training alone
    set_leading(router.train(), 0.0)
    assert router.leading_share is router.counter.leading_sums is None
    assert float(router(x).aux_loss) == 0.0


def test_the_gradient_lowers_the_logits_of_experts_that_lead_too_often() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    share_N = torch.tensor(SHARES, dtype=torch.float64)
    leading_loss(logits.softmax(-1), share_N).backward()
    p = logits.detach().softmax(-1)
    wanted = 5 * p * (share_N - (p * share_N).sum(-1, keepdim=True)) / 6
    torch.testing.assert_close(logits.grad, wanted, rtol=1e-12, atol=1e-15)
    assert logits.grad is not None
    assert bool((logits.grad[:, 0] > 0).all())  # half of the tokens: a step of descent lowers its logits
    assert bool((logits.grad[:, 1] < 0).all())  # none
    logits.grad = None
    leading_loss(logits.softmax(-1), torch.full_like(share_N, 0.2)).backward()
    torch.testing.assert_close(logits.grad, torch.zeros_like(p), rtol=0, atol=1e-15)


def test_parts_add_up() -> None:
    probs = torch.randn(12, 5, dtype=torch.float64).softmax(-1)
    share_N = torch.tensor(SHARES, dtype=torch.float64)
    parts = [leading_loss(part, share_N) for part in probs.split(3)]
    torch.testing.assert_close(torch.stack(parts).mean(), leading_loss(probs, share_N), rtol=1e-14, atol=0)
    assert float(leading_loss(probs[:0], share_N)) == 0.0


def test_leads_become_even() -> None:
    """A linear gate without a prior, with tokens that almost all prefer one expert."""

    def spread(weight: float) -> float:
        generator = torch.Generator().manual_seed(0)
        router = SoftmaxRouter(8, 4, top_k=2, generator=generator).train()
        x_TD = torch.randn(256, 8, generator=generator)
        x_TD[:, 0] += 2.0
        with torch.no_grad():
            router.weight.mul_(0.3)
            router.weight[0, 0] = 1.0
        set_leading(router, weight)
        optimizer = torch.optim.SGD(router.parameters(), lr=5.0)
        for _ in range(300 if weight else 0):
            optimizer.zero_grad()
            router(x_TD).aux_loss.backward()
            optimizer.step()
            update_priors([router], 0.0)
        router.reset_metrics()
        router.eval()(x_TD)
        load = torch.tensor(router.read_metrics().leading_load)
        return float(load.std(correction=0) / load.mean())

    assert spread(0.0) > 1.0
    assert spread(0.1) < 0.3


# -- what is counted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("balance", [False, True])
def test_leads_of_a_step_become_shares(balance: bool) -> None:
    torch.manual_seed(2)
    router = SoftmaxRouter(6, 4, top_k=2, balance=balance).train()
    set_leading(router, 0.1)
    batches = [torch.randn(3, 9, 6), torch.randn(5, 6)]
    batches[0][1, 2, 3] = float("nan")
    found = [router(x).probs.reshape(-1, 4) for x in batches]
    with uncounted(router):
        router(torch.randn(7, 6))
    router.eval()(torch.randn(7, 6))
    leading = torch.cat(found).detach()
    leading = leading[leading.isfinite().all(-1)].argmax(-1)
    counts = torch.bincount(leading, minlength=4).float()
    assert counts.sum() == 31
    assert torch.equal(leads_of(router), counts)
    update_priors([router], 0.1, torch.tensor(1.0))  # a bad step: its counts are gone, the shares stay
    assert share_of(router).tolist() == [0.25] * 4
    assert not leads_of(router).any()
    for update in (lambda: update_priors([router], 0.1), lambda: router.update_prior(0.1)):
        set_leading(router, 0.1)
        leads_of(router).copy_(counts)
        update()
        torch.testing.assert_close(share_of(router), counts / 31)
        update()  # no tokens since
        torch.testing.assert_close(share_of(router), counts / 31)


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()  # other tests may have compiled a router in this process
    torch.manual_seed(3)
    router = GrassmannRouter(8, 4, 2).train()
    set_leading(router, 0.1)
    compiled, x = torch.compile(router, fullgraph=True, backend="eager"), torch.randn(2, 5, 8)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            torch.testing.assert_close(compiled(x).aux_loss, router(x).aux_loss)
            assert float(leads_of(router).sum()) == 20
            update_priors([router], 0.1)
    assert float(share_of(router).sum()) == pytest.approx(1)


# -- training --------------------------------------------------------------------------------------------------


def three_steps(config: TrainConfig) -> tuple[Trainer, list[dict[str, float]]]:
    trainer = build_trainer(config, start(ParallelConfig(), "cpu"))
    trainer.model.double()
    batches = trainer.data.batches(trainer.rows, trainer.length, 0, 0, 1)
    found = [vars(resolve(trainer, train_step(trainer, step, next(batches)), step)) for step in range(3)]
    return trainer, found


def test_steps_are_the_same_however_they_are_divided(settings: Settings) -> None:
    """Gradient accumulation and activation checkpointing; several processes are in `test_train_parallel`."""
    routing = {"routing": {"leading_weight": 0.5}}
    trainer, whole = three_steps(settings(**routing))
    assert whole[0]["router_loss"] == pytest.approx(0.5)
    assert whole[2]["router_loss"] != pytest.approx(0.5, abs=1e-6)
    shares = [share_of(router) for router in routers(trainer.model)]
    changes: list[dict[str, Any]] = [{"data": {"micro_batch_size": 2}}, {"activation_checkpointing": True}]
    for change in changes:
        other, found = three_steps(settings(**routing, **change))
        for ours, wanted in zip(found, whole, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-6)  # what is logged is fp32
        torch.testing.assert_close([share_of(router) for router in routers(other.model)], shares)


def test_a_checkpoint_has_the_shares_and_a_model_does_not(settings: Settings) -> None:
    config = settings(steps=2)
    train(config)
    run = Path(config.out)
    checkpoints = checkpoints_of(run, config)
    (checkpoint,) = checkpoints.all()
    names = [name for name in checkpoints.tensors(checkpoint) if "leading_share" in name]
    assert len(names) == 1
    opened = open_model(run).model
    assert [router.leading_share for router in routers(opened)] == [None]
    trainer = build_trainer(settings(start_from=config.out), start(ParallelConfig(), "cpu"))
    assert trainer.model.state_dict().keys() == opened.state_dict().keys()  # what `save_pretrained` writes


def test_a_run_without_the_key_has_no_term(settings: Settings) -> None:
    """Runs of versions before it, with random budgets: they open, and go on without it."""
    config = settings(steps=2, checkpoint={"every": 1}, routing={"leading_weight": 0.0})
    train(config)
    path = Path(config.out) / "config.yaml"
    text = path.read_text()
    assert "leading_weight: 0.0\n" in text
    path.write_text(text.replace("  leading_weight: 0.0\n", ""))
    assert saved_config(path.parent).routing.leading_weight == 0.0
    open_model(path.parent)
    train(settings(steps=3, checkpoint={"every": 1}), resume=True)
    with pytest.raises(ValueError, match=r"cannot change on resume: .*routing\.leading_weight"):
        train(settings(steps=4, routing={"leading_weight": 0.1}), resume=True)


def test_wrong_settings_are_refused(settings: Settings) -> None:
    with pytest.raises(ValueError, match="needs a gate that learns, got a HashRouter"):
        set_leading(HashRouter(8, 4), 0.1)
    for router in (SwitchRouter(8, 4), SoftMoERouter(8, 4)):
        with pytest.raises(ValueError, match=rf"a selection chooses for, got a {type(router).__name__}"):
            set_leading(router, 0.1)
        set_leading(router, 0.0)
    with pytest.raises(ValueError, match=r"leading_weight must be .* got -1"):
        settings(routing={"leading_weight": -1.0})
    for name in ("hash", "switch"):
        with pytest.raises(ValueError, match=rf"routing.leading_weight must be 0 with the router '{name}'"):
            settings(model={"router": name}, routing={"leading_weight": 0.1}).resolved()
    assert settings(elastic={"unit": "off"}).resolved().routing.leading_weight == 0.0
    assert settings(elastic={"unit": "step"}).resolved().routing.leading_weight == 0.01
    assert (
        settings(elastic={"unit": "off"}, routing={"leading_weight": 0.1}).resolved().routing.leading_weight
        == 0.1
    )
