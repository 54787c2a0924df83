"""`grmoe eval` from the outside, without lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.evaluate.points import points_of
from grmoe.model import GrmoeConfig, GrmoeForCausalLM

runner = CliRunner()


def test_a_list_of_alphas_in_one_command(run: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["eval", str(run), "--alpha", "0.25", "--alpha", "4", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "windows of 32 tokens, no overlap" in result.output
    content = json.loads((tmp_path / "results.json").read_text())
    soft, sharp = content["points"]
    assert (soft["alpha"], sharp["alpha"]) == (0.25, 4.0)
    assert soft["experts_per_token"] > sharp["experts_per_token"]  # what the dial is for
    assert f"{sharp['experts_per_token']:.3f}" in result.output
    for point in (soft, sharp):
        assert {row["domain"] for row in point["texts"]} == {"ones", "threes"}
        total = point["totals"]["validation"]
        assert total["nll"] == sum(row["nll"] for row in point["texts"])
        assert f"{total['perplexity']:.3f}" in result.output
    alone = runner.invoke(app, ["eval", str(run), "--alpha", "4", "--out", str(tmp_path / "alone")])
    assert alone.exit_code == 0
    again = json.loads((tmp_path / "alone" / "results.json").read_text())["points"][0]
    assert again == sharp  # the dial before it left no trace


def test_an_exported_model_on_a_text(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "held [out].txt").write_text("one two three four five six seven " * 40)
    arguments = ["eval", str(exported), "--text", str(tmp_path / "held [out].txt"), "--stride", "16"]
    result = runner.invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "48 tokens of overlap" in result.output
    assert "held [out].txt" in result.output
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (content["length"], content["stride"]) == (64, 16)
    assert content["points"][0]["alpha"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["EXPORTED"],
            "comes without held-out text (an exported model has none): give some with --text FILE, or --task",
        ),
        (["EXPORTED", "--text", "nowhere.txt"], "nowhere.txt is neither a file, nor a folder"),
        (["EXPORTED", "--text", "EMPTY"], "holds no document"),
        (["RUN", "--length", "65"], "length must be at most the model's 64, got 65"),
        (["RUN", "--checkpoint", "7"], "checkpoint must be best, last or one of the steps"),
        (["nowhere"], "neither a run of `grmoe train` nor an exported model"),
    ],
)
def test_mistakes_are_one_line(
    run: Path, exported: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty.txt").write_text("")
    places = {"EXPORTED": str(exported), "RUN": str(run), "EMPTY": str(tmp_path / "empty.txt")}
    given = [places.get(argument, argument) for argument in arguments]
    result = runner.invoke(app, ["eval", *given, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert re.search(re.escape(message), result.output.replace("\n", " ")), result.output
    assert "Traceback" not in result.output


def test_a_router_without_a_dial_says_so(tmp_path: Path) -> None:
    config = GrmoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_experts=4, router="hash",
    )  # fmt: skip
    model = GrmoeForCausalLM(config)
    with pytest.raises(ValueError, match="a hash router has no dial"):
        points_of(model, [1.0, 2.0])
    assert [point.alpha for point in points_of(model, [])] == [1.0]


def test_without_the_harness_the_install_line(
    exported: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a)
    )
    result = runner.invoke(app, ["eval", str(exported), "--tasks-from", str(tasks)])
    assert result.exit_code == 2
    assert "pip install 'grmoe[eval]'" in result.output
