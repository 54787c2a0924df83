"""From a run to a written model with fewer experts, through the command line."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from twins import untrained
from typer.testing import CliRunner

import grmoe.runs.open
from grmoe.cli import app
from grmoe.probe.losses import measure
from grmoe.probe.windows import Text, read_windows
from grmoe.prune import Plan, run, save
from grmoe.prune.choose import prediction_method, random_method
from grmoe.prune.divergence import Divergence
from grmoe.prune.gates import check_router
from grmoe.prune.layers import all_experts, prunable_layers
from grmoe.prune.results import Result, chance
from grmoe.prune.surgery import _fewest_experts
from grmoe.runs.export import export
from grmoe.runs.open import open_model
from grmoe.runs.results import load_results, save_results

Trained = Callable[[str], Path]


def prune(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["prune", *map(str, arguments)])
    return done.exit_code, " ".join(done.output.split())


def results(folder: Path) -> Any:
    return load_results(folder / "results.json", "prune").body


@pytest.fixture(scope="module")
def written(trained: Trained, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("written")
    status, said = prune(
        trained("grassmann"), "--experts", 2, "--tokens", 1024, "--out", out, "--write", "--check", data
    )
    assert status == 0, said
    return out, said


def test_the_written_model_is_the_measured_one(
    written: tuple[Path, str], trained: Trained, data: Path
) -> None:
    folder, _ = written
    found = results(folder)
    again = open_model(folder / "model")
    assert again.model.config.num_experts == found["experts"] == 2
    whole = open_model(trained("grassmann"))
    for i, text in enumerate((read_windows(None, whole, 32, 1024), read_windows(str(data), again, 32, 1024))):
        # To the last digit.
        assert measure(again.model, text).perplexity == found["chosen"]["texts"][i]["perplexity"]
        assert measure(whole.model, text).perplexity == found["texts"][i]["perplexity"]
    saved = load_file(folder / "model" / "model.safetensors")
    assert sum(t.numel() * t.element_size() for t in saved.values()) == found["after"]["bytes"]
    assert found["after"]["parameters"] == sum(p.numel() for p in again.model.parameters())
    assert found["before"]["parameters"] == sum(p.numel() for p in whole.model.parameters())
    experts = sum(p.numel() for n, p in whole.model.named_parameters() if ".mlp." in n)
    assert found["before"]["parameters"] - found["after"]["parameters"] == experts // 2
    card = (folder / "model" / "README.md").read_text()
    assert "## Pruned" in card
    assert f"{found['texts'][1]['perplexity']:.3f} | {found['chosen']['texts'][1]['perplexity']:.3f}" in card
    assert str(data.parent) not in card  # names of texts, not their place on this disk
    told = CliRunner().invoke(app, ["info", str(folder / "model")], env={"COLUMNS": "200"}).output
    assert "of its training, before experts were pruned" in told


def test_writing_opens_the_checkpoint_once(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, opened = grmoe.runs.open._open_run, []
    source = trained("grassmann")  # training first: it opens nothing, but it is not what is counted

    def count(*args: Any) -> Any:
        opened.append(args)
        return original(*args)

    monkeypatch.setattr(grmoe.runs.open, "_open_run", count)
    status, said = prune(source, "--experts", 3, "--tokens", 512, "--out", tmp_path, "--write")
    assert status == 0, said
    assert len(opened) == 1


def test_in_python_the_result_holds_the_pruned_model(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages: list[tuple[int, int]] = []
    plan = Plan(model=trained("grassmann"), experts=3, tokens=512)
    result = run(plan, lambda stage, done, total: stages.append((done, total)))
    model, chosen = result.loaded.model, result.body.chosen
    assert chosen is not None
    assert model.config.num_experts == 3
    assert measure(model, read_windows(None, result.loaded, 32, 512)).loss == chosen.texts[0].loss
    places = save(result, tmp_path / "out")
    assert {name: path.name for name, path in places.items()} == {
        "Numbers": "results.json",
        "Figure": "prune.png",
    }
    assert [done for done, _ in stages] == list(range(1, len(stages) + 1))
    assert stages[-1][0] == stages[-1][1]  # as many as announced
    monkeypatch.setattr("grmoe.prune.saving.draw", lambda _, path: path)
    _check_earlier(result, tmp_path / "out", capsys)


def _check_earlier(result: Result, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of an earlier prune stays beside results of the same model only."""
    folder, nothing = out / "model", replace(result, body=replace(result.body, chosen=None))
    weight = next(result.loaded.model.parameters())

    def left() -> tuple[list[str], str]:
        return sorted(path.name for path in out.glob("model*")), capsys.readouterr().err

    save(result, out, write=True)
    capsys.readouterr()
    save(result, out)
    assert left() == (["model"], "")
    with torch.no_grad():
        weight[0, 0] += 1  # one number differs
    save(result, out)
    moved = f"{folder} was of an earlier prune: moved to {folder}-old"
    assert left() == (["model-old"], f"{moved}. --write saves the model of this one\n")
    save(result, out, write=True)
    weight.data = weight.data + 1
    save(nothing, out, write=True)
    names, said = left()
    assert names == ["model-old", "model-old-2"]  # nothing is lost
    assert said.endswith(f"{moved}-2. This one found none\n")


