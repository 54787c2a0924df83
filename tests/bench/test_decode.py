"""`grmoe bench decode`: a step equals a longer prompt, experts as asked, bytes as counted."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from grmoe.bench import decode as bench
from grmoe.bench.measure import Row, measure
from grmoe.bench.models import ModelShape, olmoe, ours
from grmoe.cli import app
from grmoe.model import PRESETS
from grmoe.probe.timing import Times

CPU = torch.device("cpu")
MICRO: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "router_rank": 4,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "micro", MICRO)


def shape(batch: int = 2) -> ModelShape:
    return ModelShape("micro", batch, 8, "silu")


def builders() -> list[Any]:
    softmax = shape().config()
    peers = [partial(olmoe, softmax, "sdpa", experts) for experts in ("grouped_mm", "batched_mm")]
    return [*peers, partial(ours, shape().config("grassmann"))]


def test_a_step_is_the_next_token_of_a_longer_prompt() -> None:
    for build in builders():
        decoder = bench.decoder_of(shape(), CPU, torch.float32, "eager", build)
        for layer in decoder.cache.layers:
            layer.keys[:, :, 9:] = layer.values[:, :, 9:] = 1e4  # past this step, where nobody may look
        decoder.run()
        assert decoder.taken == 1
        assert [int(layer.cumulative_length) for layer in decoder.cache.layers] == [9] * 4  # type: ignore[union-attr]
        longer = torch.cat([decoder.context_BS, decoder.ids_B1], 1)
        with torch.no_grad():
            logits = decoder.model(input_ids=longer, use_cache=False).logits[:, -1]
        assert decoder.next_B.tolist() == logits.argmax(-1).tolist()


def test_the_context_starts_again_before_the_cache_is_full() -> None:
    decoder = bench.decoder_of(shape(), CPU, torch.float32, "eager", builders()[-1])
    seen = []
    decoder.replay = lambda: seen.append(decoder.taken)
    for _ in range(2 * bench.ROOM):
        decoder.run()
    assert max(seen) < bench.ROOM
    assert seen.count(1) == 3


def test_a_step_that_cannot_be_captured_is_timed_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(bench, "warmed_up", refuse)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    with pytest.warns(RuntimeWarning, match="not one CUDA graph: RuntimeError: operation not permitted"):
        decoder = bench.decoder_of(shape(), CPU, torch.float32, "graphs", builders()[0])
    assert not decoder.captured
    decoder.run()
    assert int(decoder.cache.layers[0].cumulative_length) == 9  # type: ignore[union-attr]


def test_contenders_compute_what_their_names_say() -> None:
    for contender in bench.contenders(shape(16), CPU, torch.float32, "eager", (1.0, 1.5, 2.0))[2:]:
        runs = contender.build()
        asked = float(contender.name.split()[1])
        assert runs.facts["experts"] == pytest.approx(asked, abs=0.04)  # steps of 1/32: 16 tokens, 2 layers
        assert asked <= runs.facts["touched"] <= 4


def test_a_configuration_that_cannot_be_built_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "micro", {**MICRO, "router_rank": 33})  # no subspace of 32 dimensions
    listed = bench.contenders(shape(), CPU, torch.float32, "eager", (1.0,))
    rows = measure(listed, CPU, 1, lambda stage: None, "")
    assert [row.failure for row in rows[:2]] == [None] * 2
    assert "router_rank must be" in str(rows[2].failure)
    with pytest.raises(ValueError, match=r"--budget must be in \[1, 2\], got 3"):
        bench.contenders(shape(), CPU, torch.float32, "eager", (3.0,))


def test_bytes_of_a_step() -> None:
    model = ours(shape().config("grassmann"))
    all_touched = bench.step_bytes(model, shape(), torch.bfloat16, 4)
    weights = (
        sum(p.numel() for p in model.parameters()) - 64 * 32
    )  # a look-up reads two rows of the embedding
    keys = 2 * 4 * 1 * 16 * 2 * 8  # keys and values, blocks, groups, width, sequences, tokens
    assert all_touched == 2 * (weights + keys)
    one_less = bench.step_bytes(model, shape(), torch.bfloat16, 3)
    assert all_touched - one_less == 2 * 2 * 3 * 32 * 32  # bytes, MoE layers, matrices of an expert


def test_savings_follow_from_times_and_bytes() -> None:
    def row(name: str, ms: float, **facts: float) -> Row:
        kind: Any = "ours" if facts else "peer"
        return Row(name, kind, "grmoe", {bench.MODE: Times([[ms], [ms]])}, facts=facts)

    rows = [row(bench.GROUPED, 9.0), row(bench.BATCHED, 6.0)]
    rows += [row("ours, 2.00 experts", 4.0, **{"MB per step": 10.0, "floor ms": 2.0})]
    rows += [row("ours, 1.00 experts", 3.4, **{"MB per step": 8.0, "floor ms": 1.6})]
    ratios = {r.name: r.value for r in bench.compare(shape(), rows).ratios}
    assert rows[2].facts["tokens/s"] == 500.0  # two sequences in 4 ms
    assert ratios[f"tokens/s, ours, 2.00 experts over {bench.BATCHED}"] == 1.5
    assert ratios["ours, 2.00 experts: time over the floor"] == 2.0
    assert ratios["ours, 1.00 experts: time saved / bytes saved"] == pytest.approx(
        (1 - 3.4 / 4) / (1 - 8 / 10)
    )


def test_each_kind_of_step_is_compared_with_itself_and_the_default() -> None:
    def row(kind: str, budget: float, ms: float, size: float) -> Row:
        facts = {"MB per step": size, "floor ms": 1.0}
        return Row(
            bench.budget_name(budget, kind), "ours", "grmoe", {bench.MODE: Times([[ms], [ms]])}, facts=facts
        )

    rows = [row(kind, budget, ms * budget, 4 + 4 * budget) for kind, ms in
            ((bench.PLAIN, 4.0), (bench.THIN, 3.0), (bench.EARLY, 2.0)) for budget in (2.0, 1.0)]  # fmt: skip
    ratios = {r.name: r.value for r in bench.compare(shape(), rows).ratios}
    saved = [name for name in ratios if name.endswith("time saved / bytes saved")]
    assert saved == [
        f"ours, 1.00 experts{kind}: time saved / bytes saved"
        for kind in (bench.PLAIN, bench.THIN, bench.EARLY)
    ]
    assert all(ratios[name] == pytest.approx(0.5 / (1 / 3)) for name in saved)
    assert ratios[f"ours, 2.00 experts / ours, 2.00 experts{bench.THIN}"] == pytest.approx(4 / 3)
    assert ratios[f"ours, 1.00 experts / ours, 1.00 experts{bench.EARLY}"] == 2.0
    listed = [
        c.name for c in bench.contenders(shape(), torch.device("cuda"), torch.bfloat16, "graphs", (2.0, 1.0))
    ]
    assert listed[2:] == [r.name for r in rows]


def test_command(tmp_path: Path) -> None:
    run = [
        "bench",
        "decode",
        "--preset",
        "micro",
        "--device",
        "cpu",
        "--batch",
        "1",
        "--batch",
        "2",
        "--length",
        "8",
    ]
    options = ["--budget", "2", "--budget", "1", "--rounds", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*run, *options])
    assert result.exit_code == 0, result.output
    shapes = json.loads((tmp_path / "results.json").read_text())["shapes"]
    assert [found["shape"]["batch"] for found in shapes] == [1, 2]
    names = [bench.GROUPED, bench.BATCHED, "ours, 2.00 experts", "ours, 1.00 experts"]
    for found in shapes:
        assert [row["contender"] for row in found["rows"]] == names
        assert [row["failure"] for row in found["rows"]] == [None] * 4
    wrong = CliRunner().invoke(app, [*run, "--budget", "3", "--out", str(tmp_path)])
    assert "--budget must be in [1, 2], got 3.0" in wrong.output
