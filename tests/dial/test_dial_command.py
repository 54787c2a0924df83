"""From a run to a written model, through the command line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import a_check
from typer.testing import CliRunner

import grmoe.runs.card
import grmoe.runs.open
from grmoe.cli import app
from grmoe.dial import Plan, Target, apply, current, mass, save, top_k
from grmoe.dial import run as run_dial
from grmoe.dial.certify import certify
from grmoe.dial.curve import MAX_POINTS
from grmoe.dial.frontier import Gain
from grmoe.dial.results import Result
from grmoe.dial.straight import MAX_ADDED, TOLERANCE
from grmoe.dial.tables import check_line, gain_line
from grmoe.probe.losses import Increase, measure
from grmoe.probe.routing import layer_inputs, moe_layers
from grmoe.probe.windows import Text, default_tokens, read_windows
from grmoe.runs.about import about
from grmoe.runs.export import export
from grmoe.runs.open import LoadedModel, open_model
from grmoe.runs.results import ResultsError, load_results
from grmoe.tables import percent


def dial(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["dial", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def written(run: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("written")
    status, said = dial(
        run, "--target-experts", 1.45, "--tokens", 1024, "--out", out, "--write", "--check", data
    )
    assert status == 0, said
    return out, said


def results(folder: Path) -> Any:
    return load_results(folder / "results.json", "dial").body


def test_the_written_model_has_the_measured_perplexity(written: tuple[Path, str], run: Path) -> None:
    folder, _ = written
    chosen = results(folder)["chosen"]
    assert chosen["experts_per_token"] <= 1.45
    again = open_model(folder / "model")
    config = again.model.config
    assert current(config) == current(open_model(run).model.config)  # the trained setting stays
    assert config.budget == results(folder)["budget"] == round(chosen["experts_per_token"], 4)
    sign = {"at_least": -1, "mass": 1}[chosen["setting"]["selection"]]
    assert {n.tau for n in config.numbers} == {sign * chosen["setting"]["selection_tau"]}
    found = measure(again.model, read_windows(None, open_model(run), 32, 1024))
    assert found.perplexity == chosen["perplexity"]  # to the last digit
    assert found.experts_per_token == chosen["experts_per_token"]


def test_the_curve_keeps_its_word(written: tuple[Path, str], run: Path) -> None:
    """At its points the experts and the loss are those measured; between them the experts are near the budget."""
    folder, said = written
    model = open_model(folder / "model").model
    text = read_windows(None, open_model(run), 32, 1024)
    curve = model.config.budget_curve
    assert curve == results(folder)["curve"]
    assert model.config.budget_range == (1.0, 2.0)
    assert 4 <= len(curve) <= MAX_POINTS + MAX_ADDED
    assert "Budget: any from 1 to 2 experts per token" in said
    for p in curve:
        model.set_budget(p["experts_per_token"])
        found = measure(model, text)
        assert found.experts_per_token == pytest.approx(p["experts_per_token"], abs=6e-5)
        assert found.loss == pytest.approx(p["loss"], abs=1e-6)
    counts = []
    for budget in (1.1, 1.3, 1.5, 1.7, 1.9):
        model.set_budget(budget)
        counts.append(measure(model, text).experts_per_token)
    assert counts == pytest.approx([1.1, 1.3, 1.5, 1.7, 1.9], rel=1.5 * TOLERANCE)


def test_the_next_command_works(run: Path, tmp_path: Path) -> None:
    """A run has the curve of its own folder alone, and only for the checkpoint that was dialled."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    asked = ("--target-experts", 1.5, "--tokens", 512, "--no-speed")
    status, said = dial(copy, *asked, "--out", tmp_path / "elsewhere")
    assert status == 0, said
    flat = " ".join(said.split())
    assert "Next: run it again with --write" in flat
    assert "grmoe export" not in flat  # it would end in "not calibrated"
    status, said = dial(copy, *asked, "--checkpoint", "last")
    assert status == 0, said
    command = said.rpartition("Next: grmoe ")[2].split()
    assert command[:4] == ["export", str(copy), "--checkpoint", "40"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert about(str(copy))[2] == f"grmoe serve {copy / 'dial' / 'model'}"
    # A run that was trained on since: the model of its dial is an old one.
    path = copy / "dial" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 7}))
    assert about(str(copy))[2] == f"grmoe dial {copy} --write"


