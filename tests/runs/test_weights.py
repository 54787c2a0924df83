"""Which weights a folder holds: the same for copies, another for any other weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from grmoe.runs.about import about
from grmoe.runs.checkpoint import Checkpoints
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export
from grmoe.runs.open import open_model
from grmoe.runs.results import load_results, results_folder, save_results
from grmoe.runs.weights import fingerprint
from grmoe.train.loop import train


def checkpoint(folder: Path, seed: int, moment: float = 0.0) -> Path:
    weight = torch.randn(20, 30, generator=torch.Generator().manual_seed(seed))
    state = {"model": {"a": weight}, "moments": {"a": {"m": torch.full((9,), moment)}}}
    return Checkpoints(folder).save(3, state).path


def test_of_a_checkpoint(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "a", seed=0)
    assert len(fingerprint(first)) == 16
    assert fingerprint(first) == fingerprint(checkpoint(tmp_path / "b", seed=0, moment=1.0))
    assert fingerprint(first) == fingerprint(Path(shutil.copytree(first, tmp_path / "copy")))
    assert fingerprint(first) != fingerprint(checkpoint(tmp_path / "c", seed=1))


@pytest.mark.parametrize("numbers", [1, 1000, 200_000])
def test_of_an_exported_model(numbers: int, tmp_path: Path) -> None:
    def exported(name: str, seed: int) -> Path:
        (tmp_path / name).mkdir()
        weights = torch.randn(numbers, generator=torch.Generator().manual_seed(seed))
        save_file({"a": weights}, tmp_path / name / "model.safetensors")
        return tmp_path / name

    assert fingerprint(exported("a", 0)) == fingerprint(exported("b", 0))
    assert fingerprint(tmp_path / "a") != fingerprint(exported("c", 1))


def test_one_small_tensor_between_large_ones_counts(tmp_path: Path) -> None:
    """As of an adapter of the attention that was merged into a model of large experts."""
    weights = {name: torch.zeros(300_000 if name in "ac" else 9) for name in "abc"}
    save_file(weights, tmp_path / "model.safetensors")
    before = fingerprint(tmp_path)
    weights["b"][8] = 1.0
    save_file(weights, tmp_path / "model.safetensors")
    assert fingerprint(tmp_path) != before


def test_what_cannot_be_read_has_none(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) == ""
    assert fingerprint(tmp_path / "nowhere") == ""
    for text in ("{", "[]", '{"tensors": 3}', '{"tensors": {"model.a": {"dtype": 1}}}'):
        (tmp_path / "index.json").write_text(text)
        assert fingerprint(tmp_path) == ""
    (tmp_path / "index.json").unlink()
    for half in (b"", b"\xff" * 20, (2).to_bytes(8, "little") + b"[]"):
        (tmp_path / "model.safetensors").write_bytes(half)
        assert fingerprint(tmp_path) == ""


CURVE = [
    {"experts_per_token": 1.0, "tau": 0.1, "alpha": 1.0, "cap": 2},
    {"experts_per_token": 2.0, "tau": 1.0, "alpha": 1.0, "cap": 2},
]
BODY = {"curve": CURVE, "budget": None, "asked": "", "chosen": {"experts_per_token": 2.0, "perplexity": 9.0}}


def test_a_run_that_is_started_again_does_not_inherit_the_dial_of_the_old_one(
    make_settings: Callable[[Path], Callable[..., TrainConfig]], tmp_path: Path
) -> None:
    settings = make_settings(tmp_path)
    config = settings(steps=2)
    run = Path(config.out)
    train(config)
    save_results(open_model(run), "dial", BODY, results_folder(run, "dial"), card="## The dial")
    assert open_model(run).model.config.budget_curve == CURVE
    export(run, tmp_path / "first")
    assert "## The dial" in (tmp_path / "first/README.md").read_text()
    shutil.rmtree(run / "checkpoints")
    train(settings(steps=2, seed=7))  # as many steps
    assert open_model(run).model.config.budget_curve is None
    export(run, tmp_path / "second")
    assert "## The dial" not in (tmp_path / "second/README.md").read_text()
    rows = [row for row in about(run)[1].rows if row[0] == "dial"]
    assert "of other weights" in str(rows)
    # Results of an earlier version name no weights: the step decides.
    path = results_folder(run, "dial") / "results.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "weights"}))
    assert load_results(path, "dial").weights == ""
    assert open_model(run).model.config.budget_curve == CURVE
