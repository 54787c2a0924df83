"""What a run tells: lines, TensorBoard's names, pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grmoe.train import log
from grmoe.train.config import TrainConfig
from grmoe.train.curves import draw_curves
from grmoe.train.loop import train
from grmoe.train.record import read_log

Settings = Callable[..., TrainConfig]


def test_lines_have_what_people_watch(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(steps=4, log={"every": 2})
    train(config)
    lines = read_log(Path(config.out))
    assert [(x["kind"], x["step"]) for x in lines] == [("train", 2), ("train", 4), ("validation", 4)]
    wanted = (
        "loss", "router_loss", "overlap", "norm", "lr", "alpha", "tokens_per_second", "mfu", "memory_gb", "entropy",
        "load_cv", "min_load", "experts_per_token", "max_overlap", "seconds_left",
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
    with pytest.raises(ValueError, match=r"no training log in .*nothing"):
        draw_curves([tmp_path / "nothing"], tmp_path / "x.png")
