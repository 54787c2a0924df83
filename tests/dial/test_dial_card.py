"""The card of a dialled run: every number of its tables is the one of results.json."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.runs.export import export


def call(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def dialled(run: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run, dialled, written and evaluated into its own folder."""
    copy = tmp_path_factory.mktemp("card") / "run"
    shutil.copytree(run, copy)
    call("dial", copy, "--target-experts", 1.5, "--tokens", 1024, "--check", data, "--write")
    call("eval", copy, "--tokens", 500, "--alpha", 0.5, "--alpha", 2)
    return copy


def results(run: Path, name: str) -> Any:
    return json.loads((run / name / "results.json").read_text())


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
    for name, entropy, inverse, experts, perplexity, speed in alphas:
        p = points[name]
        assert float(entropy) == pytest.approx(p["effective_experts_entropy"], abs=0.0051)
        assert float(inverse) == pytest.approx(p["effective_experts_inverse"], abs=0.0051)
        assert float(experts) == pytest.approx(p["experts"], abs=5.1e-4)
        assert float(perplexity) == pytest.approx(p["perplexity"], abs=5.1e-4)
        assert float(speed) == pytest.approx(p["speed"]["relative"], abs=0.0051)
    best = [p for p in found["points"] if p["on_frontier"] and p["speed"]]
    assert 1 < len(frontier) <= 3
    for row, p in ((frontier[0], best[0]), (frontier[-1], best[-1])):
        assert float(row[0]) == pytest.approx(p["experts"], abs=5.1e-4)
        assert float(row[1]) == pytest.approx(p["perplexity"], abs=5.1e-4)
        assert float(row[2].removesuffix(" %")) == pytest.approx(100 * p["increase"]["value"], abs=0.0051)
    assert [row[0] for row in certificates] == [str(c["layer"]) for c in found["certificates"]]
    for row, c in zip(certificates, found["certificates"], strict=True):
        assert float(row[1]) == pytest.approx(c["dropped_mean"], abs=5.1e-4)
        assert float(row[6]) == pytest.approx(c["exact"], rel=5.1e-3)
        assert float(row[7]) == pytest.approx(c["bound"], rel=5.1e-3)


def test_the_written_model_has_the_tables_once_and_says_which_setting_it_has(dialled: Path) -> None:
    card = (dialled / "dial" / "model" / "README.md").read_text()
    found = results(dialled, "dial")
    assert card.count("## The dial") == 1
    assert "This folder has the chosen setting." in card
    assert f"Asked: {found['asked']}." in card
    assert f"perplexity {found['chosen']['perplexity']:.3f}" in card
    assert "- Checked on data (" in card  # its name, not its place on this disk
    assert str(dialled.parent) not in card
    check_dial_tables(card, found)


def test_the_exported_run_has_the_dial_and_the_evaluation(dialled: Path, tmp_path: Path) -> None:
    export(dialled, tmp_path / "model", "last")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "This folder has the trained setting." in card
    check_dial_tables(card, results(dialled, "dial"))
    ((experts, perplexity, bits),) = tables(card, "Measured")
    for column, point in enumerate(results(dialled, "eval")["points"]):
        total = point["totals"]["validation"]
        assert experts[1 + column] == f"{point['experts_per_token']:.3f}"
        assert perplexity[1 + column] == f"{total['perplexity']:.3f}"
        assert bits[1 + column] == f"{total['bits_per_byte']:.4f}"


def test_dialled_again_from_its_folder_the_section_is_replaced(
    dialled: Path, data: Path, tmp_path: Path
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    export(dialled, model, "last")
    call("dial", model, "--text", data, "--tokens", 1024, "--target-experts", 1.2, "--out", out, "--write")
    card = (out / "model" / "README.md").read_text()
    assert card.count("## The dial") == 1
    assert card.count("## Measured") == 1  # what else stood in the card stays
    assert "Asked: at most 1.2 experts a token." in card
    check_dial_tables(card, json.loads((out / "results.json").read_text()))


def test_results_of_another_step_or_broken_ones_are_not_passed_on(dialled: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(dialled, run)
    path = run / "dial" / "results.json"
    path.write_text(json.dumps(results(run, "dial") | {"step": 7}))
    export(run, tmp_path / "model", "last")
    assert "## The dial" not in (tmp_path / "model" / "README.md").read_text()
    path.write_text('{"step": 40}')
    with pytest.raises(ValueError, match=r"dial/results\.json is damaged or of another version"):
        export(run, tmp_path / "model", "last")
    assert "## Measured" in (tmp_path / "model" / "README.md").read_text()  # the earlier export is untouched
