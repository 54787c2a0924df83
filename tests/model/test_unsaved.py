"""`save_pretrained` warns about what was set on routers and is not in the configuration."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grmoe.model import GrmoeForCausalLM
from grmoe.routing import Dense, Elastic, Mass, Router, TopK, routers, set_draw, set_elastic

Build = Callable[..., GrmoeForCausalLM]

CURVE: list[dict[str, Any]] = [
    {"experts_per_token": 1.0, "weight": 0.51, "alpha": 1.0, "cap": 2},
    {"experts_per_token": 1.6, "weight": [0.17, 0.1], "alpha": [1.0, 2.0], "cap": 2},
    {"experts_per_token": 3.0, "weight": 1e-6, "alpha": 1.0, "cap": 3},
]
BIAS: list[dict[str, Any]] = [
    CURVE[0] | {"tau": 0.3, "bias": [[0.1, 0.0, 0.7, 0.0]] * 2},
    CURVE[2] | {"tau": 1.0, "bias": [[0.0, 0.3, 0.0, -0.9]] * 2},
]
for point in BIAS:
    del point["weight"]


def set_bias(router: Router) -> None:
    router.budget.biased = True
    router.budget.set_bias([1.0, 0.0, 0.0, 0.0])


def set_selection(router: Router, selection: Any) -> None:
    router.selection = selection


@pytest.mark.parametrize(
    ("fields", "change", "names"),
    [
        ({}, lambda r: setattr(r, "tau", 0.2), "tau"),
        ({}, lambda r: setattr(r, "cap", 1), "cap"),
        ({}, lambda r: set_selection(r, Mass(0.2, cap=1)), "cap, tau"),
        ({}, lambda r: set_selection(r, TopK(2, renormalize=True)), "selection"),
        ({}, lambda r: set_selection(r, Dense()), "selection"),
        ({}, set_bias, "bias"),
        ({}, lambda r: r.budget.set_weight_alpha(2.0), "weight_alpha"),
        ({"weight_alpha": 1.0}, lambda r: r.budget.set_weight_alpha(2.0), "weight_alpha"),
        ({"weight_alpha": 1.0}, lambda r: r.budget.set_weight_alpha(None), "weight_alpha"),
        ({"selection": "threshold", "selection_tau": 0.3}, lambda r: setattr(r, "tau", 0.4), "tau"),
        ({"budget_curve": CURVE, "budget": 1.6}, lambda r: setattr(r, "cap", 1), "cap"),
    ],
)
def test_what_is_not_saved_is_named(
    build: Build, tmp_path: Path, fields: dict[str, Any], change: Any, names: str
) -> None:
    model = build(**fields)
    change(routers(model)[1])  # one layer is enough
    with pytest.warns(
        UserWarning, match=rf"^{names} of the routers differ.*not saved.*model.set_budget"
    ) as seen:
        model.save_pretrained(tmp_path)
    assert seen[0].filename == __file__


def test_one_per_sequence_is_not_saved(build: Build, tmp_path: Path) -> None:
    model = build()
    routers(model)[0].budget.cap = torch.tensor([2, 1], dtype=torch.int32).view(2, 1, 1)
    with pytest.warns(UserWarning, match="^cap of the routers"):
        model.save_pretrained(tmp_path)


def test_the_advice_keeps_what_was_set(build: Build, tmp_path: Path) -> None:
    model = build()
    for router in routers(model):
        router.tau, router.cap = 0.2, 1
    model.config.update({"selection": "mass", "selection_tau": 0.2, "num_experts_per_tok": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)
    loaded = GrmoeForCausalLM.from_pretrained(tmp_path)
    assert [(r.tau, r.cap) for r in routers(loaded)] == [(pytest.approx(0.2), 1)] * 2


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"selection": "mass", "selection_tau": 0.7, "norm_topk_prob": True},
        {"selection": "at_least", "selection_tau": 0.1},
        {"selection": "threshold", "selection_tau": 0.3},
        {"selection": "dense"},
        {"weight_alpha": [0.7, 1.3], "alpha": 2.0},
        {"identity_experts": 1, "attention_heads_per_token": 2},
        {"router": "switch"},
        {"router": "hash"},
        {"router": "soft_moe", "allow_noncausal_router": True},
        {"budget_curve": CURVE},
        {"budget_curve": CURVE, "selection": "dense"},
        {"budget_curve": BIAS},
    ],
)
def test_nothing_else_warns(build: Build, tmp_path: Path, fields: dict[str, Any]) -> None:
    """Every kind of model: new, at budgets, trained with random ones, in other precisions, and loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build(**fields)
        model.save_pretrained(tmp_path)
        for budget in (1.3, 1.6, 3.0, None) if "budget_curve" in fields else ():
            model.set_budget(budget)
            model.save_pretrained(tmp_path)
            GrmoeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
        if not fields or fields.get("selection") == "mass":
            set_elastic(model.train(), Elastic())
            set_draw(model, 7)
            model(torch.arange(8)[None])
            model.save_pretrained(tmp_path)
        for router in routers(model):
            router.alpha = 0.3  # taken into the configuration
        for cast in (model.double, model.bfloat16):
            cast().save_pretrained(tmp_path)
