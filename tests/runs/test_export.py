"""From a run to a folder that Hugging Face loads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grmoe.routing import routers
from grmoe.runs.about import about
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export
from grmoe.runs.folder import saved_config
from grmoe.runs.open import open_model
from grmoe.train.loop import train

Settings = Callable[..., TrainConfig]


@pytest.fixture
def run(settings: Settings) -> Path:
    config = settings(steps=8, validation={"every": 4}, checkpoint={"every": 4})
    train(config)
    return Path(config.out)


def check_about(run: Path, out: Path) -> None:
    """`grmoe info` of a run and of its export: what it is, how it was trained, what to do next."""

    def told(folder: Path) -> tuple[dict[str, str], str]:
        config, table, following = about(str(folder))
        assert (config.num_experts, config.hidden_size) == (4, 32)
        assert table is not None
        return dict(table.rows), following  # type: ignore[arg-type]

    facts, following = told(run)
    assert facts["what"] == "a run of `grmoe train`"
    assert facts["trained"] == "8 of 8 steps, finished"
    assert facts[""] == "8 sequences per step, learning rate 0.003"
    assert re.fullmatch(r"\d+\.\d\d at step [48], the best checkpoint", facts["validation perplexity"])
    assert "CPU, grmoe" in facts["started"]
    assert facts["dial"] == "not turned yet"
    assert following == f"grmoe dial {run} --write"
    facts, following = told(out)
    assert facts["what"] == "an exported model"
    assert facts["weights"].endswith(" MB, float32")
    assert float(facts["validation perplexity"].removesuffix(", of its training")) > 1
    assert facts["routing"] == "α 2, the 2 most probable experts per token"
    assert following == f"grmoe dial {out} --text FILE --write"
    # What is missing or unfinished is said, not raised.
    (run / "environment.json").unlink()
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("steps: 8", "steps: 9"))
    facts, following = told(run)
    assert "started" not in facts
    assert (facts["trained"], following) == (
        "8 of 9 steps, not finished",
        f"grmoe train out={run} --resume",
    )
    with pytest.raises(
        ValueError, match=r"holds prepared text, not a model; train one: grmoe train data\.path="
    ):
        about(saved_config(run).data.path)
    with pytest.raises(ValueError, match="or the folder of a run or a saved model, got nothing"):
        about("nothing")


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
    check_about(run, out)
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
