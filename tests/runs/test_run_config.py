"""The configuration of a run: defaults, refusals, what follows from it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from grmoe.config import ConfigError, describe_fields, differences, from_dict, load, to_dict
from grmoe.runs.config import TrainConfig, may_change_on_resume
from grmoe.runs.earlier import as_old_run
from grmoe.train.schedule import alphas_at


def config(*overrides: str) -> TrainConfig:
    return load(TrainConfig, None, overrides)


def test_defaults_are_a_run() -> None:
    found = config()
    model = found.model_config(8192, 0)
    assert (model.router, model.num_experts, model.eos_token_id) == ("grassmann", 8, 0)
    assert found.schedule("weights") == (300, 0.1)
    assert config("steps=100000").schedule("frames") == (2000, 0.1)
    assert config("steps=6000").schedule("kappa") == (1800, 0.1)
    assert config("optim.warmup=7").schedule("kappa") == (7, 0.1)


def test_overrides_reach_the_model() -> None:
    found = config("model.preset=tiny", "model.router=softmax", "model.router_options.balance=true")
    model = found.model_config(2048, 0)
    assert (model.hidden_size, model.router, model.router_options) == (128, "softmax", {"balance": True})
    assert config("model.preset=null", "model.hidden_size=96").model_config(500, 1).vocab_size == 500


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optm.lr=1", "unknown key 'optm'; did you mean 'optim'"),
        ("optim.learning=1", "unknown key 'optim.learning'"),
        ("model.ruoter=softmax", "unknown key 'model.ruoter'; did you mean 'model.router'"),
        ("router=softmax", "unknown key 'router'; did you mean 'model.router'"),
        ("every=5", "did you mean 'validation.every' or 'log.every' or 'checkpoint.every'"),
        ("model.preset=huge", "model.preset must be one of tiny, small"),
        ("steps=0", "steps"),
        ("seed=9223372036854775808", "seed must have 64 bits"),
        ("steps=ten", "steps must be an integer"),
        ("precision=fp16", "precision must be one of"),
        ("optim.floor=2", "floor must be at most 1"),
        ("optim.lr=-1", "lr"),
        ("data.batch_size=0", "batch_size"),
        ("optim.warmup=-1", "warmup must be an integer >= 0"),
        ("optim.kappa_warmup=-1", "kappa_warmup must be an integer >= 0"),
        ("optim.frames_floor=1.5", "frames_floor must be at most 1, got 1.5"),
        ("optim.kappa_lr=-1", "kappa_lr must be a finite number >= 0"),
        ("optim.frames_lr=.nan", "frames_lr must be a finite number >= 0"),
        ("validation.batch_size=0", "batch_size must be an integer >= 1"),
        ("alpha.low=0", "low"),
        ("checkpoint.every=-1", "every"),
        ("parallel.expert=0", "expert"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(override)


def test_a_vocabulary_too_small_for_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size must be at least the data's 8192, got 100$"):
        config("model.vocab_size=100").model_config(8192, 0)
    assert config("model.vocab_size=8256").model_config(8192, 0).vocab_size == 8256
    from_a_run = replace(config("model.vocab_size=100"), start_from="runs/first")
    with pytest.raises(ValueError, match="got 100: prepare the text with the tokenizer of runs/first"):
        from_a_run.model_config(8192, 0)


def test_what_is_saved_is_what_was_meant() -> None:
    found = config("optim.betas=[0.8, 0.9]", "model.router_options.linear=true", "optim.lr=1e-3")
    assert from_dict(TrainConfig, to_dict(found)) == found


def test_only_what_trains_nothing_may_change() -> None:
    old = config()
    new = config(
        "log.every=3", "checkpoint.keep_last=9", "data.micro_batch_size=2", "seed=1", "data.batch_size=4",
        "data.path=elsewhere",
    )  # fmt: skip
    changed = differences(to_dict(old), to_dict(new))
    assert [d.partition(":")[0] for d in changed if not may_change_on_resume(d)] == [
        "seed",
        "data.batch_size",
    ]


def test_the_dial_while_training() -> None:
    assert alphas_at(config(), [1.0, 2.0], 5) == [1.0, 2.0]
    rising = config("alpha.schedule=anneal", "alpha.low=0.5", "steps=11")
    assert alphas_at(rising, [2.0], 0) == [0.5]
    assert math.isclose(alphas_at(rising, [2.0], 5)[0], 1.0)  # the geometric mean in the middle
    assert alphas_at(rising, [2.0], 10) == [2.0]
    drawn = [alphas_at(config("alpha.schedule=sample"), [1.0], i)[0] for i in range(2000)]
    assert all(0.5 <= a <= 4 for a in drawn)
    # log α is uniform on [log ½, log 4]: mean ½ log 2, and 2000 draws know it to 0.04.
    assert abs(sum(map(math.log, drawn)) / len(drawn) - 0.5 * math.log(2)) < 0.06
    assert alphas_at(config("alpha.schedule=sample"), [1.0], 7)[0] == drawn[7]


def test_every_key_is_described() -> None:
    found = describe_fields(TrainConfig)
    assert {"out", "model", "optim.kappa_lr", "parallel.expert"} <= set(found)
    assert [name for name, about in found.items() if not about.doc.endswith(".")] == []
    # Every key of the YAML file is there, and no other.
    leaves: set[str] = set()

    def walk(tree: dict[str, Any], where: str = "") -> None:
        for name, value in tree.items():
            if isinstance(value, dict) and name != "model":
                walk(value, f"{where}{name}.")
            else:
                leaves.add(where + name)

    walk(to_dict(TrainConfig()))
    assert set(found) == leaves


def test_a_run_of_before_keeps_its_model_and_its_rates() -> None:
    """Presets and default rates changed. A run that was saved before does not, and one of today writes them down."""
    tree: dict[str, Any] = {
        "model": {"preset": "small", "norm_topk_prob": False}, "optim": {"lr": 1e-3},
        "elastic": {"unit": "token"}, "routing": {"prior_counts": "candidates"},
    }  # fmt: skip
    old = as_old_run(from_dict(TrainConfig, tree))
    model = old.model_config(1, 0)
    assert (model.router_rank, model.embedding_multiplier, model.residual_loss_coef) == (32, 1.0, 0.0)
    assert (old.optim.frames_lr, old.optim.kappa_lr) == (0.003 * 32**0.5, 5e-3)
    assert (old.elastic.unit, old.routing.leading_weight) == ("token", 0.0)
    assert as_old_run(old) == old
    new = from_dict(TrainConfig, tree).resolved()
    assert new.model | {"preset": None} == {
        "preset": None, "norm_topk_prob": False, "router_rank": 64, "embedding_multiplier": 22.6,
        "residual_loss_coef": 0.01,
    }  # fmt: skip
    assert (new.optim.frames_lr, as_old_run(new)) == (None, new)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.router=hash", "alpha.schedule=learned"), "alpha.schedule must be constant"),
        (("model.alpha=0", "alpha.schedule=anneal"), "model.alpha must be above zero"),
    ],
)
def test_schedules_that_would_do_nothing_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(*overrides).resolved()