def test_the_card_has_no_numbers_of_the_whole_model(trained: Trained, data: Path, tmp_path: Path) -> None:
    """Sections of other commands go, for a run and for an exported folder. What the user wrote stays."""
    source, model, out = tmp_path / "run", tmp_path / "model", tmp_path / "out"
    shutil.copytree(trained("grassmann"), source)
    for kind, heading in (("dial", "## The dial"), ("eval", "## Measured")):
        save_results(open_model(source), kind, {}, source / kind, card=f"{heading}\n\nof the whole model\n")
    export(source, model, dtype=torch.float32)
    card = model / "README.md"
    card.write_text(f"{card.read_text()}\n## Mine\n\nstays\n")
    sections = [line for line in card.read_text().splitlines() if line.startswith("## ")]
    assert sections == ["## The dial", "## Measured", "## Mine"]
    for path, left in ((source, ["## Pruned"]), (model, ["## Mine", "## Pruned"])):
        save(run(Plan(model=path, experts=3, text=str(data), tokens=512)), out, write=True)
        found = (out / "model" / "README.md").read_text()
        assert [line for line in found.splitlines() if line.startswith("## ")] == left
        assert "of the whole model" not in found
        assert "validation perplexity" in found


def test_every_method_is_measured_at_every_number(written: tuple[Path, str]) -> None:
    folder, said = written
    found = results(folder)
    for experts in (3, 2):
        own = [o for o in found["outcomes"] if o["experts"] == experts]
        assert {o["method"]: sum(p["method"] == o["method"] for p in own) for o in own} == {
            "prediction": 1,
            "overlap merge": 1,
            "overlap drop": 1,
            "output merge": 1,
            "output drop": 1,
            "load drop": 1,
            "certificate drop": 1,
            "fisher drop": 1,
            "random drop": 10,
            "random merge": 10,
        }
        for outcome in own:
            for layout in outcome["layouts"]:
                members = [e for group in layout for e in group]
                assert len(layout) == experts
                assert len(set(members)) == len(members)
                assert ("merge" not in outcome["method"]) or len(members) == 4
                assert ("drop" not in outcome["method"]) or len(members) == experts
    final = [o for o in found["outcomes"] if o["experts"] == 2 and o["draw"] is None]
    assert found["chosen"]["divergence"] == min(o["divergence"] for o in final)
    for o in final:
        assert len(o["texts"]) == 2
        for own, base in zip(o["texts"], found["texts"], strict=True):
            exact = own["perplexity"] / base["perplexity"] - 1
            assert own["increase"]["value"] == pytest.approx(exact, rel=1e-9, abs=1e-12)
    for layer in found["certificates"]:
        assert 0 < layer["error"] <= layer["bound"]
    for i, c in enumerate(found["random"]["random drop"]):
        drawn = [
            o["texts"][i]["perplexity"]
            for o in found["outcomes"]
            if o["method"] == "random drop" and o["experts"] == 2
        ]
        assert (c["smallest"], c["largest"]) == pytest.approx((min(drawn), max(drawn)))
    assert (folder / "prune.png").stat().st_size > 10_000
    bound = "Bound: certificate drop, block 0: ‖y − ŷ‖ ≤"
    for words in ("Overlap: lower loss than", bound, "Size:", "Check:", "random drop, mean of 10"):
        assert words in said


def test_the_fewest_experts_within_a_bound(trained: Trained, data: Path, tmp_path: Path) -> None:
    """An exported folder with a softmax router. The folder stays as it was."""
    model, out = tmp_path / "model", tmp_path / "out"
    export(trained("softmax"), model, "last", dtype=torch.float32)
    before = {p.name: p.read_bytes() for p in model.iterdir()}
    common = (model, "--text", data, "--tokens", 1024, "--out", out)
    status, said = prune(*common, "--max-ppl-increase", "500%", "--write")
    assert status == 0, said
    found = results(out)
    assert found["experts"] == 2  # no fewer: a token gets two
    assert f"Next: grmoe dial {out / 'model'} --text FILE --write" in said
    assert found["chosen"]["texts"][0]["increase"]["high"] <= 5
    again = open_model(out / "model")
    text = read_windows(str(data), again, 32, 1024)
    assert measure(again.model, text).loss == found["chosen"]["texts"][0]["loss"]
    own = [o for o in found["outcomes"] if o["experts"] == 3 and o["draw"] is None]
    best = min(o["texts"][0]["increase"]["high"] for o in own)
    # A bound that 3 experts just miss: everything is reported, nothing written.
    status, said = prune(*common, "--max-ppl-increase", f"{max(best * 0.9, 1e-9):.9f}", "--write")
    assert status == 2
    assert "no model written: with one expert fewer, no method keeps perplexity within" in said
    assert "Size:" not in said  # there is no pruned model
    assert results(out)["chosen"] is None
    assert results(out)["after"] is None
    assert "Chosen: nothing. With 3 experts" in said
    assert said.index("Asked:") < said.rindex("as trained")  # the answer, then the table
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before