def test_a_run_has_the_curve_of_its_calibration(run: Path, tmp_path: Path) -> None:
    """`generate`, `eval` and `export` of a run know the budgets that `grmoe dial` measured beside it."""

    def call(*arguments: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(map(str, arguments)))
        return done.exit_code, " ".join(done.output.split())

    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    status, said = call("generate", copy, "--prompt", "one", "--budget", 1.5)
    assert status == 2
    assert "budget 1.5 is not calibrated: this model has no budget_curve. Run `grmoe dial` first" in said
    status, said = dial(copy, "--target-experts", 1.5, "--tokens", 512)
    assert status == 0, said
    budget = results(copy / "dial")["budget"]
    assert said.endswith(
        f"Next: grmoe export {copy} --budget {budget:g} --dtype fp32 --out {copy / 'dial' / 'model'}\n"
    )
    status, said = call("generate", copy, "--prompt", "one two", "--budget", 1.5, "--temperature", 0)
    assert status == 0, said
    assert "budget 1.5: 1." in said
    status, said = call("generate", copy, "--prompt", "one", "--budget", 2.5)
    assert (status, "from 1 to 2 experts per token, the calibrated range, got 2.5" in said) == (2, True)
    status, said = call("generate", copy, "--prompt", "one", "--budget", 1.5, "--alpha", 2)
    assert (status, "give alpha or budget, not both" in said) == (2, True)
    status, said = call("export", copy, "--budget", 1.25, "--out", tmp_path / "model")
    assert status == 0, said
    exported = open_model(tmp_path / "model").model
    assert exported.budget == 1.25
    status, said = call("info", tmp_path / "model")
    assert "1.25, calibrated from 1 to 2 experts per token" in said
    assert said.endswith(f"Next: grmoe serve {tmp_path / 'model'}")
    status, said = call("info", copy)
    assert "at most 1.5 experts per token; chosen 1." in said
    assert said.endswith(
        f"Next: grmoe export {copy} --budget {budget:g} --dtype fp32 --out {copy / 'dial' / 'model'}"
    )
    path = copy / "dial" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 7}))
    assert open_model(copy).model.config.budget_curve is None  # of another checkpoint


def test_writing_opens_the_checkpoint_once_and_renders_the_card_once(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, rendered = [], []

    def count(module: Any, name: str, calls: list[str]) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (calls.append(name), original(*args))[1])

    count(grmoe.runs.open, "_open_run", opened)  # every way to open a run passes here
    count(grmoe.runs.open, "_open_export", opened)
    count(grmoe.runs.card, "describe_setting", rendered)  # once per card
    status, said = dial(run, "--target-experts", 1.5, "--tokens", 512, "--out", tmp_path, "--write")
    assert status == 0, said
    assert opened == ["_open_run"]
    assert rendered == ["describe_setting"]
    assert (tmp_path / "model" / "model.safetensors").is_file()


