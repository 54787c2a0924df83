"""From a run to a folder that Hugging Face loads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import MESSAGE, largest_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grmoe.routing import routers
from grmoe.runs.about import about
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export
from grmoe.runs.folder import saved_config
from grmoe.runs.open import open_model
from grmoe.train.loop import train

Settings = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def run(make_settings: Callable[[Path], Settings], tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = make_settings(tmp_path_factory.mktemp("export"))
    config = make(steps=8, validation={"every": 4}, checkpoint={"every": 4})
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
    (run / "dial").mkdir()  # of a dial that stopped
    assert told(run)[0]["dial"] == "not turned yet"
    (run / "dial").rmdir()
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


def test_an_exported_model_is_not_exported_again(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "model", "8")
    for out in (
        tmp_path / "model" / "model",
        tmp_path / "again",
    ):  # the first is where the command would write
        with pytest.raises(ValueError, match="model is an exported model already; this command takes a run"):
            export(tmp_path / "model", out)


def test_the_current_folder_takes_a_model(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    for _ in range(2):  # the second time it holds a model
        export(run, Path())
        assert AutoModelForCausalLM.from_pretrained(".").config.num_experts == 4
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    card = (tmp_path / "mine/README.md").read_text()
    assert "# mine\n" in card
    assert 'from_pretrained("mine"' in card


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


def notes(out: Path) -> dict[str, str]:
    (out / ".git").mkdir(exist_ok=True)
    kept = {".git/HEAD": "ref: main", "notes.txt": "mine", ".gitattributes": "x", "lora.safetensors": "other"}
    for name, text in kept.items():
        (out / name).write_text(text)
    return kept


def test_a_second_export_replaces_its_own_files_only(run: Path, tmp_path: Path) -> None:
    """It deleted what else lay there: the .git of a clone, notes."""
    out = tmp_path / "model"
    export(run, out, "4")
    kept = notes(out)
    (out / "model-00001-of-00002.safetensors").write_text("of a larger model")
    (out / "model.safetensors.index.json").write_text("{}")
    export(run, out, "8", dtype=torch.float32)
    assert {name: (out / name).read_text() for name in kept} == kept
    assert [p.name for p in out.glob("model*.safetensors*")] == ["model.safetensors"]
    want, got = open_model(run, "8").model.state_dict(), open_model(out).model.state_dict()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert [p.name for p in tmp_path.glob("model*")] == ["model"]


@pytest.mark.parametrize("call", [1, 4])
def test_an_export_that_was_cut_off_does_not_open_and_is_completed(
    call: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While files move into a folder that holds an older model: no mixture of the two."""
    out = tmp_path / "model"
    export(run, out, "4")
    kept, left, replace = notes(out), [call], os.replace

    def stop(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        replace(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("grmoe.files.os.replace", stop)
        with pytest.raises(KeyboardInterrupt):
            export(run, out, "8")
    with pytest.raises(ValueError, match="neither a run of `grmoe train` nor an exported model"):
        open_model(out)
    export(run, out, "8")
    assert open_model(out).model.dtype == torch.bfloat16
    assert {name: (out / name).read_text() for name in kept} == kept
    assert [p.name for p in tmp_path.glob("model*")] == ["model"]


@pytest.mark.parametrize("size", [0, 2**14], ids=["nothing fits", "the weights do not fit"])
def test_a_full_disk_is_named_with_the_folder(size: int, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    with largest_file(size), pytest.raises(OSError, match=f"cannot write {out}: .*{MESSAGE}"):
        export(run, out)
    assert not list(tmp_path.iterdir())


def test_saving_again_elsewhere_needs_no_checksums(run: Path, tmp_path: Path) -> None:
    """Weights that a Trainer writes over an export are no damage."""
    export(run, tmp_path / "model", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.lm_head.weight.data += 1
    model.save_pretrained(tmp_path / "model")
    assert torch.equal(open_model(tmp_path / "model").model.lm_head.weight, model.lm_head.weight)
