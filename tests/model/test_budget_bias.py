"""`bias` of the curve's points: budgets choose experts by gate and bias, the trained setting does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.routing import routers

Build = Callable[..., GrmoeForCausalLM]

CURVE: list[dict[str, Any]] = [
    {"experts_per_token": 1.0, "tau": 0.2, "alpha": 1.0, "cap": 2},
    {"experts_per_token": 2.0, "tau": 1.0, "alpha": 1.0, "cap": 2},
]


def biased(model: GrmoeForCausalLM) -> list[dict[str, Any]]:
    sizes = len(model.config.moe_layers), model.config.num_experts
    bias = torch.linspace(-3.0, 3.0, sizes[0] * sizes[1]).view(sizes)
    return [CURVE[0] | {"bias": bias.tolist()}, CURVE[1] | {"bias": (0.5 * bias).tolist()}]


@pytest.fixture
def model(build: Build) -> GrmoeForCausalLM:
    return build(budget_curve=biased(build()))


def test_a_budget_has_a_bias_and_the_trained_setting_has_none(
    model: GrmoeForCausalLM, build: Build, ids: torch.Tensor
) -> None:
    plain = build(budget_curve=CURVE)
    assert torch.equal(model(ids).logits, plain(ids).logits)  # as trained
    for budget in (1.0, 1.4, 2.0):
        model.set_budget(budget)
        plain.set_budget(budget)
        share = 1.5 - 0.5 * budget  # linear between the points
        for router, full in zip(routers(model), biased(model)[0]["bias"], strict=True):
            torch.testing.assert_close(router.budget.bias, share * torch.tensor(full))
        assert not torch.equal(model(ids).logits, plain(ids).logits)
    model.set_budget(None)
    plain.set_budget(None)
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_saved_and_loaded(model: GrmoeForCausalLM, ids: torch.Tensor, tmp_path: Path) -> None:
    model.set_budget(1.4)
    model.save_pretrained(tmp_path)
    again = GrmoeForCausalLM.from_pretrained(tmp_path)
    assert again.config.budget_curve == model.config.budget_curve
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    for mine, other in zip(routers(model), routers(again), strict=True):
        assert other.budget.biased
        assert torch.equal(mine.budget.bias, other.budget.bias)


def test_turning_the_budget_compiles_nothing_again(model: GrmoeForCausalLM, ids: torch.Tensor) -> None:
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(model.model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for budget in (None, 1.0, 2.0, None):
            model.set_budget(budget)
            found = compiled(ids, use_cache=False).last_hidden_state
            torch.testing.assert_close(found, model.model(ids, use_cache=False).last_hidden_state)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ([[1.0] * 3] * 2, r"budget_curve\[0\].bias must be 2 lists of 4 numbers"),
        ([[1.0] * 4], r"budget_curve\[0\].bias must be 2 lists of 4 numbers"),
        (1.0, r"budget_curve\[0\].bias must be 2 lists of 4 numbers"),
        ([[1.0] * 4, [1.0, float("nan"), 1.0, 1.0]], r"budget_curve\[0\].bias must be a finite number"),
    ],
)
def test_what_is_wrong_is_said(bias: Any, message: str) -> None:
    sizes = {"num_hidden_layers": 2, "moe_every": 1, "num_experts": 4}
    with pytest.raises(ValueError, match=message):
        GrmoeConfig(**sizes, budget_curve=[CURVE[0] | {"bias": bias}, CURVE[1]])
