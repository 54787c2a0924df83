"""From a run to a written model, through the command line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.dial.certify import certify
from grmoe.dial.gates import layer_inputs, moe_layers
from grmoe.dial.measure import Increase, Meter, Point
from grmoe.dial.report import per_layer, verdict
from grmoe.dial.run import Check
from grmoe.dial.setting import apply, mass
from grmoe.dial.target import Target
from grmoe.dial.text import Text, default_tokens, read_text
from grmoe.dial.write import replacing
from grmoe.runs.export import export
from grmoe.runs.open import LoadedModel, open_model


def dial(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["dial", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def written(run: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("written")
    status, said = dial(
        run, "--target-experts", 1.5, "--tokens", 1024, "--out", out, "--write", "--check", data
    )
    assert status == 0, said
    return out, said


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def test_the_written_model_has_the_measured_perplexity(written: tuple[Path, str]) -> None:
    folder, _ = written
    chosen = results(folder)["chosen"]
    assert chosen["experts"] <= 1.5
    opened = open_model(folder / "model")
    for name, value in chosen["setting"].items():
        assert getattr(opened.model.config, name) == value
    run = open_model(results(folder)["model"])
    point = Meter(opened.model, read_text(None, run, 32, 1024)).trained
    assert point.perplexity == chosen["perplexity"]
    assert point.experts == chosen["experts"]


def test_results_table_picture_and_card(written: tuple[Path, str]) -> None:
    folder, said = written
    found = results(folder)
    assert [row["alpha"] for row in found["table"]] == [0.5, 1.0, 2.0, 5.0]
    entropies = [row["entropy"] for row in found["table"]]
    assert entropies == sorted(
        entropies, reverse=True
    )  # dH/dα ≤ 0 of each gate; later layers' inputs hardly move
    assert all(row["speed"]["tokens_per_second"] > 0 for row in found["table"])
    assert found["trained"]["speed"]["relative"] == 1.0
    assert found["checks"][0]["missed_by"] is not None
    assert (folder / "pareto.png").stat().st_size > 10_000
    for words in ("exp(H)", "experts computed", "Certificates", "Chosen", "Check:"):
        assert words in said
    assert "## The dial" in (folder / "model" / "README.md").read_text()


def test_an_exported_folder_and_a_softmax_router_have_the_same_dial(
    softmax_run: Path, data: Path, tmp_path: Path
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    export(softmax_run, model, "last", dtype=torch.float32)
    before = {p.name: p.read_bytes() for p in model.iterdir()}
    status, said = dial(model, "--text", data, "--out", model, "--write")
    assert status == 2
    assert "must lie outside" in said
    status, said = dial(model, "--out", out)
    assert status == 2
    assert "give some with --text" in said
    status, said = dial(
        model, "--text", data, "--tokens", 1024, "--max-ppl-increase", "5%", "--out", out, "--write"
    )
    assert status == 0, said
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before  # the model itself stays as it was
    chosen = results(out)["chosen"]
    assert chosen["increase"]["high"] <= 0.05
    again = open_model(out / "model")
    text = read_text(str(data), again, 32, 1024)
    assert Meter(again.model, text).trained.perplexity == chosen["perplexity"]


def test_the_largest_gain_that_is_told_is_one_beyond_its_noise() -> None:
    rows = [
        {"experts": 1.7, "gain": 0.0015, "error": 0.0028},
        {"experts": 1.5, "gain": 0.0010, "error": 0.0009},
        {"experts": 1.2, "gain": 0.0002, "error": 0.0001},
    ]
    assert "at 2 of 3 points" in per_layer(rows)
    assert "at most 0.0010 ± 0.0009 nats at 1.50 experts" in per_layer(rows)
    assert "nowhere better" in per_layer(rows[:1])


def test_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "model").mkdir(parents=True)
    for arguments, message in (
        ((run, "--target-experts", 1.5, "--throughput", "2x"), "not several"),
        ((run, "--max-ppl-increase", "much"), "max-ppl-increase must be a number like 1%"),
        ((tmp_path,), "neither a run"),
        ((run, "--cap", 9), "cap must be at most 4"),
        ((run, "--tokens", 64), "at least 8 windows of 32 tokens, got 2 from validation: give more --tokens"),
        ((run, "--length", 33), "length must be at most the model's 32, got 33"),
        ((run, "--write"), "exists and is no exported model"),
        ((run, "--check", tmp_path / "none.txt"), "neither a file"),
    ):
        status, said = dial(*arguments, "--out", tmp_path / "out")
        assert status == 2
        assert message in " ".join(said.split())
        assert "Traceback" not in said


def test_certificates_hold_against_the_exact_error(opened: LoadedModel, text: Text) -> None:
    setting = mass((0.7, 3.0), 0.6, 2)
    found = certify(opened.model, setting, text)
    assert [c.layer for c in found] == [0, 1]
    inputs = layer_inputs(opened.model, text, 1024)
    for c, layer, x_TD in zip(found, moe_layers(opened.model), inputs, strict=True):
        random_TD = torch.randn(256, x_TD.shape[-1], generator=torch.Generator().manual_seed(0))
        for tokens in (x_TD, random_TD):
            bounded, exact = layer.truncation(tokens), layer.truncation(tokens, exact=True)
            assert (
                exact.bound <= bounded.bound * (1 + 1e-4) + 1e-6
            ).all()  # fp32 rounding of the layer itself
        own = layer.truncation(x_TD)
        assert c.dropped_mean == pytest.approx(float(own.dropped.mean()), rel=1e-4)
        assert c.dropped_max == pytest.approx(float(own.dropped.max()), rel=1e-4)
        assert c.bound == pytest.approx(float(own.bound.mean()), rel=1e-4)
        assert c.entropy_lower <= c.entropy <= c.entropy_upper
        assert c.exact <= c.bound
        assert c.looseness >= 1
        assert c.holds


def test_the_verdict_says_by_how_much_a_promise_was_missed(opened: LoadedModel, text: Text) -> None:
    point: Point = Meter(opened.model, text).trained

    def said(target: Target, grown: Increase) -> str:
        return verdict(target, Check("other", 1024, point, point, grown))

    one = Target("perplexity", 0.01)
    assert said(one, Increase(0.005, 0.002, 0.008)).endswith(": kept")
    assert "kept, but the interval reaches past" in said(one, Increase(0.009, 0.002, 0.012))
    assert said(one, Increase(0.015, 0.012, 0.018)).endswith("missed by 0.50 points")
    assert said(one, Increase(0.015, 0.009, 0.02)).endswith("missed by 0.50 points, within its noise")
    assert said(Target("experts", 1.5), Increase(0, 0, 0)).endswith("missed by 0.500 experts")  # trained: 2.0
    assert "kept" not in said(Target("throughput", 1.5), Increase(0, 0, 0))
    apply(opened.model, point.setting)


def test_a_model_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "model"
    for content in ("first", "second"):
        with replacing(out) as writing:
            writing.mkdir()
            (writing / "config.json").write_text(content)
    with contextlib.suppress(KeyboardInterrupt), replacing(out) as writing:
        writing.mkdir()
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (out / "config.json").read_text() == "second"


def test_by_default_a_long_context_has_enough_tokens() -> None:
    assert default_tokens(128, on_gpu=False) == 8192
    assert default_tokens(4096, on_gpu=False) == 8 * 4096
    assert default_tokens(1024, on_gpu=True) == 131072


def test_a_file_in_the_way_is_said_before_anything_is_measured(run: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for command in ("dial", "prune", "eval", "analyze", "export"):
        done = CliRunner().invoke(app, [command, str(run), "--out", str(taken)])
        assert done.exit_code == 2
        assert "is a file" in " ".join(done.output.replace("│", "").split())
    assert taken.read_text() == "mine"


def test_a_run_writes_text_without_being_exported(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "model", dtype=torch.float32)
    said = [
        CliRunner().invoke(app, ["generate", str(folder), "--prompt", "one", "--temperature", "0"])
        for folder in (run, tmp_path / "model")
    ]
    assert said[0].exit_code == 0, said[0].output
    assert said[0].output == said[1].output
    wrong = CliRunner().invoke(app, ["generate", str(run), "--prompt", "one", "--checkpoint", "never"])
    assert wrong.exit_code == 2
    assert "checkpoint must be best, last or one of the steps" in " ".join(wrong.output.split())
