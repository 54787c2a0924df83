"""What a page is made from: gates in 16 bits, notes on what is missing, text that cannot break out."""

from __future__ import annotations

import ast
import base64
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from report_runs import collect, data_of, report, train_run
from typer.testing import CliRunner

import grmoe.report
from grmoe.cli import app
from grmoe.probe.routing import layer_inputs, moe_layers
from grmoe.probe.text import open_stream
from grmoe.report import Content, render
from grmoe.report.page import as_json
from grmoe.report.sample import MAX_NUMBERS, STEPS, quantise, sample_gates
from grmoe.runs.export import export
from grmoe.runs.open import open_model
from grmoe.runs.weights import fingerprint


@given(st.integers(2, 9), st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_scores_are_kept_to_half_a_step_and_their_largest_exactly(N: int, size: float, seed: int) -> None:
    b_TN = size * torch.randn(7, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kept = quantise(torch.zeros(N), b_TN)
    below_TN = b_TN - b_TN.amax(-1, keepdim=True)
    # Half a step, and the rounding of the division.
    assert float((kept.b_TN - below_TN).abs().max()) <= kept.step * (0.5 + 1e-9)
    assert bool((kept.b_TN.amax(-1) == 0).all())
    assert 0 <= int(kept.steps_TN.min()) <= int(kept.steps_TN.max()) <= STEPS
    packed = base64.b64decode(kept.as_json()["scores"])
    assert (np.frombuffer(packed, "<u2").reshape(7, N) == kept.steps_TN.numpy()).all()


def test_equal_scores_stay_equal() -> None:
    kept = quantise(torch.zeros(4), torch.full((3, 4), 2.5))
    assert int(kept.steps_TN.abs().max()) == 0


@pytest.mark.parametrize("dial", ["posterior", "likelihood"])
def test_the_sample_has_the_routers_logits_at_any_alpha(dial: str, run: Path) -> None:
    """a + α·b of the page against the router itself, on its inputs in the model."""
    loaded = open_model(run)
    model = loaded.model
    for layer in moe_layers(model):
        layer.router.dial = dial
        layer.router.log_prior += torch.linspace(-0.5, 0.5, 4)  # trained ones are small here
    stream = open_stream([], loaded, 10_000)
    sample = sample_gates(loaded, stream)
    assert model.alpha == [1.5, 1.0]  # as it was
    length, count = len(sample.windows[0]["pieces"]), len(sample.windows)
    places = stream.tokens // length
    rows = [
        stream.read(i * places // count * length, (i * places // count + 1) * length) for i in range(count)
    ]
    inputs = layer_inputs(model, torch.from_numpy(np.stack(rows)))
    for layer, kept, x_TD in zip(moe_layers(model), sample.layers, inputs, strict=True):
        assert bool(kept.a_N.any()) == (dial == "likelihood")
        for alpha in (0.0, 0.5, 3.0):
            layer.router.alpha = alpha
            with torch.no_grad():
                exact_TN = torch.softmax(layer.router.gate(x_TD, None).double(), -1)
            # A shift of logits by ε moves no probability by more than a factor e^{2ε}; fp32 of the gate: 1e-5.
            off = 2 * alpha * kept.step + 1e-5
            shown_TN = torch.softmax(kept.a_N + alpha * kept.b_TN, -1)
            assert float((shown_TN - exact_TN).abs().max()) <= off


def test_a_page_of_many_runs_has_a_budget(run: Path) -> None:
    loaded = open_model(run)
    # A budget of 100 tokens of 2 layers × 4 experts.
    small = sample_gates(loaded, open_stream([], loaded, 10_000), models=MAX_NUMBERS // (8 * 100))
    assert sum(len(w["pieces"]) for w in small.windows) == len(small.layers[0].steps_TN) <= 100
    assert len(small.windows) >= 4


def test_a_router_without_a_dial_is_shown_as_it_is(data: Path, tmp_path: Path) -> None:
    folder = train_run(tmp_path / "run", data, 4, router="switch", alpha=1.0, num_experts_per_tok=1)
    content = collect(folder)
    assert content.sample is not None
    assert content.sample["dial"] is False
    assert content.model is not None
    assert content.model["selection"]["kind"] == "topk"
    assert [n.section for n in content.notes] == ["frontier"]
    assert "has no dial" in content.notes[0].text
    assert content.notes[0].command is None


def test_everything_of_a_run_that_was_only_trained(both: tuple[Path, str], softmax_run: Path) -> None:
    page, said = both
    first, second = data_of(page)["runs"]
    assert second["dial"] is None
    assert second["analysis"]["tokens"] >= 2000
    assert second["sample"]["dial"] is True
    assert second["curves"]["steps"][-1] == 40
    assert second["training"]["validation"]["step"] == 40
    assert second["training"]["tokens"] == 40 * 8 * 32
    assert first["dial"]["chosen"]["experts_per_token"] <= 1.5
    assert f"grmoe dial {softmax_run}" in said.replace("\n", "")
    # Saved, so that a second page takes no time.
    assert (softmax_run / "analysis" / "results.json").is_file()


def test_the_page_is_one_small_file_that_names_no_other(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 400_000
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "default-src 'none'" in text


def test_an_analysis_of_another_step_is_made_again_and_left_alone(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    collect(copy)
    path = copy / "analysis" / "results.json"
    change_results(path, step=7)
    change_results(path, text="old", inside="body")
    before = path.read_bytes()
    content = collect(copy)
    assert content.analysis is not None
    assert content.analysis["text"] != "old"
    assert path.read_bytes() == before
    assert [n for n in content.notes if n.section == "experts"] == []


def test_an_analysis_of_a_model_with_other_layers_is_made_again(run: Path, tmp_path: Path) -> None:
    """The folder of an exported model may hold another model since: it has no step to compare."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    collect(copy)
    path = copy / "analysis" / "results.json"
    layers = json.loads(path.read_text())["body"]["layers"]
    change_results(path, text="old", layers=layers[:1], inside="body")
    content = collect(copy)
    assert content.analysis is not None
    assert content.analysis["text"] != "old"
    assert [n for n in content.notes if n.section == "experts"] == []


def change_results(path: Path, inside: str | None = None, **changes: object) -> None:
    envelope = json.loads(path.read_text())
    (envelope if inside is None else envelope[inside]).update(changes)
    path.write_text(json.dumps(envelope))


@pytest.mark.parametrize("broken", ["format", "json"])
def test_results_of_another_version_become_notes(run: Path, tmp_path: Path, broken: str) -> None:
    """Neither read nor overwritten: the page names the command that makes new ones."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    collect(copy)
    files = {kind: copy / kind / "results.json" for kind in ("dial", "analysis")}
    for path in files.values():
        if broken == "format":
            change_results(path, format=1)
        else:
            path.write_text('{"step": 40')
    before = {kind: path.read_bytes() for kind, path in files.items()}
    status, said = report(copy, "--tokens", 500)
    assert status == 0, said
    (found,) = data_of(copy / "report.html")["runs"]
    assert found["dial"] is None
    assert found["analysis"]["tokens"] >= 500  # made for the page
    notes = {note["section"]: note for note in found["notes"]}
    assert notes["frontier"]["command"] == f"grmoe dial {copy}"
    assert notes["experts"]["command"] == f"grmoe analyze {copy}"
    words = "another version" if broken == "format" else "damaged"
    for note in notes.values():
        assert words in note["text"]
        assert note["command"] in said
    assert {kind: path.read_bytes() for kind, path in files.items()} == before


def test_the_report_imports_no_sibling() -> None:
    """Other rooms come in as results or as functions."""
    imported = set()
    for path in Path(grmoe.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported |= {name.split(".")[1] for name in names if name.startswith("grmoe.")}
    assert {"probe", "runs", "report"} <= imported
    assert imported.isdisjoint(
        {"analyze", "dial", "evaluate", "prune", "serve", "train", "studies", "bench", "cli"}
    )


def test_an_analysis_of_another_dial_is_made_again_and_left_alone(run: Path, tmp_path: Path) -> None:
    """The page says that types are counted at the saved α."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("analysis"))
    done = CliRunner().invoke(app, ["analyze", str(copy), "--alpha", "3.3", "--tokens", "500"])
    assert done.exit_code == 0, done.output
    content = collect(copy)
    assert content.analysis is not None
    assert [layer["alpha"] for layer in content.analysis["layers"]] == [1.5, 1.0]
    kept = json.loads((copy / "analysis" / "results.json").read_text())
    assert [layer["alpha"] for layer in kept["body"]["layers"]] == pytest.approx([3.3, 3.3])


def test_an_analysis_is_found_again_whatever_the_digits_of_alpha(data: Path, tmp_path: Path) -> None:
    run = train_run(tmp_path / "run", data, 2, alpha=[0.7, 1.3])
    stages: list[str] = []
    for _ in range(2):
        stages.clear()
        collect(run, progress=lambda stage, done, total: stages.append(stage))
    assert "sampling gates" in stages
    assert "routing" not in stages


def test_a_frontier_of_another_step_is_named_and_not_shown(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = copy / "dial" / "results.json"
    change_results(path, step=7)
    content = collect(copy)
    assert content.dial is None
    (note,) = [n for n in content.notes if n.section == "frontier"]
    assert "step 7" in note.text
    assert note.command == f"grmoe dial {copy} --checkpoint 40"


def test_an_exported_model_asks_for_text_and_takes_it(run: Path, tmp_path: Path) -> None:
    model, text = tmp_path / "model", tmp_path / "text.txt"
    export(run, model)
    text.write_text("zero One the three 4 five; six() " * 40)
    status, said = report(model)
    assert status == 0
    assert "--text FILE" in said
    (found,) = data_of(tmp_path / "model-report.html")["runs"]
    assert found["sample"] is None
    assert found["model"]["total"] > 0
    status, said = report(model, "--text", text, "--tokens", 300)
    assert status == 0, said
    (found,) = data_of(tmp_path / "model-report.html")["runs"]
    assert found["analysis"]["text"] == str(text)
    assert sum(len(w["pieces"]) for w in found["sample"]["windows"]) > 100
    assert not (model / "analysis").exists()  # an exported folder is passed on


def test_the_model_of_a_dial_points_to_its_run(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    model = copy / "dial" / "model"
    export(copy, model, budget=1.5)
    (note,) = [n for n in collect(model).notes if n.section == "frontier"]
    assert (note.text, note.command) == (f"The results of its dial are in {copy}.", f"grmoe report {copy}")
    (copy / "dial" / "results.json").unlink()
    (note,) = [n for n in collect(model).notes if n.section == "frontier"]
    assert note.command == f"grmoe dial {model} --text FILE"


def _dialled_export(run: Path, tmp_path: Path) -> Path:
    """An exported model with the results of its dial beside it. Its own folder has no curve of budgets."""
    copy, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(run, copy)
    results = json.loads((copy / "dial" / "results.json").read_text())
    shutil.rmtree(copy / "dial")
    export(copy, model)
    (tmp_path / "model-dial").mkdir()
    results |= {"step": None, "weights": fingerprint(model)}
    (tmp_path / "model-dial" / "results.json").write_text(json.dumps(results))
    return model


def test_an_exported_model_writes_at_the_budgets_that_were_measured_beside_it(
    run: Path, tmp_path: Path
) -> None:
    """`grmoe dial MODEL` leaves the folder as it was: the curve is in MODEL-dial/results.json alone."""
    model = _dialled_export(run, tmp_path)
    content = collect(model)
    assert content.dial is not None
    assert content.writing is not None
    assert content.model is not None
    measured = json.loads((tmp_path / "model-dial" / "results.json").read_text())["body"]["curve"]
    assert content.model["curve"] == measured
    budgets = [text["budget"] for text in content.writing["texts"]]
    assert (budgets[0], budgets[-1]) == tuple(measured[i]["experts_per_token"] for i in (0, -1))
    # The folder itself takes no budget, so no command gives it one.
    commands = [step.command for step in content.next]
    assert commands[0] == f"grmoe dial {model} --text FILE --write"
    assert not any("--budget" in command for command in commands)
    written = tmp_path / "model-dial" / "model"
    shutil.copytree(model, written)
    commands = [step.command for step in collect(model).next]
    assert f"grmoe serve {written}" in commands
    assert all(str(written) in command for command in commands)


def test_a_dial_of_other_weights_is_not_shown(run: Path, tmp_path: Path) -> None:
    """Another checkpoint was exported into the same folder since. Nothing else tells them apart."""
    model = _dialled_export(run, tmp_path)
    path = tmp_path / "model-dial" / "results.json"
    results = json.loads(path.read_text())
    path.write_text(json.dumps(results | {"weights": "0123456789abcdef"}))
    content = collect(model)
    assert content.dial is None
    assert "Measured with another model of this name." in [note.text for note in content.notes]
    path.write_text(json.dumps(results | {"weights": ""}))  # of an earlier version: not known
    assert collect(model).dial is not None


def test_a_dial_of_another_model_of_the_name_is_not_shown(run: Path, tmp_path: Path) -> None:
    model = _dialled_export(run, tmp_path)
    path = tmp_path / "model-dial" / "results.json"
    results = json.loads(path.read_text())
    for point in results["body"]["curve"]:
        point["cap"] = 5  # of four experts
    path.write_text(json.dumps(results))
    content = collect(model)
    assert content.dial is None
    (note,) = [n for n in content.notes if n.section == "frontier"]
    assert note.command == f"grmoe dial {model} --text FILE"


def test_a_run_that_may_only_be_read_has_a_page(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, page = tmp_path / "run", tmp_path / "page.html"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("analysis"))

    def refuse(*_: object, **options: object) -> None:
        raise OSError("Read-only file system: 'analysis'")

    monkeypatch.setattr("grmoe.report.content.save_results", refuse)
    status, said = report(copy, "--tokens", 500, "--out", page)
    assert status == 0, said
    assert "could not be saved: Read-only file system" in said
    assert data_of(page)["runs"][0]["analysis"] is not None


def test_what_cannot_be_read_is_one_line(run: Path, tmp_path: Path) -> None:
    status, said = report(tmp_path)
    assert status == 2
    assert "neither a run" in said
    status, said = report(run, "--text", tmp_path / "missing.txt")
    assert status == 2
    assert "missing.txt" in said
    assert "Traceback" not in said


def test_a_run_whose_model_is_gone_is_shown_by_its_log(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints")
    with (copy / "log.jsonl").open("a") as log:  # a run that went wrong
        line = json.loads((run / "log.jsonl").read_text().splitlines()[0])
        log.write(json.dumps(line | {"step": 41, "loss": float("nan")}) + "\n")
    content = collect(copy)
    assert content.model is None
    assert content.curves is not None
    assert content.notes[0].section == "model"
    assert '"loss":[' in as_json(content.as_json()["curves"])  # NaN became null
    render([content])


def test_runs_of_one_name_are_told_apart(run: Path, page: Path, tmp_path: Path) -> None:
    assert page.is_file()  # with an analysis, which is copied
    shutil.copytree(run, tmp_path / "run")
    status, said = report(run, tmp_path / "run", "--out", tmp_path / "page.html")
    assert status == 0, said
    assert [r["name"] for r in data_of(tmp_path / "page.html")["runs"]] == [str(run), str(tmp_path / "run")]


@given(st.text('</script>!-&"\\\u2028é\n'))
def test_no_text_ends_the_script_it_stands_in(text: str) -> None:
    written = as_json({"piece": f"</script><!--{text}"})
    assert "<" not in written
    assert json.loads(written)["piece"] == f"</script><!--{text}"


def test_a_title_is_text() -> None:
    content = Content(name="<b>&{{script}}", path="path", exported=True)
    assert "<title>&lt;b&gt;&amp;{{script}}" in render([content])
