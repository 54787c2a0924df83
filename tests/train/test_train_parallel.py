"""Training by two processes: killed, stopped, resumed by as many or by others, exported; as by one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import assert_same
from processes import Processes, full_state_dict, run_command
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.config import to_yaml
from grmoe.parallel.world import start, stop
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import checkpoints_of, read_log
from grmoe.runs.state import gather, restore
from grmoe.train import loop
from grmoe.train.loop import TrainingStopped, train
from grmoe.train.setup import Trainer, build_trainer
from grmoe.train.step import resolve, train_step
from grmoe.train.validate import Validation, validate

Settings = Callable[..., TrainConfig]
KINDS: dict[str, dict[str, int]] = {"fsdp": {"fsdp": 2}, "expert": {"expert": 2}}


def losses(config: TrainConfig, kind: str = "train") -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_log(Path(config.out)) if line["kind"] == kind}


# -- what the processes do -------------------------------------------------------------------------------------


def train_and_keep(config: TrainConfig, resume: bool = False) -> dict[str, Tensor] | None:
    """The model as it is in training when it ends, from the first process."""
    kept: dict[str, Tensor] | None = None

    def watch(trainer: Trainer) -> Validation:
        nonlocal kept
        kept = full_state_dict(trainer.model, trainer.world)
        return validate(trainer)

    loop.validate = watch
    train(config, resume)
    return kept


def train_until(config: TrainConfig, step: int, number: int, ranks: tuple[int, ...]) -> tuple[str, int]:
    """A signal comes to some of the processes before a step."""

    def signalled(trainer: Trainer, at: int, batch: Tensor) -> Any:
        if at == step and trainer.world.rank in ranks:
            os.kill(os.getpid(), number)
        return train_step(trainer, at, batch)

    loop.train_step = signalled
    try:
        train(config)
    except TrainingStopped as stopped:
        return str(stopped), stopped.status
    return "", 0


def validated(config: TrainConfig, step: int) -> tuple[float, dict[str, float], int]:
    """Losses of a checkpoint on the validation text, and the tokens that were routed for them."""
    world = start(config.parallel, "cpu")
    trainer = build_trainer(config, world)
    checkpoints = checkpoints_of(Path(config.out), config)
    checkpoint = next(c for c in checkpoints.all() if c.step == step)
    state = checkpoints.load(checkpoint, gather(trainer.model, trainer.optimizers))
    restore(trainer.model, trainer.optimizers, state)
    found = validate(trainer)
    stop()
    return found.loss, found.domains, found.routing[0].tokens


def first_steps(config: TrainConfig) -> list[dict[str, float]]:
    world = start(config.parallel, "cpu")
    trainer = build_trainer(config, world)
    batches = trainer.data.batches(trainer.rows, trainer.length, config.seed, world.rank, world.size)
    found = [vars(resolve(trainer, train_step(trainer, step, next(batches)), step)) for step in range(2)]
    stop()
    return found


def in_a_row(config: TrainConfig) -> list[bool]:
    """Whether the process is in its group after each of three trainings."""
    found = []
    for number in range(3):
        train(replace(config, out=f"{config.out}-{number}"))
        found.append(dist.is_initialized())
    return found


# -- runs that several tests look at ---------------------------------------------------------------------------


class Straight:
    """Twenty steps at a stretch, with checkpoints at ten and twenty, and the model as training had it."""

    def __init__(self, make: Settings, kind: str) -> None:
        self.config = make(
            f"straight-{kind}", log={"every": 1}, checkpoint={"every": 10}, parallel=KINDS.get(kind, {})
        )
        answers = Processes(2 if kind in KINDS else 1, train_and_keep, self.config).answers()
        self.weights: dict[str, Tensor] = answers[0]
        assert answers[1:] in ([], [None])


@pytest.fixture(scope="module")
def straight(make_settings: Callable[[Path], Settings], tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Straight] = {}
    make = make_settings(tmp_path_factory.mktemp("straight"))

    def get(kind: str) -> Straight:
        if kind not in made:
            made[kind] = Straight(make, kind)
        return made[kind]

    return get


def at_ten(run: TrainConfig, settings: Settings, kind: str) -> TrainConfig:
    """A copy of a run as it was after ten steps, for other processes to go on with."""
    config = settings("copy", log={"every": 1}, checkpoint={"every": 10}, parallel=KINDS.get(kind, {}))
    shutil.copytree(run.out, config.out)
    shutil.rmtree(Path(config.out) / "checkpoints" / "step-00000020")
    return config


# -- tests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_is_straight_to_the_bit(
    kind: str, settings: Settings, straight: Callable[[str], Straight]
) -> None:
    """kill -9 of both in step 14; the checkpoint of step 10 is what is left."""
    config = settings("broken", log={"every": 1}, checkpoint={"every": 10}, parallel=KINDS[kind])
    killed = Processes(2, train_until, config, 13, signal.SIGKILL, (0, 1))
    assert killed.join() == [-signal.SIGKILL] * 2
    assert [c.step for c in checkpoints_of(Path(config.out), config).all()] == [10]
    Processes(2, train_and_keep, config, True).answers()
    assert_same(config, straight(kind).config)


@pytest.mark.parametrize(("writer", "reader"), [("fsdp", ""), ("expert", ""), ("", "fsdp"), ("", "expert")])
def test_other_numbers_of_processes_go_on(
    writer: str, reader: str, settings: Settings, straight: Callable[[str], Straight]
) -> None:
    """The sums have another order, so the first loss agrees to 1e-6; ten steps on, rounding has grown a little."""
    wanted = straight(writer).config
    config = at_ten(wanted, settings, reader)
    by_writer = Processes(2 if writer else 1, validated, wanted, 10).answers()[0]
    by_reader = Processes(2 if reader else 1, validated, config, 10).answers()[0]
    assert by_reader[0] == pytest.approx(by_writer[0], abs=1e-6)
    Processes(2 if reader else 1, train_and_keep, config, True).answers()
    assert list(losses(config)) == list(range(1, 21))
    assert losses(config)[11] == pytest.approx(losses(wanted)[11], abs=1e-6)
    assert losses(config)[20] == pytest.approx(losses(wanted)[20], abs=1e-3)


def test_trainings_in_a_row_stay_in_one_group(settings: Settings) -> None:
    for answer in Processes(2, in_a_row, settings(steps=2, parallel=KINDS["expert"])).answers():
        assert answer == [True, True, True]


def test_distillation_and_the_terms_of_routers_are_the_same_for_one_and_for_two(settings: Settings) -> None:
    options: dict[str, Any] = {
        "model": {"initializer_range": 0.3},  # so that experts change predictions from the start
        "elastic": {"distill": 3.0},
        "data": {"micro_batch_size": 2},
        "routing": {"entropy_weight": 0.5, "entropy_target": 0.3, "leading_weight": 0.5},
    }
    alone = first_steps(settings(**options))
    assert all(step["divergence"] > 1e-3 and step["router_loss"] > 1e-3 for step in alone)
    for answer in Processes(2, first_steps, settings(**options, parallel=KINDS["fsdp"])).answers():
        for got, want in zip(answer, alone, strict=True):
            assert got == pytest.approx(want, rel=1e-4)


def test_validation_is_the_same_for_one_and_for_two(
    settings: Settings, straight: Callable[[str], Straight]
) -> None:
    """Also where the batches differ, as they do unless `validation.batch_size` is given, and one process has more."""
    base = straight("").config
    for options in ({}, {"batch_size": 5, "tokens": 10**9}):
        answers = []
        for kind in ("", *KINDS):
            config = settings(validation=options, parallel=KINDS.get(kind, {}))
            shutil.rmtree(config.out, ignore_errors=True)
            shutil.copytree(base.out, config.out)
            answers += Processes(2 if kind else 1, validated, config, 20).answers()
        loss, domains, tokens = answers[0]
        for other in answers[1:]:
            assert other[0] == pytest.approx(loss, abs=1e-6)
            assert other[1] == pytest.approx(domains, abs=1e-6)
            assert other[2] == tokens
    assert losses(base, "validation")[20] == pytest.approx(validated(base, 20)[0], abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_folder_is_the_model_in_training(
    kind: str, straight: Callable[[str], Straight], tmp_path: Path
) -> None:
    run = straight(kind)
    out = tmp_path / "model"
    exported = CliRunner().invoke(
        app, ["export", run.config.out, "--out", str(out), "--dtype", "fp32", "--checkpoint", "last"]
    )
    assert exported.exit_code == 0, exported.output
    weights = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert weights.keys() == run.weights.keys()
    for name, value in weights.items():
        assert torch.equal(value, run.weights[name]), name


def test_weights_of_another_run_reach_the_shards(
    settings: Settings, straight: Callable[[str], Straight]
) -> None:
    """`start_from`, with rates of zero: after a step the weights are still those of the source."""
    still: dict[str, Any] = {
        "optim": {"lr": 0.0, "kappa_lr": 0.0, "frames_lr": 0.0},
        "routing": {"prior_rate": 0.0},
    }
    source = straight("expert")
    config = settings("tuned", steps=1, start_from=source.config.out, parallel=KINDS["expert"], **still)
    weights, _ = Processes(2, train_and_keep, config).answers()
    for name, tensor in source.weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)  # frames are retracted


def test_a_signal_to_one_stops_both(settings: Settings, straight: Callable[[str], Straight]) -> None:
    config = settings("broken", log={"every": 1}, checkpoint={"every": 10}, parallel=KINDS["fsdp"])
    for message, status in Processes(2, train_until, config, 4, signal.SIGTERM, (1,)).answers():
        assert message.startswith("SIGTERM: stopped after step 5, saved as ")
        assert status == 128 + signal.SIGTERM
    Processes(2, train_and_keep, config, True).answers()
    assert_same(config, straight("fsdp").config)


def test_background_checkpoints_change_nothing(
    settings: Settings, straight: Callable[[str], Straight]
) -> None:
    """Their processes talk to each other while the training does."""
    config = settings(
        "behind",
        log={"every": 1},
        checkpoint={"every": 2, "keep_last": 9, "background": True},
        parallel=KINDS["fsdp"],
    )
    Processes(2, train_and_keep, config).answers()
    assert [c.step for c in checkpoints_of(Path(config.out), config).all()] == list(range(4, 21, 2))
    assert_same(config, straight("fsdp").config, steps=(10, 20))


def _command(folder: Path, arguments: list[str]) -> None:
    run_command(folder / f"said-{os.environ['RANK']}.txt", arguments)


def test_torchrun(settings: Settings, tmp_path: Path) -> None:
    """As people start it; stopped by SIGTERM to torchrun, which passes it on, and resumed to the end."""
    config = settings(steps=40, log={"every": 1}, parallel=KINDS["fsdp"])
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    started = subprocess.Popen(
        [sys.executable, *torchrun, "-m", "grmoe", "train", str(path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stderr is not None
    seen = []
    for line in started.stderr:
        seen.append(line)
        if line.startswith("step 3:"):
            break
    started.send_signal(signal.SIGTERM)
    _, said = started.communicate(timeout=60)
    assert started.returncode != 0, "".join(seen) + said
    assert said.count("SIGTERM: stopped after step") == 1, "".join(seen) + said
    assert f"Continue with: grmoe train --resume out={config.out}" in said
    [kept] = checkpoints_of(Path(config.out), config).all()
    assert 3 <= kept.step < 40
    assert kept.meta["processes"] == 2

    # The same command by processes that need not import everything again.
    assert Processes(2, _command, tmp_path, ["train", "--resume", f"out={config.out}"]).join() == [0, 0]
    assert list(losses(config)) == list(range(1, 41))
    first, second = ((tmp_path / f"said-{rank}.txt").read_text() for rank in range(2))
    assert "Validation perplexity" in first
    assert "step 40:" in first
    assert second == ""  # one speaks
