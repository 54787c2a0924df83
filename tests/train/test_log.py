"""What a run tells: lines, TensorBoard's names, pictures."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console
from torch import Tensor

from grmoe.model.count import count, short
from grmoe.parallel.world import World
from grmoe.routing import Dense, RoutingMetrics, Selection, TopK
from grmoe.routing.metrics import MetricsAccumulator
from grmoe.runs import folder as record
from grmoe.runs.config import TrainConfig
from grmoe.runs.folder import read_log
from grmoe.train import log
from grmoe.train.curves import draw_curves, summary
from grmoe.train.loop import train
from grmoe.train.setup import build_trainer

Settings = Callable[..., TrainConfig]


def test_lines_have_what_people_watch(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(steps=4, log={"every": 2})
    train(config)
    lines = read_log(Path(config.out))
    assert [(x["kind"], x["step"]) for x in lines] == [("train", 2), ("train", 4), ("validation", 4)]
    wanted = (
        "loss", "router_loss", "overlap", "norm", "lr", "alpha", "tokens_per_second", "mfu", "memory_gb", "entropy",
        "load_cv", "top1_cv", "min_load", "collapsed_layers", "experts_per_token", "max_overlap", "seconds_left",
    )  # fmt: skip
    assert all(key in lines[0] for key in wanted)
    assert abs(sum(lines[0]["layers"][0]["load"]) - 1) < 1e-9
    screen = capsys.readouterr().err
    assert "step 2: loss" in screen
    assert "tok/s" in screen
    assert "validation loss" in screen
    environment = json.loads((Path(config.out) / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert "revision" in environment


@pytest.mark.parametrize("terminal", [False, True])
def test_what_begins_is_said_before_the_first_step(
    terminal: bool, settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def console(**options: Any) -> Console:
        return Console(**options, force_terminal=terminal, width=400)

    monkeypatch.setattr(log, "Console", console)
    config = settings(steps=2, log={"every": 1}, model={"router": "softmax"})
    train(config)
    said = capsys.readouterr().err
    cost = count(build_trainer(config, World(0, 1, 0, torch.device("cpu"), None)).model.config)
    begins = (
        f"step 0 of 2: training a custom model with router softmax, {short(cost.total)} parameters, "
        f"{short(cost.active)} active per token, on CPU, fp32, not compiled; 256 tokens per step; "
        f"saving to {config.out}\n"
    )
    assert begins in said
    assert said.index(begins) < said.index("loss ")


def test_the_first_line_warns_of_compiling_and_counts_on(settings: Settings) -> None:
    trainer = build_trainer(settings(compile=True), World(0, 1, 0, torch.device("cpu"), None))
    said = log.describe_start(trainer, 10)
    assert said.startswith("step 10 of 20: ")
    assert "compiled (the first step may take minutes)" in said


def metrics_of(probs: Tensor, selection: Selection) -> RoutingMetrics:
    accumulator = MetricsAccumulator(probs.shape[-1])
    selected = selection(probs)
    accumulator.update(probs, torch.where(selected, probs, 0.0), selected)
    return accumulator.read()


def test_load_is_of_the_computed_experts() -> None:
    """A layer whose expert 0 always leads and one whose expert 3 is hardly ever computed."""
    T, N = 300, 4
    led = torch.full((T, N), 0.05)
    led[:, 0], led[torch.arange(T), torch.arange(T) % 3 + 1] = 0.6, 0.3
    starved = torch.randn(T, N, generator=torch.Generator().manual_seed(0)).softmax(-1)
    starved[:, 3] = 0.0
    starved[0, 3] = 1.0
    layers = [metrics_of(led, TopK(2)), metrics_of(starved, TopK(2))]
    line = log.routing_line(layers)
    assert line["load_cv"] == sum(m.computed_cv for m in layers) / 2
    assert line["top1_cv"] == sum(m.top1_cv for m in layers) / 2
    assert line["min_load"] == 1 / (2 * T) == min(layers[1].computed_load)
    assert line["collapsed_layers"] == 1  # by the leading experts it would be two
    assert all(m.collapsed for m in layers)
    for entry, m in zip(line["layers"], layers, strict=True):
        assert (entry["load"], entry["load_cv"]) == (m.computed_load, m.computed_cv)
        assert (entry["top1_load"], entry["top1_cv"]) == (m.top1_load, m.top1_cv)
        assert entry["soft_load"] == m.soft_load


def test_load_is_of_the_leading_experts_where_all_are_computed() -> None:
    probs = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
    probs[:, 3] = 0.0
    for selection in (Dense(), TopK(4)):  # it is the count that matters, not the policy's name
        m = metrics_of(probs, selection)
        assert m.computed_cv == 0.0
        line = log.routing_line([m])
        assert (line["load_cv"], line["min_load"], line["collapsed_layers"]) == (m.top1_cv, 0.0, 1)
        assert line["layers"][0]["load"] == m.top1_load
    mixed = log.routing_line([m, metrics_of(probs, TopK(2))])
    assert [entry["load"] == m.top1_load for entry in mixed["layers"]] == [True, False]


def test_names_for_tensorboard() -> None:
    line = {
        "kind": "train",
        "step": 3,
        "loss": 2.0,
        "mfu": None,
        "layers": [{"entropy": 1.0}],
        "collapsed": True,
    }
    assert log.flat(line) == {"train/loss": 2.0, "train/layers/0/entropy": 1.0}


def test_a_missing_logger_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"log\.wandb needs wandb; install with: pip install wandb"):
        train(settings(steps=2, log={"wandb": "project"}))


def test_curves_of_several_runs(settings: Settings, tmp_path: Path) -> None:
    runs = []
    for name, router in (("grmoe", "grassmann"), ("softmax", "softmax")):
        config = settings(name, steps=4, log={"every": 1}, model={"router": router})
        train(config)
        runs.append(Path(config.out))
    figure = draw_curves(runs, tmp_path / "pictures" / "curves.png", unigram=50.0)
    assert figure.read_bytes().startswith(b"\x89PNG")
    table = summary(runs)
    assert list(table.columns[0].cells) == ["grmoe", "softmax"]
    with pytest.raises(ValueError, match=r"no training log in .*nothing"):
        draw_curves([tmp_path / "nothing"], tmp_path / "x.png")


def test_runs_of_one_name_are_told_apart_and_text_may_be_gone(
    settings: Settings, prepared: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    runs = []
    for name in ("a/run", "b/run"):
        config = settings(name, steps=2, data={"path": str(data)})
        train(config)
        runs.append(Path(config.out))
    shutil.rmtree(data)
    table = summary(runs)
    assert list(table.columns[0].cells) == [str(run) for run in runs]
    assert list(table.columns[4].cells) == ["–", "–"]


def test_a_resumed_run_is_one_of_wandb_and_another_in_its_folder_is_not(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def init(**options: Any) -> MagicMock:
        begun.append(options["id"])
        return MagicMock()

    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setattr(wandb, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    times = iter(["2026-01-01T00:00:00+00:00", "2026-01-01T00:00:01+00:00", "2026-01-01T00:00:02+00:00"])
    whole = record.environment
    monkeypatch.setattr(record, "environment", lambda: whole() | {"started": next(times)})
    config = settings(steps=2, log={"wandb": "project"})
    train(config)
    checkpoints = Path(config.out) / "checkpoints"
    shutil.rmtree(checkpoints)
    train(settings(steps=2, log={"wandb": "project"}, checkpoint={"every": 1}))
    shutil.rmtree(checkpoints / "step-00000002")
    train(config, resume=True)
    assert begun[0] != begun[1]
    assert begun[1] == begun[2]
    assert begun[0] == "run-20260101T0000000000"  # W&B refuses colons
