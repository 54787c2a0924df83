"""A run whose prepared data moved, vanished or changed: its model is still there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export
from grmoe.runs.folder import vocabulary
from grmoe.runs.open import open_model
from grmoe.train.loop import train

TEXT = "one two three four five six seven eight nine zero " * 100


def call(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def run(settings: Callable[..., TrainConfig], data: Path) -> Path:
    config = settings(steps=4, data={"path": str(data)})
    train(config)
    return Path(config.out)


def test_the_export_is_the_same_without_the_data(run: Path, data: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "before", dtype=torch.float32)
    data.rename(tmp_path / "elsewhere")
    export(run, tmp_path / "after", dtype=torch.float32)
    names = sorted(p.name for p in (tmp_path / "before").iterdir())
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} < set(names)
    for name in names:
        a, b = ((tmp_path / which / name).read_bytes() for which in ("before", "after"))
        assert (a.replace(b"before", b"after") if name == "README.md" else a) == b, name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    index = json.loads((tmp_path / "elsewhere" / "index.json").read_text())["tokenizer"]
    assert model.config.vocab_size == index["vocab_size"]
    assert model.config.eos_token_id == index["end_of_text"]
    assert AutoTokenizer.from_pretrained(tmp_path / "after").eos_token_id == index["end_of_text"]
    assert vocabulary(run / "tokenizer") == (index["vocab_size"], index["end_of_text"])


def test_another_folder_than_that_of_the_training_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the run was trained, its text has a relative path."""
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(tmp_path / "data"), "data"))
    monkeypatch.chdir(tmp_path)
    assert open_model(run).data is not None
    monkeypatch.chdir(run)
    status, said = call("eval", ".")
    assert status == 2
    assert f"(data/index.json is missing: there is no folder data in {run};" in said


def test_what_needs_text_asks_for_it_and_takes_it(run: Path, data: Path, tmp_path: Path) -> None:
    with_data = open_model(run)
    shutil.rmtree(data)
    opened = open_model(run)
    assert with_data.data is not None
    assert opened.data is None
    ids = opened.tokenizer("one two three", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(opened.model(ids).logits, with_data.model(ids).logits)
    for command in ("dial", "analyze", "eval"):
        status, said = call(command, run, "--out", tmp_path / command)
        assert status == 2
        assert f"{run} has no held-out text ({data}/index.json is missing" in said
        assert "give --text FILE" in said
    (tmp_path / "text.txt").write_text(TEXT)
    for command in ("dial", "analyze", "eval"):
        options = ["--tokens", 512, "--out", tmp_path / command]
        status, said = call(command, run, "--text", tmp_path / "text.txt", *options)
        assert status == 0, said


def test_other_data_in_the_same_place_are_not_taken_for_its_own(run: Path, data: Path) -> None:
    index = json.loads((data / "index.json").read_text())
    (data / "index.json").write_text(json.dumps(index))  # the same content, and not the same file
    opened = open_model(run)
    assert opened.data is None
    with pytest.raises(ValueError, match=r"is not the data that the run was trained on\): give --text FILE"):
        opened.held_out()


def test_a_run_begun_without_a_tokenizer_of_its_own(run: Path, data: Path, tmp_path: Path) -> None:
    weights = open_model(run).model.state_dict()
    shutil.rmtree(run / "tokenizer")
    loaded = open_model(run)
    assert loaded.tokenizer_folder == data / "tokenizer"
    assert all(torch.equal(t, loaded.model.state_dict()[name]) for name, t in weights.items())
    data.rename(tmp_path / "elsewhere")
    status, said = call("export", run, "--out", tmp_path / "model")
    assert status == 2
    assert "index.json is missing" in said
    assert "Traceback" not in said


def test_a_resumed_run_gets_its_tokenizer_and_a_wider_vocabulary_stays(
    settings: Callable[..., TrainConfig], data: Path
) -> None:
    config = settings(
        steps=4, data={"path": str(data)}, model={"vocab_size": 320}, checkpoint={"every": 2, "keep_last": 3}
    )
    train(config)
    run = Path(config.out)
    shutil.rmtree(run / "tokenizer")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    train(config, resume=True)
    shutil.rmtree(data)
    assert open_model(run, "last").model.config.vocab_size == 320
    assert not list(run.glob(".writing*"))
