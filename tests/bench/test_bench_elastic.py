"""`grmoe bench elastic`: the trainer's own steps, ratios that follow from the times, compilations that are counted."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from grmoe.bench import elastic as bench
from grmoe.bench.models import ModelShape
from grmoe.cli import app
from grmoe.model import PRESETS
from grmoe.runs.config import ElasticConfig
from grmoe.train.setup import Learner

MICRO: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "router_rank": 4,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
NAMES = ("off", "elastic", "elastic, full budgets")


@pytest.fixture(autouse=True)
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "micro", MICRO)
    # The graphs of torch.compile without its code generator, which takes a minute.
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, mode=None, **options: real(f, backend="eager", **options))


def command(out: Path, *options: str) -> tuple[dict[str, Any], str]:
    sizes = ["--preset", "micro", "--batch", "2", "--length", "16", "--rounds", "2", "--steps", "2"]
    given = ["bench", "elastic", "--device", "cpu", "--out", str(out), *sizes, *options]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    (found,) = json.loads((out / "results.json").read_text())["shapes"]
    return found, result.output


def test_command(tmp_path: Path) -> None:
    found, output = command(tmp_path)
    rows = {row["contender"].removesuffix(", compiled"): row for row in found["rows"]}
    assert tuple(rows) == NAMES
    assert all(
        row["failure"] is None and len(row["times"]["step"]["rounds_ms"]) == 2 for row in rows.values()
    )
    off, elastic, full = rows.values()
    assert off["experts"] == full["experts"] == 2.0
    assert 1.2 < elastic["experts"] < 1.9
    assert elastic["flops"] < off["flops"] == full["flops"]
    assert [row["graphs"] for row in rows.values()] == [
        1,
        1,
        0,
    ]  # full budgets: the compiled model of "elastic"
    ratios = {ratio["name"]: ratio["value"] for ratio in found["ratios"]}
    for row in (elastic, full):
        name = f"tokens/s, {row['contender']} over {off['contender']}"
        rounds = zip(*(each["times"]["step"]["rounds_ms"] for each in (off, row)), strict=True)
        assert ratios[name] == pytest.approx(median(median(a) / median(b) for a, b in rounds))
    turned = found["turning"]
    assert list(turned) == ["random budgets, later rounds", "training", "prefill"]
    for name, counts in turned.items():
        assert (counts["recompiles"], counts["captures"]) == (0, 0), name
    for name in ("training", "prefill"):
        experts = [each["experts_per_token"] for each in turned[name]["settings"]]
        assert (min(experts), max(experts)) == (1.0, 2.0)
        assert len(set(experts)) > 3  # the budget did turn
        assert f"{name}, 6 budgets of 1.00 to 2.00 experts: 0 recompiles, 0 graph captures" in output
    assert (tmp_path / "elastic.png").stat().st_size > 10_000


def test_without_compiling_nothing_is_counted(tmp_path: Path) -> None:
    found, output = command(tmp_path, "--eager", "--unit", "layer", "--rule", "count")
    assert "turning" not in found
    assert "nothing was counted" in output
    assert [row["contender"] for row in found["rows"]] == list(NAMES)


def test_mistakes_get_one_clear_line(tmp_path: Path) -> None:
    given = ["bench", "elastic", "--device", "cpu", "--out", str(tmp_path), "--unit", "word"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "unit must be one of" in result.output
    assert "Traceback" not in result.output


def test_steps_are_those_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each contender trains at its own budget; the numbers of a step are read one step later."""
    told: list[Any] = []

    def train_step(learner: Learner, step: int, batch_BS: Tensor) -> Any:
        told.append(
            (step, learner.config.elastic.unit, learner.config.elastic.full_share, tuple(batch_BS.shape))
        )
        return real(learner, step, batch_BS)

    real, resolve = bench.train_step, bench.resolve
    monkeypatch.setattr(bench, "train_step", train_step)
    monkeypatch.setattr(
        bench, "resolve", lambda t, old, new: told.append((old.step, new)) or resolve(t, old, new)
    )
    shape, cpu = ModelShape("micro", 2, 16, "silu"), torch.device("cpu")
    listed, training = bench.contenders(shape, cpu, torch.float32, ElasticConfig(unit="token"), False)
    runs = [contender.build() for contender in listed]
    assert training(True).done == 2 * training(False).done == 2 * bench.BATCHES
    told.clear()
    for built in (runs[1], runs[2], runs[0]):
        built.timed["step"]()
    n = bench.BATCHES
    assert told == [
        (2 * n, "token", 0.0, (2, 17)), (2 * n - 1, 2 * n),
        (2 * n + 1, "token", 1.0, (2, 17)), (2 * n, 2 * n + 1),
        (n, "off", 0.0, (2, 17)), (n - 1, n),
    ]  # fmt: skip


def test_compilations_and_captures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.cuda.CUDAGraph
    captured: list[Any] = []
    monkeypatch.setattr(graph, "capture_begin", lambda self, pool=None: captured.append(pool))
    before = graph.capture_begin
    scaled = torch.compile(lambda x, by: x * by, dynamic=False)
    scaled(torch.ones(2), 2)
    with bench.counted() as found:
        scaled(torch.ones(2), 2)
        assert (found.recompiles, found.captures) == (0, 0)
        scaled(torch.ones(2), 3)  # another constant
        graph.capture_begin("itself", pool="its pool")  # type: ignore[arg-type]
    assert (found.recompiles, found.captures, captured) == (1, 1, ["its pool"])
    assert graph.capture_begin is before
    with pytest.raises(RuntimeError, match="inside"), bench.counted():
        raise RuntimeError("inside")
    assert graph.capture_begin is before
