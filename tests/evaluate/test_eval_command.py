"""`grmoe eval` from the outside, without lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.evaluate import Plan
from grmoe.evaluate import run as evaluate
from grmoe.evaluate.run import check_alphas
from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.runs.card import model_card
from grmoe.runs.export import export
from grmoe.runs.open import open_model
from grmoe.runs.results import load_results

runner = CliRunner()


def test_a_list_of_alphas_in_one_command(run: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["eval", str(run), "--alpha", "0.25", "--alpha", "4", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "windows of 32 tokens, no overlap" in result.output
    results = load_results(tmp_path / "results.json", "eval")
    assert results.step == 20
    soft, sharp = results.body["points"]
    assert (soft["alpha"], sharp["alpha"]) == (0.25, 4.0)
    assert soft["experts_per_token"] > sharp["experts_per_token"]  # what the dial is for
    assert f"{sharp['experts_per_token']:.3f}" in result.output
    for point in (soft, sharp):
        domains = point["texts"]["validation"]
        assert set(domains) == {"ones", "threes"}
        total = point["totals"]["validation"]
        assert total["nll"] == sum(row["nll"] for row in domains.values())
        assert len(point["text_routing"]["layer_experts"]) == 1
        assert f"{total['perplexity']:.3f}" in result.output
    alone = runner.invoke(app, ["eval", str(run), "--alpha", "4", "--out", str(tmp_path / "alone")])
    assert alone.exit_code == 0
    again = load_results(tmp_path / "alone" / "results.json", "eval").body["points"][0]
    assert again == sharp  # the dial before it left no trace


def test_budgets_beside_alphas(run: Path, tmp_path: Path) -> None:
    curve = [
        {"experts_per_token": 1.0, "tau": 0.1, "alpha": 1.0, "cap": 2},
        {"experts_per_token": 2.0, "tau": 1.0, "alpha": 1.0, "cap": 2},
    ]
    model, text = tmp_path / "model", tmp_path / "text.txt"
    export(run, model)
    config = json.loads((model / "config.json").read_text()) | {"budget_curve": curve, "budget": 1.0}
    (model / "config.json").write_text(json.dumps(config))
    text.write_text("one two three four five six seven " * 40)

    def points(*arguments: str) -> tuple[list[dict[str, Any]], str]:
        out = tmp_path / "out"
        result = runner.invoke(app, ["eval", str(model), "--text", str(text), "--out", str(out), *arguments])
        assert result.exit_code == 0, result.output
        found: list[dict[str, Any]] = load_results(out / "results.json", "eval").body["points"]
        return found, result.output

    found, said = points("--alpha", "4", "--budget", "1,1.5", "--budget", "2.0")
    assert [(p["alpha"], p["budget"]) for p in found] == [(4.0, None), (1.0, 1.0), (1.0, 1.5), (1.0, 2.0)]
    assert [found[i]["experts_per_token"] for i in (1, 3)] == [1.0, 2.0]
    assert 1.0 < found[2]["experts_per_token"] <= 2.0
    assert "budget 1.5" in said
    assert "α = 4" in said
    own, _ = points()  # as saved with the model: its budget
    assert own == [found[1]]
    for wrong, message in (
        ("3", "budget must be from 1 to 2 experts per token"),
        ("1,x", "budget must be a number"),
    ):
        result = runner.invoke(app, ["eval", str(model), "--text", str(text), "--budget", wrong])
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())


def test_an_exported_model_on_a_text(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "held [out].txt").write_text("one two three four five six seven " * 40)
    arguments = ["eval", str(exported), "--text", str(tmp_path / "held [out].txt"), "--stride", "16"]
    result = runner.invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "windows of 32 tokens, 16 tokens of overlap" in result.output  # as in training; the context is 64
    assert "held [out].txt" in result.output
    content = load_results(tmp_path / "out" / "results.json", "eval").body
    assert (content["length"], content["stride"]) == (32, 16)
    assert content["points"][0]["alpha"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["EXPORTED"],
            "has no held-out text (an exported model has none): give --text FILE",
        ),
        (["EXPORTED", "--text", "nowhere.txt"], "nowhere.txt is neither a file, nor a folder"),
        (["EXPORTED", "--text", "EMPTY"], "must hold a document, got none"),
        (["RUN", "--length", "65"], "length must be at most the model's 64, got 65"),
        (["RUN", "--checkpoint", "7"], "checkpoint must be best, last or one of the steps"),
        (["RUN", "--alpha", "1", "--alpha", "nan"], "alpha must be a finite number >= 0, got nan"),
        (["RUN", "--alpha", "1", "--alpha", "-1"], "alpha must be a finite number >= 0, got -1.0"),
        (["RUN", "--alpha", "1e39"], "alpha must"),
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
    assert not (tmp_path / "out").exists()  # nothing was measured before the mistake was found


def test_any_number_of_alphas_each_once_and_the_model_stays_as_it_was(run: Path) -> None:
    model = open_model(run, alpha=3.0).model
    assert check_alphas(model, [0.0, 2, 0.5, 2.0, 1e4]) == [0.0, 2.0, 0.5, 1e4]
    assert check_alphas(model, []) == [3.0]
    assert model.alpha == [3.0]
    model.set_alpha([0.5])
    assert check_alphas(model, []) == [[0.5]]


def test_numbers_are_on_disk_after_every_point(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash at the second α leaves the first one's numbers."""
    set_alpha, calls = GrmoeForCausalLM.set_alpha, []

    def stop_late(model: GrmoeForCausalLM, alpha: float) -> None:
        calls.append(alpha)
        if calls.count(2.0) == 2:  # the first call is the check
            raise KeyboardInterrupt
        set_alpha(model, alpha)

    monkeypatch.setattr(GrmoeForCausalLM, "set_alpha", stop_late)
    with pytest.raises(KeyboardInterrupt):
        evaluate(Plan(model=run, out=tmp_path, alphas=[1.0, 2.0], tokens=100))
    points = load_results(tmp_path / "results.json", "eval").body["points"]
    assert [point["alpha"] for point in points] == [1.0]


