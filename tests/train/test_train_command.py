"""`grmoe train`, `curves` and `export` as people call them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import Command
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.config import to_yaml
from grmoe.runs.config import TrainConfig
from grmoe.runs.open import open_model
from grmoe.train import loop
from grmoe.train.setup import Trainer
from grmoe.train.validate import Validation, validate

Settings = Callable[..., TrainConfig]
runner = CliRunner()


def written(config: TrainConfig) -> str:
    path = Path(config.out).with_suffix(".yaml")
    path.write_text(to_yaml(config))
    return str(path)


def start_training(config: TrainConfig, *arguments: str) -> Command:
    return Command(Path(config.out).with_suffix(".txt"), "train", written(config), *arguments)


def test_show_prints_a_file_one_could_use() -> None:
    shown = runner.invoke(app, ["train", "--show", "optim.lr=1e-3", "model.preset=tiny"])
    assert shown.exit_code == 0
    assert "lr: 0.001" in shown.stdout
    assert "preset: tiny" in shown.stdout
    assert "preset: tiny" in runner.invoke(app, ["train", "--show", "device=cpu"]).stdout


def test_a_name_with_a_slip_does_not_pass_for_a_resumed_run(settings: Settings) -> None:
    config = settings(steps=2)
    new = runner.invoke(app, ["train", written(config), "--resume"])
    assert new.exit_code == 0, new.output
    assert f"{config.out} has no checkpoint to resume from: this starts a new run." in new.output
    again = runner.invoke(app, ["train", written(config), "--resume"])
    assert "starts a new run" not in again.output


def test_from_text_to_a_model_folder(settings: Settings, tmp_path: Path) -> None:
    config = settings(steps=4)
    trained = runner.invoke(app, ["train", written(config), "optim.lr=2e-3"])
    assert trained.exit_code == 0, trained.output
    assert "Validation perplexity" in trained.output
    assert "unigram model" in trained.output
    assert (Path(config.out) / "curves.png").is_file()
    again = runner.invoke(app, ["train", written(config), "optim.lr=2e-3"])
    assert again.exit_code == 2
    assert "--resume" in again.output
    finished = runner.invoke(app, ["train", "--resume", f"out={config.out}"])  # its own config.yaml is enough
    assert finished.exit_code == 0, finished.output
    assert "had already reached its last step" in finished.output
    exported = runner.invoke(app, ["export", config.out, "--dtype", "fp32"])
    assert exported.exit_code == 0, exported.output
    assert (Path(config.out) / "model" / "model.safetensors").is_file()
    drawn = runner.invoke(app, ["curves", config.out, "--out", str(tmp_path / "c.png")])
    assert drawn.exit_code == 0
    assert (tmp_path / "c.png").is_file()


def test_a_run_that_lost_its_log_still_ends_well(settings: Settings) -> None:
    config = settings(steps=2)
    assert runner.invoke(app, ["train", written(config)]).exit_code == 0
    (Path(config.out) / "log.jsonl").unlink()
    again = runner.invoke(app, ["train", written(config), "--resume"])
    assert again.exit_code == 0, again.output
    assert f"{config.out}/log.jsonl has no lines to draw" in again.output
    assert "Next: grmoe dial" in again.output


def test_a_run_that_loses_its_log_on_the_way_still_says_how_good_it_is(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(steps=2)

    def removing(trainer: Trainer) -> Validation:
        (Path(config.out) / "log.jsonl").unlink()
        return validate(trainer)

    monkeypatch.setattr(loop, "validate", removing)
    done = runner.invoke(app, ["train", written(config)])
    assert done.exit_code == 0, done.output
    assert "Validation perplexity" in done.output
    assert "has no lines to draw" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.path=nowhere"], "nowhere/index.json is missing"),
        (["nothing.yaml"], "there is no configuration file nothing.yaml"),
        (["optim.rate=1"], "unknown key 'optim.rate'"),
        (["--batch-size", "4"], r"no option --batch-size .*settings have no dashes: batch_size=4"),
        (["--lr=1e-3", "steps=2"], r"no option --lr=1e-3 .*settings have no dashes: lr=1e-3"),
        (["--resum", "steps=2"], r"no option --resum; did you mean --resume\?"),
        (["--form=runs/a", "steps=2"], r"no option --form=runs/a; did you mean --from\?"),
        (["--fast", "steps=2"], r"no option --fast .*settings have no dashes: fast=…"),
        (["data.batch_size=7", "data.micro_batch_size=2"], "micro_batch_size must divide"),
        (["data.sequence_length=64"], "must be at most the model's 32, got 64"),
        (
            ["data.batch_size=100000"],
            "less than one batch of 100000 .*or smaller data.sequence_length or data.batch_size",
        ),
        (["model.preset=tinny"], "error: model.preset must be one of tiny, .*got 'tinny'"),
        (["parallel.expert=2"], "torchrun --nproc-per-node"),
        (["device=gpu"], "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["device=cuda:99"], "device must exist, got cuda:99"),
        (["model.num_key_value_heads=3"], "num_key_value_heads must divide num_attention_heads"),
    ],
)
def test_mistakes_are_one_line(settings: Settings, arguments: list[str], message: str) -> None:
    import re

    given = arguments if arguments[0].endswith("yaml") else [written(settings(steps=2)), *arguments]
    result = runner.invoke(app, ["train", *given])
    assert result.exit_code == 2
    assert re.search(message, result.output.replace("\n", " ")), result.output
    assert "Traceback" not in result.output


def test_a_signal_ends_with_a_checkpoint_and_how_to_go_on(settings: Settings) -> None:
    config = settings(steps=100_000, log={"every": 1}, optim={"warmup": 10})
    training = start_training(config)
    training.wait_for("\nstep 3:")
    assert training.process.pid is not None
    os.kill(training.process.pid, signal.SIGINT)
    assert training.wait() == 128 + signal.SIGINT
    said = training.said.read_text()
    assert "SIGINT: stopped after step" in said
    assert f"grmoe train --resume out={config.out}" in said.replace("\n", "")
    assert "Traceback" not in said


def test_killed_and_resumed_is_straight_to_the_bit(settings: Settings) -> None:
    """Twenty steps, against kill -9 after ten or a few more and the rest."""
    straight = settings("straight", log={"every": 1})
    assert start_training(straight).wait() == 0
    broken = settings("broken", log={"every": 1}, checkpoint={"every": 10})
    training = start_training(broken)
    checkpoint = Path(broken.out) / "checkpoints" / "step-00000010"
    while not checkpoint.exists():
        assert training.process.is_alive()
        time.sleep(0.002)
    training.kill()
    assert not (checkpoint.parent / "step-00000020").exists(), "killed too late to show anything"
    assert start_training(broken, "--resume").wait() == 0
    a, b = (open_model(Path(c.out), "last").model.state_dict() for c in (straight, broken))
    assert all(torch.equal(a[name], b[name]) for name in a)
