"""The study of recipes: jobs, what is measured, tables."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from counting import prepare_corpus
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.config import from_dict, load
from grmoe.model import preset
from grmoe.runs.config import TrainConfig
from grmoe.studies import elastic
from grmoe.studies.elastic import RECIPES, Plan, Recipe, Row, StudyError, settings_of, summary, table
from grmoe.train.loop import train

MODEL = {
    "preset": None, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "moe_every": 1, "num_experts": 4, "router_rank": 8, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip


def row(recipe: str, seed: int, setting: str, loss: float, **more: Any) -> Row:
    figures = {"experts_per_token": 1.5, "load_cv": 0.1, "min_load": 0.5, "collapsed": False} | more
    return Row(recipe=recipe, seed=seed, text="validation", setting=setting, loss=loss, **figures)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_a_configuration(recipe: str) -> None:
    config = load(TrainConfig, None, ["model.preset=small-fine", *RECIPES[recipe].settings])
    resolved = config.resolved()
    trained_at_one_budget = recipe in ("full", "one", "two", "four")
    assert resolved.elastic.on != trained_at_one_budget


def test_what_a_model_is_measured_at() -> None:
    assert list(settings_of(preset("tiny", num_experts_per_tok=1))) == ["top-1"]
    assert list(settings_of(preset("tiny"))) == ["top-1", "top-2", "mass 0.3", "mass 0.5", "mass 0.7"]
    fine = settings_of(preset("small-fine", num_experts_per_tok=6))
    assert list(fine)[:4] == ["top-1", "top-2", "top-4", "top-6"]
    assert (fine["mass 0.5"].tau, fine["mass 0.5"].cap, fine["top-4"].cap) == (0.5, 6, 4)


def test_differences_are_paired_by_seed_with_the_full_budget() -> None:
    rows = [row("full", s, "top-2", 3.0 + s) for s in (0, 1, 2)] + [row("full", 0, "top-1", 9.0)]
    rows += [
        row("one", s, "top-1", 3.5 + s + 0.1 * s, collapsed=s == 2, min_load=0.4 - 0.1 * s) for s in (0, 1, 2)
    ]
    rows += [row("one", 7, "top-1", 100.0)]  # no partner
    found = {(r["recipe"], r["setting"]): r for r in summary(rows, "validation", "full")}
    assert found["full", "top-2"]["over"] == 0
    one = found["one", "top-1"]
    assert one["over"] == pytest.approx(0.6)  # 0.5, 0.6, 0.7
    assert one["over_interval"] == pytest.approx(0.248, abs=1e-3)  # t(2) · 0.1 / √3
    assert (one["seeds"], one["collapsed"], one["min_load"]) == (4, 1, pytest.approx(0.2))
    lines = table(rows[:4], "validation", {"full": "full budget only"}).markdown().splitlines()
    assert len(lines) == 2 + 2
    assert "full budget only" in lines[2]
    assert "+0.0000" in lines[2]


def test_jobs_are_trained_measured_kept_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line, with real training, but in this process: starting two more takes ten seconds."""

    really = subprocess.run

    def in_process(command: list[str], **options: Any) -> Any:
        if command[1:4] != ["-m", "grmoe", "train"]:
            return really(command, **options)
        train(load(TrainConfig, Path(command[4]), command[5:-1]))
        return subprocess.CompletedProcess(command, 0)

    class Serial:
        def __init__(self, count: int) -> None:
            self.map = map

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

    class Here:
        exitcode = 0

        def __init__(self, target: Any, args: Any) -> None:
            self.start, self.join = (lambda: target(*args)), lambda: None

    monkeypatch.setattr(elastic, "ThreadPoolExecutor", Serial)  # signals are handled in the main thread alone
    monkeypatch.setattr(elastic.subprocess, "run", in_process)
    monkeypatch.setattr(elastic, "get_context", lambda kind: SimpleNamespace(Process=Here))
    data, kept = prepare_corpus(tmp_path), row("one", 0, "top-1", 9.0)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "one-0.json").write_text(json.dumps([asdict(kept)]))  # of an earlier start
    arguments = [
        "elastic", f"data.path={data}", "steps=3", "device=cpu", "data.batch_size=4", "validation.every=0",
        "validation.tokens=100", "checkpoint.every=0", *(f"model.{k}={json.dumps(v)}" for k, v in MODEL.items()),
        "--recipe", "token_mass", "--recipe", "one", "--seeds", "1", "--tokens", "256", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = [Row(**r) for r in content["rows"]]
    assert [(r.recipe, r.setting) for r in rows] == [
        ("token_mass", name) for name in ("top-1", "top-2", "mass 0.3", "mass 0.5", "mass 0.7")
    ] + [("one", "top-1")]
    assert rows[-1] == kept
    assert [r.experts_per_token for r in rows[:2]] == [1.0, 2.0]
    assert 0 <= min(r.min_load for r in rows) <= 1
    assert all(r.load_cv >= 0 for r in rows)
    assert "per token, mass" in done.output
    saved = (tmp_path / "out" / "token_mass-0" / "config.yaml").read_text()
    assert "unit: token" in saved

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a finished job must not run again")

    monkeypatch.setattr(subprocess, "run", forbidden)
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == content


def test_a_failed_job_is_named_and_the_others_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(base=from_dict(TrainConfig, {}), out=tmp_path, recipes=("full", "one"), seeds=1)
    (tmp_path / "one-0.json").write_text("[]")
    asked = []

    def fails(command: list[str], stdout: Any, **_: Any) -> Any:
        asked.append(command)
        stdout.write("first\nno data\n")
        stdout.flush()
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(elastic.subprocess, "run", fails)
    with pytest.raises(StudyError, match=r"full, seed 0: training ended with status 3:\nfirst\nno data"):
        elastic.run(plan)
    (command,) = asked
    assert command[3:] == [
        "train", str(tmp_path / "base.yaml"), f"out={tmp_path / 'full-0'}", "seed=0", "elastic.unit=off", "--resume",
    ]  # fmt: skip


def test_recipes_by_name_and_of_ones_own(tmp_path: Path) -> None:
    base = from_dict(TrainConfig, {})
    mine = "soft-z: model.router=softmax  elastic.unit=off"
    plan = Plan(base=base, out=tmp_path, recipes=("token_mass", mine))
    assert list(plan.found) == ["token_mass", "soft-z"]
    assert plan.found["soft-z"] == Recipe("soft-z", ("model.router=softmax", "elastic.unit=off"))
    assert plan.found["token_mass"] is RECIPES["token_mass"]
    for wrong, message in (
        (("?",), "recipe must be one of 'full'"),
        (("a b: x=1",), "a recipe of your own must have a new name"),
        (("full: x=1",), "a recipe of your own must have a new name"),
        ((), "recipes must name at least one"),
        (("a: x=1", "a: x=2"), "recipes must have different names"),
    ):
        with pytest.raises(ValueError, match=message):
            Plan(base=base, out=tmp_path, recipes=wrong)


def test_a_folder_belongs_to_one_study(tmp_path: Path) -> None:
    """A finished job is taken as it is, so it must have been of the same settings."""
    base = from_dict(TrainConfig, {})
    mine = Plan(base=base, out=tmp_path, recipes=("a: x=1",), seeds=1)
    elastic._claim(mine)
    elastic._claim(replace(mine, seeds=3, at_once=2, recipes=("b: x=2",)))  # more of the same study
    elastic._claim(mine)
    for other in (
        {"recipes": ("a: x=2",)},
        {"recipes": ("b: x=1",)},
        {"base": from_dict(TrainConfig, {"steps": 7})},
        {"texts": ("other.txt",)},
        {"tokens": 512},
    ):
        with pytest.raises(ValueError, match="holds a study with other settings; give another folder"):
            elastic._claim(replace(mine, **other))  # type: ignore[arg-type]