def test_the_card_has_the_table(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (tmp_path / "held out").mkdir()
    (tmp_path / "held out" / "a|b.txt").write_text("one two three four five " * 20)
    texts = [str(tmp_path / "held out" / "a|b.txt"), "validation"]
    result = evaluate(Plan(model=copy, out=copy / "eval", texts=texts, alphas=[0.5, 2.0]))
    card = model_card(open_model(copy), "name")
    assert "## Measured" in card
    assert "windows of 32 tokens, stride 32 (CPU, float32)" in card
    soft, sharp = result.evaluation.points
    assert f"| experts per token | {soft.experts_per_token:.3f} | {sharp.experts_per_token:.3f} |" in card
    perplexities = [f"{point.totals['validation'].perplexity:.3f}" for point in (soft, sharp)]
    assert f"| validation, perplexity | {' | '.join(perplexities)} |" in card
    assert r"| a\|b.txt, bits/byte |" in card  # the name alone: folders of a disk are private
    assert str(tmp_path) not in card


def test_a_router_without_a_dial_says_so(tmp_path: Path) -> None:
    config = GrmoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_experts=4, router="hash",
    )  # fmt: skip
    model = GrmoeForCausalLM(config)
    with pytest.raises(ValueError, match="a hash router has no dial"):
        check_alphas(model, [1.0, 2.0])
    assert check_alphas(model, []) == [1.0]


@pytest.mark.parametrize("asked", [["--scorer", "harness", "--tasks-from", "TASKS"], ["--task", "mmlu"]])
def test_without_the_harness_the_install_line(
    exported: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a)
    )
    given = [str(tasks) if argument == "TASKS" else argument for argument in asked]
    result = runner.invoke(app, ["eval", str(exported), *given])
    assert result.exit_code == 2
    assert 'pip install "grmoe[eval]"' in result.output
