"""The model card after `grmoe dial`: every number in its tables comes from results.json."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.runs.export import export
from grmoe.runs.open import open_model
from grmoe.runs.results import load_results, save_results

MEASURED = "## Measured\n\nperplexity 12.3\n"  # a section of another command


def call(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def dialled(run: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run with results of `grmoe dial` and `grmoe eval`."""
    copy = tmp_path_factory.mktemp("card") / "run"
    shutil.copytree(run, copy)
    save_results(open_model(copy), "eval", {}, copy / "eval", card=MEASURED)
    call("dial", copy, "--target-experts", 1.45, "--tokens", 1024, "--check", data, "--write")
    return copy


def results(folder: Path) -> Any:
    return load_results(folder / "results.json", "dial").body


def tables(card: str, heading: str) -> list[list[list[str]]]:
    """The tables of a section as rows of cells, without their headings."""
    sections = re.split(r"^## ", card, flags=re.MULTILINE)
    (section,) = [s for s in sections if s.startswith(f"{heading}\n")]
    blocks = re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE)
    return [
        [[c.strip() for c in line.strip("|").split(" | ")] for line in b.splitlines()[2:]] for b in blocks
    ]


def check_dial_tables(card: str, found: Any) -> None:
    alphas, frontier, certificates = tables(card, "The dial")
    points = {"as trained": found["trained"], "chosen": found["chosen"]}
    points |= {f"{row['alpha']:g}": row for row in found["table"]}
    assert [row[0] for row in alphas] == ["as trained", "0.5", "1", "2", "5", "chosen"]
    for name, entropy, inverse, experts, perplexity, relative, speed in alphas:
        p = points[name]
        assert float(entropy) == pytest.approx(p["effective_experts_entropy"], abs=0.0051)
        assert float(inverse) == pytest.approx(p["effective_experts_inverse"], abs=0.0051)
        assert float(experts) == pytest.approx(p["experts_per_token"], abs=5.1e-4)
        assert float(perplexity) == pytest.approx(p["perplexity"], abs=5.1e-4)
        assert float(relative.split()[0]) == pytest.approx(p["speed"]["relative"], abs=0.0051)
        assert float(speed.replace(",", "")) == pytest.approx(p["speed"]["tokens_per_second"], abs=0.51)
    best = [p for p in found["points"] if p["on_frontier"] and p["speed"]]
    assert 1 < len(frontier) <= 3
    for row, p in ((frontier[0], best[0]), (frontier[-1], best[-1])):
        assert row[1] == p["name"]
        assert float(row[2]) == pytest.approx(p["experts_per_token"], abs=5.1e-4)
        assert float(row[3]) == pytest.approx(p["perplexity"], abs=5.1e-4)
        assert float(row[4].removesuffix(" %")) == pytest.approx(100 * p["increase"]["value"], abs=0.0051)
    assert [row[0] for row in certificates] == [str(c["layer"]) for c in found["certificates"]]
    for row, c in zip(certificates, found["certificates"], strict=True):
        assert float(row[1]) == pytest.approx(c["dropped_mean"], abs=5.1e-4)
        assert float(row[6]) == pytest.approx(c["exact"], rel=5.1e-3)
        assert float(row[7]) == pytest.approx(c["bound"], rel=5.1e-3)


def test_the_written_model_has_the_tables_once_and_says_which_setting_it_has(dialled: Path) -> None:
    card = (dialled / "dial" / "model" / "README.md").read_text()
    found = results(dialled / "dial")
    assert card.count("## The dial") == card.count("## Measured") == 1
    tau = found["chosen"]["setting"]["selection_tau"]
    rules = {"mass": "the fewest that reach probability", "at_least": "those with a weight of at least"}
    rule = rules[found["chosen"]["setting"]["selection"]]
    said = f"a budget of {found['budget']:g} experts per token ({rule} {tau:g}, at most 2, α"
    assert f"Routing in this folder: {said}" in card
    (budgets,) = tables(card, "Budgets")
    assert [float(row[0]) for row in budgets] == pytest.approx(
        [p["experts_per_token"] for p in found["curve"]], abs=5.1e-4
    )
    assert [float(row[1]) for row in budgets] == pytest.approx(
        [math.exp(p["loss"]) for p in found["curve"]], abs=5.1e-4
    )
    assert f"Asked: {found['asked']}." in card
    assert f"perplexity {found['chosen']['perplexity']:.3f}" in card
    assert "- Checked on data (" in card  # its name, not its place on this disk
    assert str(dialled.parent) not in card
    check_dial_tables(card, found)


def test_the_exported_run_has_the_dial_and_the_evaluation(dialled: Path, tmp_path: Path) -> None:
    export(dialled, tmp_path / "model", "last")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "Routing in this folder: α 1, the 2 most probable experts per token." in card  # as trained
    assert MEASURED in card
    check_dial_tables(card, results(dialled / "dial"))


def test_dialling_an_exported_folder_replaces_the_section(dialled: Path, data: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    export(dialled, model, "last")
    call("dial", model, "--text", data, "--tokens", 512, "--target-experts", 1.2, "--out", out, "--write")
    card = (out / "model" / "README.md").read_text()
    assert card.count("## The dial") == 1
    assert card.count("## Measured") == card.count("## Budgets") == 1  # other sections stay
    assert card.count("Routing in this folder: ") == 1
    assert "Asked: at most 1.2 experts per token." in card
    check_dial_tables(card, results(out))


def test_results_of_another_step_are_not_in_the_card_and_damaged_ones_are_refused(
    dialled: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(dialled, run)
    path = run / "dial" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 7}))
    export(run, tmp_path / "model", "last")
    assert "## The dial" not in (tmp_path / "model" / "README.md").read_text()
    path.write_text('{"step": 40}')
    with pytest.raises(ValueError, match=r"dial/results\.json was written by another version of grmoe"):
        export(run, tmp_path / "model", "last")
    assert "## Measured" in (tmp_path / "model" / "README.md").read_text()  # the earlier export is untouched