def test_mistakes_are_one_line(trained: Trained, tmp_path: Path) -> None:
    source = trained("grassmann")
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / "model" / "mine.txt").write_text("mine")
    for arguments, message in (
        ((source, "--experts", 3, "--max-ppl-increase", "1%"), "not both"),
        ((source, "--experts", 4), "experts must be from 2 to 3"),
        ((source, "--experts", 1), "experts must be from 2 to 3"),
        ((source, "--max-ppl-increase", "much"), "max-ppl-increase must be a number like 1%"),
        ((tmp_path,), "neither a run"),
        ((source, "--experts", 3, "--tokens", 64), "at least 8 windows"),
        ((source, "--experts", 3, "--write"), "exists and is not an exported model"),
        ((source, "--experts", 3, "--check", tmp_path / "none.txt"), "neither a file"),
        ((trained("hash"), "--experts", 3), "router 'hash' cannot be pruned"),
    ):
        status, said = prune(*arguments, "--out", tmp_path / "out")
        assert status == 2, said
        assert message in said
        assert "Traceback" not in said


def test_what_cannot_be_pruned_is_refused() -> None:
    for fields, message in (
        ({"router_options": {"amortizer": "affinity"}}, "amortizer"),
        ({"router": "switch"}, "selects its experts by itself"),
        ({"alpha": 0.0}, "alpha must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            check_router(untrained(**fields).config)
    assert _fewest_experts(untrained(num_experts_per_tok=3).config) == 3
    with pytest.raises(ValueError, match="more than 4 experts to prune, got 4 with up to 4 per token"):
        _fewest_experts(untrained(num_experts_per_tok=4).config)  # before, an IndexError after minutes


def test_the_prediction_method_takes_the_least_damage_layer_by_layer() -> None:
    model = untrained(num_experts_per_tok=2)
    rows = torch.randint(0, 50, (8, 33), generator=torch.Generator().manual_seed(0))
    layers = prunable_layers(model, Text("random", rows))
    seen: list[tuple[list[int], float]] = []
    draw = torch.Generator().manual_seed(1)

    def loss() -> float:
        value = float(torch.rand((), generator=draw))
        seen.append(([own.layer.router.num_experts for own in layers], value))
        return value

    step = prediction_method(loss)
    after = step(layers, [all_experts(4)] * 2)
    assert [len(layout) for layout in after] == [3, 3]
    assert [s for s, _ in seen] == [[3, 4]] * 8 + [
        [3, 3]
    ] * 8  # four drops and four merges, the first layer first
    for own, layout, tried in zip(layers, after, (seen[:8], seen[8:]), strict=True):
        best = min(range(8), key=lambda i: tried[i][1])
        assert (len({e for group in layout for e in group}) == 3) == (best < 4)  # a drop, or a merge
        assert own.layer.router.num_experts == 3


def test_the_divergence_is_the_plain_formula() -> None:
    model = untrained(num_experts_per_tok=2)
    text = Text("random", torch.randint(0, 50, (9, 33), generator=torch.Generator().manual_seed(0)))
    ids, layers = text.inputs_WS, prunable_layers(model, text)
    divergence = Divergence(model, text)
    assert divergence() == pytest.approx(0, abs=1e-9)
    with torch.no_grad():
        p0 = model(input_ids=ids).logits.double().softmax(-1)
        layers[0].install(all_experts(4)[:3])
        p = model(input_ids=ids).logits.double().softmax(-1)
    want = float((p0 * (p0 / p).log()).sum(-1).mean())
    assert want > 1e-4
    assert divergence() == pytest.approx(want, rel=1e-3)  # differences of fp32 log-probabilities


def test_random_draws_follow_their_seed() -> None:
    model = untrained(num_experts_per_tok=2)
    rows = torch.randint(0, 50, (8, 33), generator=torch.Generator().manual_seed(0))
    layers = prunable_layers(model, Text("random", rows))
    for kind in ("random drop", "random merge"):
        start = [all_experts(4)] * 2
        drawn = [random_method(kind, seed)(layers, start) for seed in range(20)]
        assert drawn[3] == random_method(kind, 3)(layers, start)
        assert len({tuple(d) for d in drawn}) > 8


def test_chance_is_the_mean_with_its_interval() -> None:
    losses = [1.0, 1.2] * 5
    found = chance(losses)
    # Standard deviation 0.1·√(10/9), divided by √10; 1.833 is Student's t for nine degrees of freedom.
    error = 1.833 * 0.1 / 3
    want = [math.exp(v) for v in (1.1, 1.1 - error, 1.1 + error, 1.0, 1.2)]
    assert [found.mean, found.low, found.high, found.smallest, found.largest] == pytest.approx(want)