def _check_earlier(result: Result, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model and results of an earlier dial: what becomes of them, and what is said about it."""
    folder = out / "model"

    def left_by(budget: float | None) -> list[str]:
        save(result, out, write=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "budget": budget}))
        save(result, out)
        return sorted(path.name for path in out.glob("model*"))

    assert left_by(result.body.budget) == ["model"]  # it has this curve and this budget
    assert capsys.readouterr().err == ""
    shutil.rmtree(folder)
    assert left_by(9.0) == ["model-old"]
    said = capsys.readouterr().err
    assert (
        said
        == f"{folder} was of an earlier dial: moved to {folder}-old. --write saves the model of this one\n"
    )
    assert left_by(8.0) == ["model-old", "model-old-2"]  # nothing is lost
    (out / "model").mkdir()
    (out / "model" / "mine.txt").write_text("no model")
    capsys.readouterr()
    other = replace(result, body=replace(result.body, asked="something else"))
    save(other, out)
    assert (out / "model" / "mine.txt").is_file()
    said = capsys.readouterr().err
    assert result.body.chosen.speed is not None
    relative = f"{result.body.chosen.speed.relative:.2f} times the trained speed"
    chosen = f"{result.body.chosen.experts_per_token:.3f} experts per token, {relative}"
    assert said.startswith("Replaced the results of 20")
    assert said.endswith(f": {result.body.asked}; chosen were {chosen}\n")
    (out / "results.json").write_text("{}")
    save(result, out)  # what cannot be read is replaced silently
    assert capsys.readouterr().err == ""


def test_the_model_in_the_result_has_the_chosen_setting(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Python, and with a target of speed: speeds are measured before the choice."""
    stages: list[tuple[str, int, int]] = []
    plan = Plan(model=run, target=Target("throughput", 0.2), tokens=512)
    result = run_dial(plan, lambda stage, done, total: stages.append((stage, done, total)))
    chosen = result.body.chosen
    config = result.loaded.model.config
    assert current(config) == top_k((1.0, 1.0), 2)
    assert config.budget == result.body.budget
    assert config.budget_curve == result.body.curve
    assert chosen.speed is not None
    assert chosen.speed.relative >= 0.2
    assert chosen.perplexity == min(p.perplexity for p in result.body.points if p.speed)
    assert measure(result.loaded.model, read_windows(None, result.loaded, 32, 512)).loss == chosen.loss
    with monkeypatch.context() as patch:
        patch.setattr("grmoe.dial.saving.draw", lambda _, path: path)
        _check_earlier(result, tmp_path, capsys)
    places = save(result, tmp_path)
    assert {name: path.name for name, path in places.items()} == {
        "Numbers": "results.json",
        "Figure": "pareto.png",
    }
    assert [done for _, done, _ in stages] == list(range(1, len(stages) + 1))
    assert {stage for stage, _, _ in stages} == {
        "trained",
        "top-k",
        "one α for all",
        "one α per layer",
        "k per layer",
        "gate × norm",
        "speed",
        "budgets",
    }


def test_results_table_picture_and_card(written: tuple[Path, str]) -> None:
    folder, said = written
    found = results(folder)
    assert [row["alpha"] for row in found["table"]] == [0.5, 1.0, 2.0, 5.0]
    entropies = [row["entropy"] for row in found["table"]]
    # dH/dα ≤ 0 of each gate; the inputs of later layers hardly move.
    assert entropies == sorted(entropies, reverse=True)
    assert all(row["speed"]["tokens_per_second"] > 0 for row in found["table"])
    assert found["trained"]["speed"]["relative"] == 1.0
    assert found["trained"]["increase"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    counts = [p["experts_per_token"] for p in found["points"]]
    assert counts == sorted(counts)
    best = [p["loss"] for p in found["points"] if p["on_frontier"]]
    assert best == sorted(best, reverse=True)
    assert found["checks"][0]["missed_by"] == found["checks"][0]["experts_per_token"] - 1.45
    # The checked text is the calibration text here, so every budget costs the same on both.
    assert len(found["budgets"]) == 4
    assert found["checks"][0]["budgets"] == found["budgets"]
    *_, table = said.split("Increase of perplexity by experts per token, on each text")
    for row in found["budgets"]:
        cell = percent(row["increase"]["value"])
        assert f"│ {cell} │ {cell} │" in " ".join(table.split())
    assert (folder / "pareto.png").stat().st_size > 10_000
    for words in ("exp(H)", "experts per token", "Certificates", "Chosen", "Check:"):
        assert words in said
    assert said.index("Chosen") < said.index("Certificates")  # the answer comes first
    assert said.endswith(f"Next: grmoe serve {folder / 'model'}\n")
    assert "## The dial" in (folder / "model" / "README.md").read_text()


def test_an_exported_folder_and_a_softmax_router_have_the_same_dial(
    softmax_run: Path, data: Path, tmp_path: Path
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    export(softmax_run, model, "last", dtype=torch.float32)
    before = {p.name: p.read_bytes() for p in model.iterdir()}
    status, said = dial(model, "--text", data, "--out", model, "--write")
    assert status == 2
    assert "must be outside" in said
    status, said = dial(model, "--out", out)
    assert status == 2
    assert "give --text FILE" in said
    status, said = dial(
        model, "--text", data, "--tokens", 512, "--max-ppl-increase", "5%", "--out", out, "--write"
    )
    assert status == 0, said
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before  # the model itself stays as it was
    chosen = results(out)["chosen"]
    assert 2.5 * chosen["increase"]["high"] <= 0.05
    again = open_model(out / "model")
    text = read_windows(str(data), again, 32, 512)
    assert measure(again.model, text).perplexity == chosen["perplexity"]


def test_only_gains_beyond_their_noise_are_reported() -> None:
    gains = [Gain(1.7, 0.0015, 0.0028), Gain(1.5, 0.0010, 0.0009), Gain(1.2, 0.0002, 0.0001)]
    assert "at 2 of 3 points" in gain_line(gains)
    assert "at most 0.0010 ± 0.0009 nats per token, at 1.50 experts per token" in gain_line(gains)
    assert "no gain" in gain_line(gains[:1])


def test_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / "model" / "mine.txt").write_text("mine")
    for arguments, message in (
        ((run, "--target-experts", 1.5, "--throughput", "2x"), "not several"),
        ((run, "--max-ppl-increase", "much"), "max-ppl-increase must be a number like 1%"),
        ((run, "--max-ppl-increase", 1), "max-ppl-increase 1: 1% or 0.01?"),
        ((run, "--max-ppl-increase", "1%", "--margin", 0.5), "margin must be a finite number >= 1, got 0.5"),
        ((run, "--target-experts", 1.5, "--margin", 2), "--margin belongs to --max-ppl-increase"),
        ((tmp_path,), "neither a run"),
        (
            (run, "--target-experts", 3),
            "target-experts must be at most 2, the most experts per token of this search, got 3; "
            "--cap raises it, up to 4",
        ),
        (
            (run, "--target-experts", 5, "--cap", 4),
            "must be at most 4, the most experts per token of this search, got 5",
        ),
        ((run, "--cap", 9), "cap must be from 1 to 4, the number of experts, got 9"),
        ((run, "--tokens", 64), "at least 8 windows of 32 tokens, got 2 from validation: give more --tokens"),
        ((run, "--length", 33), "length must be at most the model's 32, got 33"),
        ((run, "--write"), "exists and is not an exported model"),
        ((run, "--check", tmp_path / "none.txt"), "neither a file"),
    ):
        status, said = dial(*arguments, "--out", tmp_path / "out")
        assert status == 2
        assert message in " ".join(said.split())
        assert "Traceback" not in said


def test_certificates_hold_against_the_exact_error(loaded: LoadedModel, text: Text) -> None:
    setting = mass((0.7, 3.0), 0.6, 2)
    apply(loaded.model, setting)
    found = certify(loaded.model, text)
    assert [c.layer for c in found] == [0, 1]
    inputs = layer_inputs(loaded.model, text.inputs_WS)
    for c, layer, x_TD in zip(found, moe_layers(loaded.model), inputs, strict=True):
        random_TD = torch.randn(256, x_TD.shape[-1], generator=torch.Generator().manual_seed(0))
        for tokens in (x_TD, random_TD):
            bounded, exact = layer.truncation(tokens), layer.truncation(tokens, exact=True)
            # The tolerance is the layer's own fp32 rounding.
            assert (exact.bound <= bounded.bound * (1 + 1e-4) + 1e-6).all()
        own = layer.truncation(x_TD)
        assert c.dropped_mean == pytest.approx(float(own.dropped.mean()), rel=1e-4)
        assert c.dropped_max == pytest.approx(float(own.dropped.max()), rel=1e-4)
        assert c.bound == pytest.approx(float(own.bound.mean()), rel=1e-4)
        assert c.entropy_lower <= c.entropy <= c.entropy_upper
        assert c.exact <= c.bound
        assert c.looseness >= 1
        assert c.holds


def test_the_check_says_by_how_much_a_promise_was_missed() -> None:
    def said(target: Target, grown: Increase, missed_by: float | None = None) -> str:
        return check_line(target, a_check("/data/other.txt", grown, missed_by))

    one = Target("perplexity", 0.01)
    assert said(one, Increase(0.005, 0.002, 0.008)).startswith(
        "other.txt (1,024 tokens): 2.000 experts per token"
    )
    assert said(one, Increase(0.005, 0.002, 0.008)).endswith(": kept")
    assert "kept, but the interval reaches past" in said(one, Increase(0.009, 0.002, 0.012))
    assert said(one, Increase(0.015, 0.012, 0.018)).endswith("missed by 0.50 points")
    assert said(one, Increase(0.015, 0.009, 0.02)).endswith("missed by 0.50 points, within its noise")
    none = Increase(0, 0, 0)
    assert said(Target("experts", 1.5), none, 0.5).endswith("missed by 0.500 experts per token")
    assert said(Target("experts", 2.5), none, -0.5).endswith(": kept")
    assert "kept" not in said(Target("throughput", 1.5), none)


def test_results_of_an_older_format_are_refused_before_anything_is_measured(
    run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    old = {"grmoe": "0.1.0", "model": str(copy), "step": 40, "points": []}
    for kind in ("dial", "eval"):
        (copy / kind).mkdir()
        (copy / kind / "results.json").write_text(json.dumps(old))
    with pytest.raises(
        ResultsError, match=rf"another version of grmoe; make it again with: grmoe dial {copy}$"
    ):
        load_results(copy / "dial" / "results.json", "dial")
    status, said = dial(copy, "--tokens", 512, "--write")
    assert status == 2
    assert f"make it again with: grmoe eval {copy}" in said.replace("\n", "")
    assert "experts per token" not in said
    (copy / "eval" / "results.json").unlink()
    status, said = dial(copy, "--tokens", 512, "--write")  # its own old results are what it makes anew
    assert status == 0, said
    assert results(copy / "dial")["chosen"]


def test_by_default_a_long_context_has_enough_tokens() -> None:
    assert default_tokens(128, torch.device("cpu")) == 8192
    assert default_tokens(4096, torch.device("cpu")) == 8 * 4096
    assert default_tokens(1024, torch.device("cuda")) == 131072


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
