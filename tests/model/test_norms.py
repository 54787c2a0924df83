"""`expert_norms` of a configuration: budgets choose experts by gate × norm, the trained setting does not."""

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


def norms_of(model: GrmoeForCausalLM) -> list[list[float]]:
    sizes = len(model.config.moe_layers), model.config.num_experts
    return torch.linspace(0.05, 9.0, sizes[0] * sizes[1]).view(sizes).tolist()


@pytest.fixture
def model(build: Build) -> GrmoeForCausalLM:
    return build(budget_curve=CURVE, expert_norms=norms_of(build()))


def test_a_budget_ranks_by_norm_and_the_trained_setting_does_not(
    model: GrmoeForCausalLM, build: Build, ids: torch.Tensor
) -> None:
    plain = build(budget_curve=CURVE)
    assert torch.equal(model(ids).logits, plain(ids).logits)  # as trained
    for budget in (1.0, 1.4, 2.0):
        model.set_budget(budget)
        plain.set_budget(budget)
        assert [float(r.budget.by_norm) for r in routers(model)] == [1.0, 1.0]
        assert not torch.equal(model(ids).logits, plain(ids).logits)
    model.set_budget(None)
    plain.set_budget(None)
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_saved_and_loaded(model: GrmoeForCausalLM, ids: torch.Tensor, tmp_path: Path) -> None:
    model.set_budget(1.4)
    model.save_pretrained(tmp_path)
    again = GrmoeForCausalLM.from_pretrained(tmp_path)
    assert again.config.expert_norms == model.config.expert_norms
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    for mine, other in zip(routers(model), routers(again), strict=True):
        assert torch.equal(mine.budget.log_norm_N, other.budget.log_norm_N)
        assert float(other.budget.by_norm) == 1.0


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
    ("fields", "message"),
    [
        ({"expert_norms": [[1.0] * 4] * 2}, "expert_norms must come with a budget_curve"),
        ({"expert_norms": [[1.0] * 3] * 2}, r"expert_norms must be 2 lists of 4 numbers"),
        ({"expert_norms": [[1.0] * 4]}, r"expert_norms must be 2 lists of 4 numbers"),
        (
            {"expert_norms": [[1.0] * 4, [1.0, 0.0, 1.0, 1.0]]},
            "expert_norms must be a finite number > 0, got 0",
        ),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], message: str) -> None:
    sizes = {"num_hidden_layers": 2, "moe_every": 1, "num_experts": 4}
    with pytest.raises(ValueError, match=message):
        GrmoeConfig(**sizes, **fields)
