"""Validation: every token once, by domain, whatever the batches."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from grmoe.parallel.world import start
from grmoe.runs.config import TrainConfig
from grmoe.train.setup import Trainer, build_trainer
from grmoe.train.validate import validate

Settings = Callable[..., TrainConfig]


def trainer(config: TrainConfig) -> Trainer:
    return build_trainer(config, start(config.parallel, "cpu"))


def test_the_loss_is_the_mean_over_tokens_of_each_domain(settings: Settings) -> None:
    """Against windows one at a time; batches change the order of sums, so fp32 agrees to about 1e-6."""
    s = trainer(settings(validation={"tokens": 10**9, "batch_size": 3}))
    s.validation.domain_tokens = {"ones": 1, "threes": 2}
    found = validate(s)
    assert list(found.domains) == ["threes", "ones"]  # the largest first
    total = tokens = 0.0
    for domain in ("ones", "threes"):
        loss = count = 0.0
        for rows in s.validation.windows(s.length, 1, domain):
            with torch.no_grad():
                logits = s.model.eval()(rows[:, :-1]).logits
            each = torch.nn.functional.cross_entropy(logits[0].double(), rows[0, 1:], reduction="sum")
            loss, count = loss + float(each), count + rows.shape[1] - 1
        assert found.domains[domain] == pytest.approx(loss / count, rel=1e-6)
        total, tokens = total + loss, tokens + count
    assert found.loss == pytest.approx(total / tokens, rel=1e-6)
    assert found.routing[0].tokens == tokens


def test_the_routers_losses_are_no_part_of_it(settings: Settings) -> None:
    """Also where the configuration asks for router logits, with which the model's loss includes them."""
    model = {"router": "switch", "router_rank": None}
    plain = trainer(settings(model=model))
    asked = trainer(settings(model=model | {"output_router_logits": True}))
    assert asked.model.config.output_router_logits
    assert validate(asked).loss == validate(plain).loss


def test_it_is_at_the_models_own_dial_and_leaves_no_trace(settings: Settings) -> None:
    s = trainer(settings(model={"alpha": 3.0}))
    with torch.no_grad():
        for router in (m for m in s.model.modules() if hasattr(m, "log_prior")):
            router.alpha = 0.1
    found = validate(s)
    assert s.model.alpha == [3.0]
    assert s.model.training
    assert s.model.routing_metrics()[0].tokens == 0
    assert all(not router.prior_sums.any() for router in s.model.modules() if hasattr(router, "prior_sums"))
    assert found.routing[0].entropy < 1.38  # below that of the uniform gate over 4 experts, log 4


@pytest.mark.parametrize("batch_size", [1, 2, 3, None])
def test_a_limit_of_tokens_is_kept(settings: Settings, batch_size: int | None) -> None:
    """And the text is the same whatever the batch: two windows of 32 tokens from each of two domains."""
    s = trainer(settings(validation={"tokens": 64, "batch_size": batch_size}))
    assert validate(s).routing[0].tokens == 2 * 64


def test_windows_of_context_alone_have_no_loss(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """It divided by zero, and all steps since the last checkpoint were lost."""
    s = trainer(settings())
    windows = s.validation.windows
    monkeypatch.setattr(s.validation, "windows", lambda *args: (~rows for rows in windows(*args)))
    found = validate(s)
    assert math.isnan(found.loss)
    assert found.domains == {}


def test_no_logits_are_kept(settings: Settings) -> None:
    """In full they are what needs most memory: a batch that trains must not end the run when it is validated."""
    s = trainer(settings())
    s.model.lm_head.register_forward_hook(lambda *_: pytest.fail("the logits exist in full"))
    validate(s)
