"""From a run to a written model with fewer experts, through the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from twins import untrained
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.dial.measure import Increase, Meter
from grmoe.dial.text import Text, read_text
from grmoe.prune.choose import prediction_method, random_method
from grmoe.prune.gates import check_router
from grmoe.prune.measure import Divergence
from grmoe.prune.report import _kept
from grmoe.prune.site import sites, whole
from grmoe.prune.write import write_model
from grmoe.runs.export import export
from grmoe.runs.open import open_model

Trained = Callable[[str], Path]


def prune(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["prune", *map(str, arguments)])
    return done.exit_code, " ".join(done.output.split())


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def written(trained: Trained, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("written")
    status, said = prune(
        trained("grassmann"), "--experts", 2, "--tokens", 1024, "--out", out, "--write", "--check", data
    )
    assert status == 0, said
    return out, said


def test_the_written_model_is_the_measured_one(written: tuple[Path, str], data: Path) -> None:
    folder, _ = written
    found = results(folder)
    again = open_model(folder / "model")
    assert again.model.config.num_experts == found["experts"] == 2
    text = read_text(None, open_model(found["model"]), 32, 1024)
    assert Meter(again.model, text).trained.perplexity == found["chosen"]["perplexity"]
    other = read_text(str(data), again, 32, 1024)
    assert Meter(again.model, other).trained.perplexity == found["chosen"]["checks"][0]["perplexity"]
    saved = load_file(folder / "model" / "model.safetensors")
    assert sum(t.numel() * t.element_size() for t in saved.values()) == found["after"]["bytes"]
    assert found["after"]["parameters"] == sum(p.numel() for p in again.model.parameters())
    whole_model = open_model(found["model"]).model
    assert found["before"]["parameters"] == sum(p.numel() for p in whole_model.parameters())
    experts = [p for n, p in whole_model.named_parameters() if ".mlp." in n]
    assert (
        found["before"]["parameters"] - found["after"]["parameters"] == sum(p.numel() for p in experts) // 2
    )
    assert "## Pruned" in (folder / "model" / "README.md").read_text()


def test_the_card_has_no_numbers_of_the_whole_model(trained: Trained, tmp_path: Path) -> None:
    """Sections of `grmoe dial` and `grmoe eval` go, whether a run is exported or a folder copied; others stay."""
    run, model, out = tmp_path / "run", tmp_path / "model", tmp_path / "out"
    shutil.copytree(trained("grassmann"), run)
    dialled = CliRunner().invoke(app, ["dial", str(run), "--tokens", "512"])
    evaluated = CliRunner().invoke(app, ["eval", str(run), "--tokens", "200"])
    assert dialled.exit_code == evaluated.exit_code == 0, dialled.output + evaluated.output
    export(run, model, dtype=torch.float32)
    card = model / "README.md"
    card.write_text(f"{card.read_text()}\n## Mine\n\nstays\n")
    sections = [line for line in card.read_text().splitlines() if line.startswith("## ")]
    assert sections == ["## The dial", "## Measured", "## Mine"]
    for source, left in ((run, ["## Pruned"]), (model, ["## Mine", "## Pruned"])):
        opened = open_model(source)
        for site in sites(opened.model, read_text(None, open_model(run), 32, 512)):
            site.install(whole(4)[:3])
        write_model(opened, 3, out, "## Pruned\n\nfewer\n")
        found = (out / "README.md").read_text()
        assert [line for line in found.splitlines() if line.startswith("## ")] == left
        assert "relative throughput" not in found
        assert "bits/byte" not in found
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
        exact = o["perplexity"] / found["calibration"]["perplexity"] - 1
        assert o["increase"]["value"] == pytest.approx(exact, rel=1e-9, abs=1e-12)
    assert (folder / "prune.png").stat().st_size > 10_000
    for words in ("Overlap: lower loss than", "Size:", "Check:", "random drop, mean of 10"):
        assert words in said


def test_the_fewest_experts_within_a_bound(trained: Trained, data: Path, tmp_path: Path) -> None:
    """An exported folder, a softmax router: the rule is the dial's, and the folder stays as it was."""
    model, out = tmp_path / "model", tmp_path / "out"
    export(trained("softmax"), model, "last", dtype=torch.float32)
    before = {p.name: p.read_bytes() for p in model.iterdir()}
    common = (model, "--text", data, "--tokens", 1024, "--out", out)
    status, said = prune(*common, "--max-ppl-increase", "500%", "--write")
    assert status == 0, said
    found = results(out)
    assert found["experts"] == 2  # no fewer: a token gets two
    assert found["chosen"]["increase"]["high"] <= 5
    assert (
        Meter(open_model(out / "model").model, read_text(str(data), open_model(model), 32, 1024)).trained.loss
        == (found["chosen"]["loss"])
    )
    best = min(o["increase"]["high"] for o in found["outcomes"] if o["experts"] == 3 and o["draw"] is None)
    # A bound that 3 experts just miss: everything is reported, nothing written.
    status, said = prune(*common, "--max-ppl-increase", f"{max(best * 0.9, 1e-9):.9f}", "--write")
    assert status == 2
    assert "no model written: with one expert less no method stays within" in said
    assert "Size:" not in said  # of a model that there is not
    assert results(out)["chosen"] is None
    assert "Chosen: nothing: with 3 experts" in said
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before


