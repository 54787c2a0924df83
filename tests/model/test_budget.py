"""`set_budget`: one number sets τ, α and cap of every layer, survives saving, and compiles nothing again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM

from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.routing import Dense, Mass, Threshold, TopK, routers
from grmoe.routing.selection import NO_LIMIT
from grmoe.serve.batching import set_numbers

Build = Callable[..., GrmoeForCausalLM]

CURVE: list[dict[str, Any]] = [
    {"experts_per_token": 1.0, "tau": 0.2, "alpha": 1.0, "cap": 2},
    {"experts_per_token": 1.5, "tau": [0.3, 0.4], "alpha": [1.0, 4.0], "cap": 2},
    {"experts_per_token": 2.0, "tau": 1.0, "alpha": 1.0, "cap": 2},
]
WIDER = [*CURVE[:1], {"experts_per_token": 3.0, "tau": 1.0, "alpha": 1.0, "cap": 3}]


def in_use(model: GrmoeForCausalLM) -> list[tuple[float, float, int]]:
    return [(round(float(r.budget.tau), 6), round(r.alpha, 6), r.cap) for r in routers(model)]


TRAINED = [(NO_LIMIT, 1.0, 2)] * 2
HALF = [(0.3, 1.0, 2), (0.4, 4.0, 2)]


def test_one_number_sets_every_layer_and_none_puts_it_back(build: Build, ids: torch.Tensor) -> None:
    model = build(budget_curve=CURVE)
    assert model.budget is None
    before = model(ids).logits
    model.set_budget(1.5)
    assert (model.budget, model.config.budget, in_use(model)) == (1.5, 1.5, HALF)
    assert not torch.equal(model(ids).logits, before)
    # The configuration's own setting stays the trained one.
    assert (model.config.alpha, model.config.num_experts_per_tok, model.config.selection) == (1.0, 2, "topk")
    model.set_budget(np.float32(1.25))
    assert in_use(model) == [(0.25, 1.0, 2), (0.3, 2.0, 2)]
    model.set_budget(2)
    assert in_use(model) == TRAINED
    assert torch.equal(model(ids).logits, before)
    model.set_budget(1.0)
    model.reset_routing_metrics()
    model(ids)
    assert [m.experts_per_token for m in model.routing_metrics()] == [1.0, 1.0]
    model.set_budget(None)
    assert (model.budget, in_use(model)) == (None, TRAINED)
    assert torch.equal(model(ids).logits, before)


def test_training_at_a_budget_warns(build: Build) -> None:
    """A dialled model that someone trains on would otherwise train few of its experts, without a word."""
    model = build(budget_curve=CURVE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()
        model.set_budget(1.5)
        model.eval()
    with pytest.warns(UserWarning, match=r"trains at its budget.*set_budget\(None\)"):
        assert model.train() is model
    assert model.training


@pytest.mark.parametrize(
    ("fields", "budget", "message"),
    [
        ({"budget_curve": CURVE}, 2.5, "budget must be from 1 to 2 experts per token, the calibrated range, got 2.5"),
        ({"budget_curve": CURVE}, 0.5, "from 1 to 2 experts per token"),
        ({"budget_curve": CURVE}, "many", "budget must be a finite number > 0, got 'many'"),
        ({"budget_curve": CURVE}, float("nan"), "budget must be a finite number > 0, got nan"),
        ({}, 1.3, "budget 1.3 is not calibrated.*Run `grmoe dial` first"),
        ({"selection": "mass"}, 2.0, "Run `grmoe dial` first"),
        ({"router": "switch"}, 1.0, "router 'switch' selects its experts by itself"),
    ],
)  # fmt: skip
def test_a_budget_that_cannot_be_is_refused_and_changes_nothing(
    build: Build, fields: dict[str, Any], budget: Any, message: str
) -> None:
    model = build(**fields)
    before = in_use(model)
    with pytest.raises(ValueError, match=message):
        model.set_budget(budget)
    assert (model.budget, in_use(model)) == (None, before)
    if isinstance(budget, float):
        with pytest.raises(ValueError, match=message):
            GrmoeConfig(**(model.config.to_diff_dict() | {"budget": budget}))


def test_plain_top_k_has_its_own_budget_without_a_curve(build: Build) -> None:
    model = build()
    model.set_budget(2)
    assert (model.budget, in_use(model)) == (2.0, TRAINED)


def test_turning_the_budget_compiles_nothing_again(build: Build, ids: torch.Tensor) -> None:
    """Not even for budgets above the trained one: the room is made when the model is built."""
    torch.compiler.reset()
    model = build(budget_curve=WIDER, num_hidden_layers=2)
    counter = CompileCounter()
    compiled = torch.compile(model.model, backend=counter, fullgraph=True)
    seen = []
    with torch.no_grad():
        for budget in (None, 1.0, 1.7, 2.4, 3.0, None):
            model.set_budget(budget)
            found = compiled(ids, use_cache=False).last_hidden_state
            torch.testing.assert_close(found, model.model(ids, use_cache=False).last_hidden_state)
            seen.append(found)
    assert counter.frame_count == 1
    assert torch.equal(seen[0], seen[-1])
    assert all(not torch.equal(seen[0], other) for other in seen[1:-1])


def test_budgets_above_the_trained_one_have_room(build: Build, ids: torch.Tensor) -> None:
    model = build(budget_curve=WIDER)
    assert {r.max_experts() for r in routers(model)} == {3}
    assert torch.equal(model(ids).logits, build()(ids).logits)  # as trained, the same top-2
    model.set_budget(3.0)
    assert torch.equal(model(ids).logits, build(num_experts_per_tok=3)(ids).logits)
    assert model.config.num_experts_per_tok == 2


def test_saved_and_loaded(build: Build, ids: torch.Tensor, tmp_path: Path) -> None:
    model = build(budget_curve=CURVE)
    model.set_budget(1.5)
    model.save_pretrained(tmp_path)
    load = GrmoeForCausalLM.from_pretrained
    again = load(tmp_path)
    assert (again.budget, again.config.budget_curve, in_use(again)) == (1.5, CURVE, HALF)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert again.config.to_diff_dict() | {"_name_or_path": ""} == model.config.to_diff_dict() | {
        "_name_or_path": ""
    }
    assert in_use(load(tmp_path, budget=2.0)) == TRAINED
    assert (load(tmp_path, budget=None).budget, in_use(load(tmp_path, budget=None))) == (None, TRAINED)
    with pytest.raises(ValueError, match="from 1 to 2 experts per token"):
        load(tmp_path, budget=7.0)


def test_alpha_ends_a_budget(build: Build, tmp_path: Path) -> None:
    """A setting is a budget, or α with the trained selection: never half of each."""
    model = build(budget_curve=CURVE, budget=1.5)
    model.save_pretrained(tmp_path)
    sharp = [(NO_LIMIT, 2.0, 2)] * 2
    model.set_alpha(2.0)
    assert (model.budget, in_use(model)) == (None, sharp)
    loaded = GrmoeForCausalLM.from_pretrained(tmp_path, alpha=2.0)
    assert (loaded.budget, in_use(loaded)) == (None, sharp)
    assert GrmoeForCausalLM.from_pretrained(tmp_path, alpha=1.0).budget is None  # even to what it is already
    config = GrmoeConfig.from_pretrained(tmp_path)
    config.update({"budget": 1.0})  # how vLLM applies --hf-overrides
    assert in_use(GrmoeForCausalLM(config)) == [(0.2, 1.0, 2)] * 2
    config.update({"selection": "dense", "num_experts_per_tok": 4})
    assert config.budget is None


@pytest.mark.parametrize(
    "other", [{"alpha": 2.0}, {"selection": "mass"}, {"selection_tau": 0.3}, {"num_experts_per_tok": 1}]
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_budget_beside_another_setting_is_refused(
    build: Build, tmp_path: Path, other: dict[str, Any], turned: bool
) -> None:
    """The last one named would win: half of the settings would be lost without a word."""
    build(budget_curve=CURVE, budget=1.5).save_pretrained(tmp_path)
    both = {"budget": 1.0} | other
    both = dict(reversed(both.items())) if turned else both
    message = f"give budget or {next(iter(other))}, not both"
    for load in (
        GrmoeForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained, GrmoeConfig.from_pretrained
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            load(tmp_path, **both)
    config = GrmoeConfig.from_pretrained(tmp_path)
    before = config.to_dict()
    with pytest.raises(ValueError, match=message):
        config.update(both)
    assert config.to_dict() == before
    config.update({"budget": None} | other)  # the end of a budget is no second setting
    assert config.budget is None


def test_a_saved_budget_stands_beside_the_trained_setting(build: Build, tmp_path: Path) -> None:
    model = build(budget_curve=CURVE, budget=1.5, alpha=3.0, num_experts_per_tok=1)
    model.save_pretrained(tmp_path)
    for _ in range(2):  # and again, resaved
        loaded = GrmoeForCausalLM.from_pretrained(tmp_path)
        config = loaded.config
        assert (config.budget, config.alpha, config.num_experts_per_tok) == (1.5, 3.0, 1)
        assert in_use(loaded) == HALF
        loaded.save_pretrained(tmp_path)
    assert GrmoeConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize("budget", [1.5, None])
@pytest.mark.parametrize("in_use", [1.0, None])
def test_a_whole_configuration_is_taken_over(
    build: Build, budget: float | None, in_use: float | None
) -> None:
    """It has a budget beside the trained setting, in any order: as a dict, and sorted as in config.json."""
    other = build(budget_curve=CURVE, budget=budget, alpha=3.0, num_experts_per_tok=1).config
    for whole in (other.to_dict(), json.loads(other.to_json_string(use_diff=False))):
        config = build(budget_curve=CURVE, budget=in_use).config
        config.update(whole)
        assert (config.budget, config.alpha, config.num_experts_per_tok) == (budget, 3.0, 1)
        assert config.numbers == other.numbers


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        ({"selection": "threshold", "selection_tau": 0.3}, Threshold(0.3)),
        ({"selection": "dense"}, Dense()),
        ({"selection": "mass", "selection_tau": 0.7, "norm_topk_prob": True}, Mass(0.7, 2, True)),
        ({"num_experts_per_tok": 1}, TopK(2)),
    ],
)
def test_any_trained_selection_gets_budgets_and_comes_back(
    build: Build, ids: torch.Tensor, fields: dict[str, Any], policy: Any
) -> None:
    model, plain = build(budget_curve=CURVE, **fields), build(**fields)
    before = plain(ids).logits
    assert {r.selection for r in routers(model)} == {policy}
    assert torch.equal(model(ids).logits, before)
    model.set_budget(1.5)
    assert in_use(model) == HALF
    assert {r.selection.renormalize for r in routers(model)} == {bool(fields.get("norm_topk_prob"))}
    model.set_budget(None)
    assert {r.selection for r in routers(model)} == {policy}
    assert torch.equal(model(ids).logits, before)


def test_the_range_and_the_numbers_in_use() -> None:
    sizes = {"num_hidden_layers": 4, "num_experts": 4}
    config = GrmoeConfig(**sizes, budget_curve=CURVE, budget=1.5)
    assert config.budget_range == (1.0, 2.0)
    assert [n.alpha for n in config.numbers] == [1.0, 4.0]
    assert GrmoeConfig(**sizes).budget_range is None
    with pytest.raises(ValueError, match=r"budget_curve\[1\].tau must be one number or 6"):
        GrmoeConfig(num_hidden_layers=12, budget_curve=CURVE)


def test_an_alpha_set_by_hand_ends_the_budget_when_the_model_is_saved(
    build: Build, ids: torch.Tensor, tmp_path: Path
) -> None:
    model = build(budget_curve=CURVE)
    model.set_budget(1.0)
    for router in routers(model):
        router.alpha = 2.0
    model.save_pretrained(tmp_path)
    loaded = GrmoeForCausalLM.from_pretrained(tmp_path)
    assert (model.budget, loaded.budget) == (None, None)
    assert in_use(loaded) == in_use(model)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_budget_after_one_per_sequence_is_one_number_again(build: Build, ids: torch.Tensor) -> None:
    model = build(budget_curve=CURVE)
    model.set_budget(1.0)
    expected = model(ids[:1]).logits
    set_numbers(routers(model), [model.config.layer_numbers(b) for b in (1.0, 1.5, None)])
    model.set_budget(1.0)
    assert torch.equal(model(ids[:1]).logits, expected)
