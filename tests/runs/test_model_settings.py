"""`model.*` of a configuration: converted or refused in one line, before anything is built."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from grmoe.config import describe_fields, field_types, from_dict, merge, read_tree, to_dict
from grmoe.hardware import memory_bytes
from grmoe.model import GrmoeConfig, preset
from grmoe.model.count import count, parameters
from grmoe.parallel.world import World
from grmoe.routing import ROUTERS
from grmoe.runs.config import TrainConfig
from grmoe.runs.model_settings import check_size
from grmoe.train.setup import build_trainer

Settings = Callable[..., TrainConfig]
ALONE = World(0, 1, 0, torch.device("cpu"), None)


def with_overrides(config: TrainConfig, *overrides: str) -> TrainConfig:
    return from_dict(TrainConfig, merge(to_dict(config), read_tree(None, overrides)))


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("model.rms_norm_eps=1e-6", "rms_norm_eps", 1e-6),  # YAML reads text
        ("model.alpha=2", "alpha", 2.0),
        ("model.alpha=[1, 2e-1]", "alpha", [1.0, 0.2]),
        ("model.num_experts=8.0", "num_experts", 8),
        ("model.router_options.kappa=2e0", "router_options", {"kappa": 2.0}),
        ("model.rope_parameters.rope_theta=500", "rope_parameters", {"rope_theta": 500}),
    ],
)
def test_values_have_the_declared_type(override: str, name: str, value: Any) -> None:
    found = from_dict(TrainConfig, read_tree(None, [override])).model[name]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.norm_topk_prob=softmax", "model.norm_topk_prob must be true or false, got 'softmax'"),
        ("model.num_hidden_layers=1000000000", "num_hidden_layers must be at most 1000, got 1000000000"),
        ("model.hidden_size=100000000000000000000", "hidden_size must be at most"),
        ("model.vocab_size=1000000000", "the model has .* parameters and needs at least .* GB"),
        ("model.num_experts=10000000", "the model has .* parameters and needs at least .* GB"),
        ("model.router=[1]", r"model.router must be text, got \[1\]"),
        ("model.max_position_embeddings=null", "model.max_position_embeddings must be an integer, got None"),
        ("model.attention_dropout=3", "attention_dropout must be below 1, got 3.0"),
        ("model.rms_norm_eps=0", "rms_norm_eps must be a finite number > 0, got 0.0"),
        ("model.initializer_range=.nan", "initializer_range must be a finite number >= 0, got nan"),
        ("model.pad_token_id=1000000000", "model.pad_token_id must be a token of the vocabulary"),
        (
            "model.rope_parameters.rope_type=[[1]]",
            r"rope_parameters.rope_type must be one of .* got \[\[1\]\]",
        ),
        ("model.rope_parameters.rope_type=yarn", "rope_parameters must have factor with rope_type 'yarn'"),
        (
            "model.rope_parameters.rope_theta=x",
            "rope_parameters.rope_theta must be a finite number > 0, got 'x'",
        ),
        (
            "model.router_options.kapa=1",
            "unknown key 'model.router_options.kapa'; did you mean 'model.router_options.kappa'",
        ),
        ("model.router_options.rank=3", "model.router_options.rank is not an option: set model.router_rank"),
        ("model.router_options.linear=2", "model.router_options.linear must be true or false, got 2"),
        (
            "model.router_options={scaling: raw, prior: uniform}",
            "prior must be 'paper' or 'balanced' with scaling",
        ),
        ("routing.overlap_pairs=7", "routing.overlap_pairs must be at most the 6 pairs of 4 experts, got 7"),
        ("routing.overlap_pairs=0", "overlap_pairs must be an integer >= 1, got 0"),
        ("routing.overlap_pairs=some", "routing.overlap_pairs must be one of 'auto', 'all', got 'some'"),
        ("routing.overlap_unit=k", "routing.overlap_unit must be one of 'random', 'absolute', got 'k'"),
        ("model.id2label={}", "unknown key 'model.id2label'"),  # of Hugging Face, not of a GrMoE model
        ("model.dtype=auto", "unknown key 'model.dtype'"),
        ("seed=[", "the value of seed is not valid YAML: expected the node content"),
        (f"model.hidden_size={'x' * 500}", "model.hidden_size must be an integer, got 'x{76}…"),
    ],
)
def test_mistakes_are_one_line(override: str, message: str, settings: Settings) -> None:
    """Each once ended in a traceback, hung, or was accepted."""
    with pytest.raises(ValueError, match=message) as refused:
        build_trainer(with_overrides(settings(), override), ALONE)
    assert "\n" not in str(refused.value)


def test_parameters_are_counted_without_building() -> None:
    configs = [preset(name) for name in ("tiny", "small")]
    configs += [preset("tiny", router=router, allow_noncausal_router=True) for router in ROUTERS]
    configs += [
        preset("tiny", shared_experts=2, hidden_act="gelu", moe_every=1, tie_word_embeddings=False),
        preset("tiny", attention_bias=True, head_dim=48, num_key_value_heads=1),
        *(preset("tiny", router_options={"amortizer": kind}) for kind in ("affinity", "input", "matrix")),
        preset("tiny", router_options={"amortizer": "matrix", "amortizer_hidden": 3, "scaling": "raw"}),
    ]
    assert [parameters(config) for config in configs] == [count(config).total for config in configs]


def test_processes_share_a_model() -> None:
    """A model that is too large for one process trains in 64, unless each has a copy."""
    config = preset("2.7b")
    copies = parameters(config) * 16 // memory_bytes(torch.device("cpu")) + 1
    wide = preset("2.7b", num_experts=32 * copies)
    with pytest.raises(ValueError, match="parameters and needs at least"):
        check_size(wide, ALONE)
    check_size(wide, World(0, 64 * copies, 0, torch.device("cpu"), None))
    with pytest.raises(ValueError, match="GB per process"):
        check_size(wide, World(0, 64, 0, torch.device("cpu"), None), replicate=64)


def test_every_field_of_the_model_may_be_set() -> None:
    own = set(field_types(GrmoeConfig))
    assert own == {f.name for f in fields(GrmoeConfig)} & set(vars(GrmoeConfig)["__annotations__"])
    assert {"vocab_size", "router_options", "budget_curve"} < own


# -- random overrides ------------------------------------------------------------------------------------------

VALUES = (
    "0", "1", "-1", "2", "3", "7", "64", "0.5", "-0.5", "1e-6", "1e30", "1e400", ".nan", ".inf", "1000000000",
    "100000000000000000000", "1_000", "0x10", "true", "off", "null", "~", "''", "'1'", "x", "é", "auto", "softmax",
    "switch", "hash", "soft_moe", "expert_choice", "vmf", "topk", "mass", "dense", "threshold", "gelu", "2020-01-01",
    "2020-13-45", "[]", "[1]", "[1, 2]", "[[1]]", "{}", "{a: 1}", "{1: 2}", "[", "*a", "a: b",
    "!!python/object:os.system x", "{rope_type: linear}", "{rope_theta: x}", "{factor: 2}", "{load_loss: x}",
    "{seed: [1]}", "{balance: 3}", "{init: 3}", "{kappa: -1}", "{prior: x}", "{generator: 1}", "{selection: topk}",
    "{slots: 1000000000}", "{amortizer: input}",
)  # fmt: skip
FREE = {"out", "model", "steps", "device", "compile", "log.tensorboard", "log.wandb"}
NAMES = [
    *(name for name in describe_fields(TrainConfig) if name not in FREE and not name.startswith("parallel")),
    *(f"model.{f.name}" for f in fields(GrmoeConfig)) , *(f"model.{name}" for name in field_types(GrmoeConfig)),
    "model.preset", "model.router_options.x", "model.router_options.seed", "model.rope_parameters.rope_type", "x.y",
    "model", "data", "", "model.",
]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
def test_random_overrides_build_or_are_refused_in_one_line(seed: int, settings: Settings) -> None:
    """Of 600 random overrides 62 once ended in a traceback and 2 hung."""
    draw, tree = random.Random(seed), to_dict(settings())
    refused: list[tuple[list[str], str]] = []
    for _ in range(150):
        overrides = [f"{draw.choice(NAMES)}={draw.choice(VALUES)}" for _ in range(draw.choice([1, 1, 2]))]
        try:
            config = from_dict(TrainConfig, merge(tree, read_tree(None, overrides)))
            if draw.random() < 0.2:  # building a model takes time
                build_trainer(config, ALONE)
            else:
                check_size(config.resolved().model_config(300, 0), ALONE)
        except ValueError as error:
            refused.append((overrides, str(error)))
        except Exception as error:  # a traceback for the user
            pytest.fail(f"{overrides}: {type(error).__name__}: {error}")
    assert 50 < len(refused) < 150
    assert [r for r in refused if "\n" in r[1] or not 10 < len(r[1]) < 600] == []