def test_mistakes_are_one_line(trained: Trained, tmp_path: Path) -> None:
    run = trained("grassmann")
    (tmp_path / "out" / "model").mkdir(parents=True)
    for arguments, message in (
        ((run, "--experts", 3, "--max-ppl-increase", "1%"), "not both"),
        ((run, "--experts", 4), "experts must be from 2 to 3"),
        ((run, "--experts", 1), "experts must be from 2 to 3"),
        ((run, "--max-ppl-increase", "much"), "max-ppl-increase must be a number like 1%"),
        ((tmp_path,), "neither a run"),
        ((run, "--experts", 3, "--tokens", 64), "at least 8 windows"),
        ((run, "--experts", 3, "--write"), "exists and is no exported model"),
        ((run, "--experts", 3, "--check", tmp_path / "none.txt"), "neither a file"),
        ((trained("hash"), "--experts", 3), "router 'hash' cannot be pruned"),
    ):
        status, said = prune(*arguments, "--out", tmp_path / "out")
        assert status == 2, said
        assert message in said
        assert "Traceback" not in said


def test_what_cannot_be_pruned_is_refused() -> None:
    for fields, message in (
        ({"router_options": {"amortizer": "affinity"}}, "amortizer"),
        ({"router": "switch"}, "chooses its experts by itself"),
        ({"alpha": 0.0}, "alpha must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            check_router(untrained(**fields).config)


def test_the_prediction_method_takes_the_least_damage_layer_by_layer() -> None:
    model = untrained(num_experts_per_tok=2)
    rows = torch.randint(0, 50, (8, 33), generator=torch.Generator().manual_seed(0))
    found = sites(model, Text("random", rows))
    seen: list[tuple[list[int], float]] = []
    draw = torch.Generator().manual_seed(1)

    def loss() -> float:
        value = float(torch.rand((), generator=draw))
        seen.append(([site.layer.router.num_experts for site in found], value))
        return value

    step = prediction_method(loss)
    after = step(found, [whole(4)] * 2)
    assert [len(layout) for layout in after] == [3, 3]
    assert [s for s, _ in seen] == [[3, 4]] * 8 + [
        [3, 3]
    ] * 8  # four drops and four merges, the first layer first
    for site, layout, tried in zip(found, after, (seen[:8], seen[8:]), strict=True):
        best = min(range(8), key=lambda i: tried[i][1])
        assert (len({e for group in layout for e in group}) == 3) == (best < 4)  # a drop, or a merge
        assert site.layer.router.num_experts == 3


def test_the_divergence_is_the_plain_formula() -> None:
    model = untrained(num_experts_per_tok=2)
    text = Text("random", torch.randint(0, 50, (9, 33), generator=torch.Generator().manual_seed(0)))
    ids, found = text.rows_WS[:, :-1], sites(model, text)
    divergence = Divergence(model, text)
    assert divergence() == pytest.approx(0, abs=1e-9)
    with torch.no_grad():
        p0 = model(input_ids=ids).logits.double().softmax(-1)
        found[0].install(whole(4)[:3])
        p = model(input_ids=ids).logits.double().softmax(-1)
    want = float((p0 * (p0 / p).log()).sum(-1).mean())
    assert want > 1e-4
    assert divergence() == pytest.approx(want, rel=1e-3)  # differences of fp32 log-probabilities


def test_random_draws_follow_their_seed() -> None:
    model = untrained(num_experts_per_tok=2)
    rows = torch.randint(0, 50, (8, 33), generator=torch.Generator().manual_seed(0))
    found = sites(model, Text("random", rows))
    for kind in ("random drop", "random merge"):
        start = [whole(4)] * 2
        drawn = [random_method(kind, seed)(found, start) for seed in range(20)]
        assert drawn[3] == random_method(kind, 3)(found, start)
        assert len({tuple(d) for d in drawn}) > 8


def test_the_verdict_on_other_text() -> None:
    assert _kept(0.01, Increase(0.005, 0.002, 0.008)) == ": kept"
    assert "reaches past the limit" in _kept(0.01, Increase(0.009, 0.002, 0.012))
    assert _kept(0.01, Increase(0.015, 0.012, 0.018)) == ": missed by 0.50 points"
    assert _kept(0.01, Increase(0.015, 0.009, 0.02)) == ": missed by 0.50 points, within its noise"
