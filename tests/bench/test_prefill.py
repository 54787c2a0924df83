"""`grmoe bench prefill`: experts as asked, FLOPs as counted, shares as defined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from grmoe.bench import prefill as bench
from grmoe.bench.measure import Row
from grmoe.bench.models import ModelShape
from grmoe.cli import app
from grmoe.model import PRESETS, count
from grmoe.probe.timing import Times

MICRO: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "router_rank": 4,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "micro", MICRO)


def shape() -> ModelShape:
    return ModelShape("micro", 8, 32, "silu")


def test_contenders_compute_what_their_names_say() -> None:
    for contender in bench.contenders(shape(), torch.device("cpu"), torch.float32):
        runs = contender.build()
        # 256 tokens in one layer: the mean moves in steps of 1/256
        assert runs.facts["experts"] == pytest.approx(float(contender.name.split()[0]), abs=0.01)
        assert runs.timed[bench.MODE]().shape == (8, 1, 64)  # type: ignore[attr-defined]


def test_flops_of_two_experts_are_the_models_less_its_output_matrix() -> None:
    cost = count(shape().config("grassmann"), 32)
    two, one = (bench.flops_per_token(shape(), n) for n in (2.0, 1.0))
    assert two == pytest.approx(cost.forward_flops - 2 * 64 * 32 * 31 / 32)
    assert two - one == pytest.approx(2 * 3 * 32 * 32)  # one SwiGLU expert: three matrices of 32 × 32


def test_shares_follow_from_the_times() -> None:
    rows = [Row(f"{n:.2f} experts", "ours", "grmoe", facts={"flops": f}) for n, f in ((2, 10.0), (1, 8.0))]
    for row, ms in zip(rows, (4.0, 3.4), strict=True):
        row.times[bench.MODE] = Times([[ms, ms], [ms, ms]])
    faster, share = bench.compare(shape(), rows).ratios
    assert faster.value == pytest.approx(4 / 3.4)
    assert share.value == pytest.approx((1 - 3.4 / 4) / (1 - 8 / 10))
    rows[1].facts["flops"] = 10.0  # of a prompt so short that both compute the same
    (faster,) = bench.compare(shape(), rows).ratios
    assert faster.value == pytest.approx(4 / 3.4)


def test_command(tmp_path: Path) -> None:
    run = ["bench", "prefill", "--preset", "micro", "--device", "cpu", "--length", "32", "--rounds", "1"]
    result = CliRunner().invoke(app, [*run, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "results.json").read_text())["shapes"][0]["rows"]
    assert [row["contender"] for row in rows] == [f"{n:.2f} experts" for n in bench.COUNTS]
    assert (tmp_path / "prefill.png").is_file()
