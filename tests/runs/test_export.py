"""From a run to a folder that Hugging Face loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grmoe.routing import routers
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export
from grmoe.runs.open import open_model
from grmoe.train.loop import train

Settings = Callable[..., TrainConfig]


@pytest.fixture
def run(settings: Settings) -> Path:
    config = settings(steps=8, validation={"every": 4}, checkpoint={"every": 4})
    train(config)
    return Path(config.out)


def test_the_folder_is_the_checkpoint(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    used = export(run, out, "last", alpha=2.0, dtype=torch.float32)
    assert used.step == 8
    model = AutoModelForCausalLM.from_pretrained(out)
    ours = open_model(run, "last").model
    ours.set_alpha(2.0)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("three four five", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "three four five"
    with torch.no_grad():
        assert torch.equal(model(ids).logits, ours(ids).logits)
    assert model.alpha == [2.0]
    card = (out / "README.md").read_text()
    assert "validation perplexity" in card
    assert json.loads((out / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"]


def test_bf16_leaves_routers_alone(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert model.lm_head.weight.dtype == torch.bfloat16
    ours = open_model(run).model
    for a, b in zip(routers(model), routers(ours), strict=True):
        assert torch.equal(a.frames, b.frames)
        assert torch.equal(a.log_prior, b.log_prior)


def test_steps_by_number_and_wrong_ones_by_name(run: Path, tmp_path: Path) -> None:
    assert export(run, tmp_path / "four", "4").step == 4
    with pytest.raises(ValueError, match="best, last or one of the steps 4, 8, got '5'"):
        export(run, tmp_path / "five", "5")
    with pytest.raises(ValueError, match="holds no run"):
        export(tmp_path, tmp_path / "none")


def test_nothing_of_ours_is_overwritten_but_an_export(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    export(run, out)
    export(run, out)  # again is fine
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not an exported model"):
        export(run, other)
    assert (other / "chapter.txt").read_text() == "precious"
