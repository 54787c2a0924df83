"""`grmoe bench scale`: steps of the trainer, in fp32 and in bf16, and the paper's training priced from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import prepare_corpus
from typer.testing import CliRunner

from grmoe.bench import scale as bench
from grmoe.bench.measure import Row
from grmoe.bench.models import ModelShape
from grmoe.cli import app
from grmoe.data import TokenDataset
from grmoe.model import PRESETS
from grmoe.probe.timing import Times

MICRO: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "router_rank": 4,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
RUN = ["bench", "scale", "--preset", "micro", "--device", "cpu", "--batch", "4", "--length", "32"]


@pytest.fixture(autouse=True)
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "micro", MICRO)


def run(out: Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*RUN, *options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    (shape,) = json.loads((out / "micro" / "results.json").read_text())["shapes"]
    return shape  # type: ignore[no-any-return]


def test_command(tmp_path: Path) -> None:
    found = run(tmp_path, "--steps", "40")
    (row,) = found["rows"]
    assert row["failure"] is None
    assert len(row["losses"]) == found["steps"] == 40
    assert row["first loss"] == pytest.approx(row["losses"][0], abs=1e-4)
    assert row["last loss"] == pytest.approx(sum(row["losses"][-2:]) / 2, abs=1e-4)
    assert row["last loss"] < row["first loss"]
    (times,) = row["times"]["step"]["rounds_ms"]
    assert len(times) == 30  # the first quarter settles
    assert row["tokens/s"] == pytest.approx(128e3 / row["times"]["step"]["median_ms"])
    assert 0 <= row["min load"] <= 1
    assert row["bytes per parameter"] == 16
    assert "paper" not in found


@pytest.mark.parametrize("vocabulary", [64, 4096])
def test_the_vocabulary_is_the_presets_unless_the_text_has_more(
    vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a text of few tokens made the head smaller, and with it the price of a step."""
    text = prepare_corpus(tmp_path)
    monkeypatch.setitem(PRESETS, "micro", MICRO | {"vocab_size": vocabulary})
    built = []
    real = bench.build
    monkeypatch.setattr(bench, "build", lambda *given: built.append(real(*given)) or built[-1])
    found = run(tmp_path / "out", "--steps", "4", "--data", str(text))
    assert found["rows"][0]["failure"] is None
    assert found["data"] == text.name
    ((trainer, _),) = built
    own = TokenDataset(text).vocab_size
    assert 64 < own < 4096
    assert trainer.model.config.vocab_size == max(own, vocabulary)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "9b"], "preset must be one of 'tiny', 'small', '350m'"),
        (["--data", "nowhere"], "there is no folder nowhere in /"),
    ],
)
def test_mistakes_end_it_before_anything_is_trained(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, another preset was trained first, and missing data was a row of the table."""
    monkeypatch.setattr(bench, "train", lambda *given: pytest.fail("it trained"))
    result = CliRunner().invoke(app, [*RUN, *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_built_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.build

    def build(shape: ModelShape, *given: Any) -> Any:
        if shape.preset == "broken":
            raise ValueError("router_rank must fit")
        return real(shape, *given)

    monkeypatch.setitem(PRESETS, "broken", MICRO)
    monkeypatch.setattr(bench, "build", build)
    result = CliRunner().invoke(
        app, [*RUN[:2], "--preset", "broken", *RUN[2:], "--steps", "4", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "broken" / "results.json").read_text())["shapes"][0]["rows"]
    assert row["failure"] == "ValueError: router_rank must fit"
    (row,) = json.loads((tmp_path / "micro" / "results.json").read_text())["shapes"][0]["rows"]
    assert row["failure"] is None


def test_states_in_bf16_train_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "state_bytes", lambda shape, memory: (bench.BF16, True))
    built = []
    real = bench.build
    monkeypatch.setattr(bench, "build", lambda *given: built.append(real(*given)) or built[-1])
    (row,) = run(tmp_path, "--steps", "8", "--dtype", "bf16")["rows"]
    assert row["failure"] is None
    assert row["checkpointing"] == 1.0
    ((trainer, size),) = built
    assert size == bench.BF16
    weights, frames = (
        [p for n, p in trainer.model.named_parameters() if ("router" in n) is routed]
        for routed in (False, True)
    )
    assert {p.dtype for p in weights} == {torch.bfloat16}
    assert {p.dtype for p in frames} == {torch.float32}
    moments = [
        s["exp_avg"].dtype for p, s in trainer.optimizers[0].state.items() if p.dtype == torch.bfloat16
    ]
    assert set(moments) == {torch.bfloat16}


def test_states_are_as_wide_as_memory_allows() -> None:
    total, gigabyte = 210_255_408, 10**9
    shape = ModelShape("350m", 1, 1024, "gelu")
    assert bench.parameters(shape.config("grassmann")) == total
    assert bench.state_bytes(shape, 80 * gigabyte) == (bench.FP32, False)
    assert bench.state_bytes(shape, int(16 * total / 0.7)) == (bench.FP32, True)
    assert bench.state_bytes(shape, int(16 * total / 0.9)) == (bench.BF16, False)
    assert bench.state_bytes(shape, int(8 * total / 0.7)) == (bench.BF16, True)
    large = ModelShape("2.7b", 1, 1024, "silu")
    assert bench.state_bytes(large, 150 * gigabyte) == (bench.BF16, True)


def test_the_papers_training_is_priced() -> None:
    row = Row(bench.NAME, "ours", "grmoe", {"step": Times([[10.0]])}, facts={"flops": 1e9})
    result = bench.compare(ModelShape("350m", 16, 1024, "gelu"), [row], 1e15)
    assert row.facts["tokens/s"] == pytest.approx(1_638_400)
    assert row.facts["MFU %"] == pytest.approx(163.84)
    # 100,000 steps of 256 × 1024 tokens.
    assert result.extra["paper"]["gpu_hours"] == pytest.approx(26_214_400_000 / 1_638_400 / 3600)
    assert "4 |" in bench.tables(result)[0].markdown()


def test_zipf_tokens_follow_their_law() -> None:
    shape = ModelShape("tiny", 64, 127, "gelu")
    batch = next(bench.zipf(8, shape))
    assert batch.shape == (64, 128)
    share = batch.flatten().bincount(minlength=8) / batch.numel()
    law = 1 / torch.arange(1, 9)
    torch.testing.assert_close(share, law / law.sum(), atol=0.02, rtol=0.0)  # 4 deviations of 8192 draws
    torch.testing.assert_close(batch, next(bench.zipf(8, shape)))
