"""Opening runs and exported folders alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grmoe.routing import routers
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export
from grmoe.runs.open import open_model
from grmoe.train.loop import train


def test_a_run_and_its_export_are_one_model(settings: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = settings(steps=4, checkpoint={"every": 2}, data={"sequence_length": 16})
    train(config)
    export(Path(config.out), tmp_path / "model", "last", dtype=torch.float32)
    run, folder = open_model(config.out, "last", alpha=2.0), open_model(tmp_path / "model", alpha=2.0)
    assert (run.step, folder.step) == (4, None)
    assert run.data is not None
    assert run.data.split == "validation"
    assert folder.data is None
    assert run.length == folder.length == 16
    folder.model.config.max_position_embeddings = 8  # a context that is cut is the longest window
    folder.model.save_pretrained(tmp_path / "cut")
    run.tokenizer.save_pretrained(tmp_path / "cut")
    assert open_model(tmp_path / "cut").length == 8
    ids = run.tokenizer("one two three", return_tensors="pt").input_ids
    assert torch.equal(ids, folder.tokenizer("one two three", return_tensors="pt").input_ids)
    with torch.no_grad():
        assert torch.equal(run.model(ids).logits, folder.model(ids).logits)
    assert not run.model.training
    half = open_model(config.out, dtype=torch.bfloat16)
    assert half.model.lm_head.weight.dtype == torch.bfloat16
    assert routers(half.model)[0].frames.dtype == torch.float32
    with pytest.raises(ValueError, match="neither a run"):
        open_model(tmp_path)


def test_alpha_of_a_router_without_a_dial_is_refused(
    settings: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = settings(steps=1, model={"router": "hash"}, elastic={"unit": "off"})
    train(config)
    with pytest.raises(ValueError, match="a hash router has no dial"):
        open_model(config.out, "last", alpha=2.0)
