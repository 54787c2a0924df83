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
from grmoe.routing import Dense, Routing, RoutingMetrics, Selection, TopK
from grmoe.routing.counting import LoadCounter
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
        "loss", "router_loss", "overlap", "norm", "lr", "alpha", "tokens_per_second", "flops_per_token", "mfu",
        "memory_gb", "entropy", "load_cv", "min_load", "collapsed_layers", "collapsed_layers_paper", "leading_cv",
        "leading_min_load", "experts_per_token", "max_overlap", "seconds_left",
    )  # fmt: skip
    assert all(key in lines[0] for key in wanted)
    assert sum(lines[0]["layers"][0]["load"]) == pytest.approx(lines[0]["experts_per_token"], abs=1e-9)
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
    counter = LoadCounter(probs.shape[-1])
    selected = selection(probs)
    weights, zero = torch.where(selected, probs, 0.0), probs.new_zeros(())
    counter.add(Routing(logits=probs.log(), probs=probs, selected=selected, weights=weights, aux_loss=zero))
    return counter.read()


def test_load_is_of_the_tokens_received() -> None:
    """A layer where expert 0 always leads, and one where expert 3 receives a single token."""
    T, N = 300, 4
    led = torch.full((T, N), 0.05)
    led[:, 0], led[torch.arange(T), torch.arange(T) % 3 + 1] = 0.6, 0.3
    starved = torch.randn(T, N, generator=torch.Generator().manual_seed(0)).softmax(-1)
    starved[:, 3] = 0.0
    starved[0, 3] = 1.0
    layers = [metrics_of(led, TopK(2)), metrics_of(starved, TopK(2))]
    line = log.routing_line(layers)
    for name in ("load_cv", "leading_cv", "experts_per_token", "entropy"):
        assert line[name] == sum(getattr(m, name) for m in layers) / 2
    assert line["min_load"] == 1 / T == min(layers[1].load)
    assert line["leading_min_load"] == 0.0
    assert (
        line["collapsed_layers"] == line["collapsed_layers_paper"] == 1
    )  # by the leading experts it would be two
    for entry, m in zip(line["layers"], layers, strict=True):
        for name in ("load", "load_cv", "leading_load", "leading_cv", "gate_load"):
            assert entry[name] == getattr(m, name)
    assert f"CV {line['load_cv']:.2f}  min load 0.003" in log.describe_load(line)


def test_a_dense_layer_is_described_by_its_leading_experts() -> None:
    probs = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
    probs[:, 3] = 0.0
    for selection in (Dense(), TopK(4)):  # the number of experts computed matters, not the policy's name
        m = metrics_of(probs, selection)
        line = log.routing_line([m])
        assert (line["load_cv"], line["min_load"], line["collapsed_layers"]) == (0.0, 1.0, 0)
        assert (line["leading_cv"], line["leading_min_load"]) == (m.leading_cv, 0.0)
        assert log.describe_load(line) == f"leading CV {m.leading_cv:.2f}  leads at least 0.000"
    mixed = log.routing_line([m, metrics_of(probs, TopK(2))])
    assert log.describe_load(mixed).startswith("CV ")


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
    assert [row[0] for row in table.rows] == ["grmoe", "softmax"]
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
    assert [row[0] for row in table.rows] == [str(run) for run in runs]
    assert [row[4] for row in table.rows] == ["–", "–"]


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
