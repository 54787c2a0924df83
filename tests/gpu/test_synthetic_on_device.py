"""The synthetic study on a CUDA device: every method, several rates and settings in one program."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grmoe.studies.synthetic import Config, Plan, run
from grmoe.studies.synthetic.methods import METHODS
from grmoe.studies.synthetic.training import Training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TINY = Config(
    seeds=3,
    num_experts=4,
    dim=32,
    rank=6,
    eval_tokens=256,
    dial_tokens=64,
    training=Training(steps=4, batch=64),
    rates=(0.3, 1.0, 3.0),
    screening_seeds=2,
    device="cuda",
)


def test_every_method_runs_and_is_read_back(tmp_path: Path) -> None:
    result = run(Plan(out=tmp_path, config=TINY))
    assert [setting.setting.name for setting in result.settings] == ["easy", "hard", "skewed"]
    for setting in result.settings:
        assert [m.method for m in setting.methods] == [m.key for m in METHODS]
        for method in setting.methods:
            assert all(math.isfinite(s.loss) for s in method.scores)
            assert method.rate in TINY.rates
    reports: list[int] = []
    again = run(Plan(out=tmp_path, config=replace(TINY, device="cpu")), lambda *report: reports.append(1))
    assert len(reports) == len(METHODS)  # nothing was trained
    assert again.settings == result.settings
