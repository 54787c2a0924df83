"""Random budgets in the trainer: the same ones on resume, on any number of processes and in a recomputed pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from comparing import assert_same, state_of
from torch import Tensor

from grmoe.config import ConfigError
from grmoe.parallel.world import World
from grmoe.routing import routers
from grmoe.routing.selection import TopK
from grmoe.runs.config import ElasticConfig, TrainConfig
from grmoe.runs.folder import CONFIG, read_log, saved_config
from grmoe.runs.open import open_model
from grmoe.train.loop import train
from grmoe.train.nonfinite import find_nonfinite
from grmoe.train.setup import Trainer, build_trainer
from grmoe.train.step import StepResult, resolve, train_step

Settings = Callable[..., TrainConfig]
MODEL = {"num_hidden_layers": 4}  # two MoE layers
LOUD = {"initializer_range": 0.3}  # experts change predictions from the start


def process(config: TrainConfig, rank: int = 0, size: int = 1) -> Trainer:
    """The trainer of one of several processes. They need no connection until a step ends."""
    return build_trainer(config, World(rank, size, 0, torch.device("cpu"), None))


def one_step(trainer: Trainer, step: int) -> StepResult:
    batches = trainer.data.batches(
        trainer.rows, trainer.length, trainer.config.seed, trainer.world.rank, trainer.world.size, step
    )
    return resolve(trainer, train_step(trainer, step, next(batches)), step)


def watch(trainer: Trainer) -> list[list[Tensor]]:
    """For each layer: experts per token of every forward pass from now on."""
    seen: list[list[Tensor]] = []
    for router in routers(trainer.model):
        passes: list[Tensor] = []
        seen.append(passes)
        router.register_forward_hook(lambda m, i, out, passes=passes: passes.append(out.selected.sum(-1)))
    return seen


def budgets(trainer: Trainer, step: int) -> Tensor:
    """Experts per token in a step: (layers, sequences, tokens)."""
    seen = watch(trainer)
    one_step(trainer, step)
    return torch.stack([torch.cat(passes) for passes in seen])


# ----------------------------------------------------------------------------------------------- the same draws


@pytest.mark.parametrize("unit", ["token", "sequence", "layer", "step"])
def test_any_division_of_a_batch_draws_the_same(settings: Settings, unit: str) -> None:
    # By count, so that a budget does not depend on the gate and its rounding.
    elastic = {"unit": unit, "rule": "count"}
    make = lambda **data: settings(model=MODEL, elastic=elastic, data=data)  # noqa: E731
    whole = budgets(process(make()), 3)
    assert whole.shape == (2, 8, 32)
    assert torch.equal(budgets(process(make(micro_batch_size=2)), 3), whole)
    parts = [budgets(process(make(micro_batch_size=2), rank, 2), 3) for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), whole)
    # The unit is what shares a budget.
    assert (whole == whole[..., :1]).all() == (unit != "token")
    assert (whole == whole[:, :1, :1]).all() == (unit in ("layer", "step"))
    if unit == "step":
        trainer = process(make())
        steps = torch.stack([budgets(trainer, step)[:, 0, 0] for step in range(8)])
        assert (steps == steps[:, :1]).all()  # all layers the same
        assert set(steps.unique().tolist()) == {1, 2}


def test_budgets_change_with_step_seed_layer_and_row(settings: Settings) -> None:
    trainer = process(settings(model=MODEL))
    first, second = budgets(trainer, 0), budgets(trainer, 1)
    other = budgets(process(settings(model=MODEL, seed=1)), 0)
    for a, b in ((first, second), (first, other), (first[0], first[1]), (first[:, :1], first[:, 1:2])):
        # Far from equal: two independent draws of one or two experts agree for about half of the tokens.
        assert 0.1 < (a != b).double().mean() < 0.9
    assert set(first.unique().tolist()) == {1, 2}


def test_the_search_for_nan_draws_what_the_step_drew(settings: Settings) -> None:
    """Also after later steps, which a device may have been given before the host learns of the bad one."""
    trainer = process(settings(model=MODEL, data={"micro_batch_size": 4}, elastic={"rule": "count"}))
    batch = next(trainer.data.batches(8, trainer.length))
    seen = watch(trainer)
    train_step(trainer, 0, batch)
    drawn = [torch.cat(passes) for passes in seen]
    for passes in seen:
        passes.clear()
    train_step(trainer, 1, batch)
    later = [torch.cat(passes) for passes in seen]
    for passes in seen:
        passes.clear()
    find_nonfinite(trainer, 0, batch)
    for passes, first, second in zip(seen, drawn, later, strict=True):
        assert torch.equal(torch.cat(passes), first)
        assert not torch.equal(first, second)


def test_full_steps_only_are_the_plain_run(settings: Settings) -> None:
    same: dict[str, Any] = {"steps": 4, "routing": {"leading_weight": 0.01}}
    full = settings("full", **same, elastic={"full_share": 1.0})
    plain = settings("plain", **same, elastic={"unit": "off"})
    drawn = settings("drawn", **same)
    for config in (full, plain, drawn):
        train(config)
    assert_same(full, plain, steps=(4,))
    other = state_of(drawn, 4)["model"]
    assert any(not torch.equal(other[name], value) for name, value in state_of(full, 4)["model"].items())


def test_some_steps_are_full(settings: Settings) -> None:
    trainer = process(settings(elastic={"full_share": 0.5}))
    means = [float(budgets(trainer, step).double().mean()) for step in range(8)]
    assert 0 < sum(mean == 2 for mean in means) < 8


# ------------------------------------------------------------------------------------------------- distillation


def gradients(trainer: Trainer, step: int = 0) -> tuple[StepResult, dict[str, Tensor]]:
    kept: dict[str, Tensor] = {}
    names = {p: name for name, p in trainer.model.named_parameters()}

    def keep(*_: Any) -> None:
        kept.update({names[p]: p.grad.clone() for p in names if p.grad is not None})

    trainer.optimizers[0].register_step_pre_hook(keep)
    return one_step(trainer, step), kept


def assert_same_gradients(one: Trainer, other: Trainer) -> None:
    (result, want), (again, got) = gradients(one), gradients(other)
    assert vars(again) == pytest.approx(vars(result), rel=1e-5)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("distill", [0.0, 2.0])
def test_recomputed_passes_have_the_same_gradients(settings: Settings, distill: float) -> None:
    options: dict[str, Any] = {
        "model": LOUD,
        "elastic": {"distill": distill},
        "data": {"micro_batch_size": 4},
    }
    saving = process(settings(**options, activation_checkpointing=True))
    assert_same_gradients(process(settings(**options)), saving)


def test_a_compiled_model_has_the_same_gradients_and_compiles_once(settings: Settings) -> None:
    config = settings(model=LOUD, elastic={"distill": 2.0})
    plain, compiled = process(config), process(config)
    compiled.forward = torch.compile(compiled.model, dynamic=False, backend="eager")
    assert_same_gradients(plain, compiled)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert {one_step(compiled, step).divergence > 1e-3 for step in range(1, 4)} == {True}


def test_only_the_drawn_pass_is_logged_and_counted(settings: Settings) -> None:
    plain, distilled = (process(settings(model=LOUD, elastic={"distill": d})) for d in (0.0, 1.0))
    a, b = one_step(plain, 0), one_step(distilled, 0)
    assert (a.loss, a.overlap, a.divergence) == (b.loss, b.overlap, 0.0)
    assert b.divergence > 1e-3
    (ours,), (theirs,) = (t.model.routing_metrics() for t in (plain, distilled))
    for name in ("tokens", "load", "entropy", "experts_per_token"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert 1 < ours.experts_per_token < 2


@pytest.mark.parametrize(
    ("elastic", "counts"),
    [
        ({"unit": "off", "distill": 1.0}, {1}),
        ({}, {1}),
        ({"distill": 1.0}, {2}),
        ({"distill": 1.0, "full_share": 0.5}, {1, 2}),
    ],
    ids=str,
)
def test_logged_flops_are_those_computed(
    settings: Settings, elastic: dict[str, Any], counts: set[int]
) -> None:
    """Six for each weight of an expert that computes a token, in every pass; the rest is the same in each."""
    config = settings(model=MODEL, steps=5, log={"every": 2}, elastic=elastic)
    trainer = process(config)
    seen = watch(trainer)
    per_step = []
    for step in range(config.steps):
        one_step(trainer, step)
        passes = [torch.cat(layer) for layer in seen]
        per_step.append((float(torch.stack(passes).double().mean(0).sum()), len(passes[0]) / trainer.rows))
        for layer in seen:
            layer.clear()
    assert {passes for _, passes in per_step} == counts
    cost = trainer.cost
    weights = cost.experts / trainer.model.config.num_experts
    train(config)
    lines = [line for line in read_log(Path(config.out)) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [2, 4, 5]
    for line, window in zip(lines, (per_step[0:2], per_step[2:4], per_step[4:5]), strict=True):
        tokens = len(window) * trainer.tokens_per_step
        computed = sum(experts for experts, _ in window) / tokens
        passes = sum(count for _, count in window) / len(window)
        rest = cost.train_flops - 6 * 2 * weights
        assert line["flops_per_token"] == pytest.approx(passes * rest + 6 * computed * weights)


# -------------------------------------------------------------------------------------- choices, and older runs


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"router": "switch"}, "the router 'switch' chooses by itself"),
        ({"router": "hash"}, "the router 'hash' chooses by itself"),
        ({"router": "soft_moe", "allow_noncausal_router": True}, "the router 'soft_moe' chooses by itself"),
        ({"router": "expert_choice", "allow_noncausal_router": True}, "the router 'expert_choice' chooses"),
        ({"selection": "dense"}, "the selection 'dense' has no budget"),
        ({"selection": "threshold"}, "the selection 'threshold' has no budget"),
        ({"num_experts_per_tok": 1}, "the model computes one expert per token"),
    ],
)
def test_models_without_a_choice_are_off_unless_it_is_asked_for(
    settings: Settings, model: dict[str, Any], reason: str
) -> None:
    found = settings(model=model).resolved()
    assert (found.elastic.unit, found.routing.prior_counts, found.routing.leading_weight) == (
        "off",
        "computed",
        0,
    )
    for asked in ({"unit": "step"}, {"distill": 1.0}, {"full_share": 0.5}):
        ((key, value),) = asked.items()
        said = rf"elastic\.unit must be off, because {reason}.*; got elastic\.{key}={value}$"
        with pytest.raises(ValueError, match=said):
            build_trainer(settings(model=model, elastic=asked), World(0, 1, 0, torch.device("cpu"), None))
    assert settings(model=model, elastic={"unit": "off", "full_share": 0.5}).resolved().elastic.unit == "off"


def test_every_choice_is_resolved_once(settings: Settings) -> None:
    found = settings().resolved()
    assert (found.elastic, found.routing.prior_counts) == (ElasticConfig(unit="token"), "candidates")
    assert found.routing.leading_weight == 0.01
    assert found.model["norm_topk_prob"] is False
    assert found.resolved() == found
    given = settings(
        model={"norm_topk_prob": True, "selection": "mass"},
        elastic={"unit": False},  # what YAML makes of `off`
        routing={"prior_counts": "both"},
    ).resolved()
    assert (given.elastic.unit, given.routing.prior_counts, given.model["norm_topk_prob"]) == (
        "off",
        "both",
        True,
    )
    with pytest.raises(ConfigError, match="full_share must be at most 1, got 2"):
        settings(elastic={"full_share": 2})
    with pytest.raises(ConfigError, match=r"elastic\.unit must be one of 'auto', 'off'.*got True"):
        settings(elastic={"unit": True})


def as_older_version(run: Path) -> None:
    """What versions before random budgets would have saved."""
    tree = yaml.safe_load((run / CONFIG).read_text())
    assert tree.pop("elastic")["unit"] == "off"
    assert tree["routing"].pop("prior_counts") == "computed"
    assert tree["routing"].pop("leading_weight") == 0.0
    assert tree["model"].pop("norm_topk_prob") is True
    (run / CONFIG).write_text(yaml.safe_dump(tree))


def test_an_older_run_stays_what_it_was(settings: Settings) -> None:
    """It is opened with weights that sum to one, and goes on with full budgets, bit for bit."""
    options: dict[str, Any] = {"steps": 6, "checkpoint": {"every": 3}, "log": {"every": 1}}
    before = {"model": {"norm_topk_prob": True}, "elastic": {"unit": "off"}}
    straight, old = settings("straight", **options, **before), settings("old", **options)
    train(straight)
    shutil.copytree(straight.out, old.out)
    shutil.rmtree(Path(old.out) / "checkpoints" / "step-00000006")
    as_older_version(Path(old.out))
    opened = open_model(old.out).model
    assert [r.selection for r in routers(opened)] == [TopK(2, renormalize=True)]
    train(old, resume=True)  # its own configuration leaves all of it open
    assert_same(saved_config(Path(old.out)), straight, steps=(6,))
    with pytest.raises(ValueError, match=r"cannot change on resume: .*elastic\.unit: 'off' → 'token'"):
        train(settings("old", **options, elastic={"unit": "token"}), resume=True)


def test_an_older_run_with_one_expert_keeps_its_probabilities(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("model: {preset: tiny, num_experts_per_tok: 1}\n")
    assert saved_config(tmp_path).model["norm_topk_prob"] is False
    (tmp_path / CONFIG).write_text("model: {preset: tiny, norm_topk_prob: false}\n")
    assert saved_config(tmp_path).model["norm_topk_prob"] is False


def test_a_new_run_says_how_it_was_trained(settings: Settings) -> None:
    config = settings(steps=1)
    train(config)
    tree = yaml.safe_load((Path(config.out) / CONFIG).read_text())
    assert tree["elastic"] == {"unit": "token", "rule": "mass", "full_share": 0.0, "distill": 0.0}
    assert (tree["routing"]["prior_counts"], tree["model"]["norm_topk_prob"]) == ("candidates", False)
    assert saved_config(Path(config.out)) == config.resolved()
    (router,) = routers(open_model(config.out).model)
    assert router.selection == TopK(2)
    assert router.tau == 1.0  # no limit
