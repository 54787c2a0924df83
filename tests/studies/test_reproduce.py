"""Studies of the paper: pages that results alone decide, verdicts by rule, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from test_models_store import a_run
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.config import load
from grmoe.runs.config import TrainConfig
from grmoe.studies import language_model
from grmoe.studies.learning_rates import best_rates
from grmoe.studies.model_study import ModelStudy
from grmoe.studies.models import Store, worker
from grmoe.studies.models.recipes import Base, Recipe, best_rate
from grmoe.studies.models.summary import Mean, difference, mean, model_table
from grmoe.studies.page import Verdict
from grmoe.studies.pages import page_files, page_text, status_table, write_pages
from grmoe.studies.registry import NAMES, check_keep, check_only, find_studies, find_study
from grmoe.studies.study import Place

ROOT = Path(__file__).parents[2]
RESULTS, PAGES = ROOT / "results", ROOT / "docs" / "results" / "paper"
STUDIES = [study for study in find_studies([]) if isinstance(study, ModelStudy)]


def test_pages_are_made_from_results_byte_for_byte() -> None:
    """So every number in them comes from results."""
    texts, figures = page_files(find_studies([]), RESULTS)
    kept = {path.name: path.read_text() for path in PAGES.iterdir()}
    assert texts == kept, "make them again with: grmoe reproduce --pages"
    images = ROOT / "docs" / "images" / "paper"
    assert set(figures) == ({path.name for path in images.iterdir()} if images.is_dir() else set())


def test_pages_and_figures_that_are_no_longer_made_are_removed(tmp_path: Path) -> None:
    study = find_study("normalizer")
    written = write_pages([study], tmp_path / "none", tmp_path)
    page = (written["Pages"] / "normalizer.md").read_text()
    (written["Pages"] / "old.md").write_text(page)
    (written["Figures"] / "old.png").touch()
    (written["Pages"] / "mine.md").write_text("# My notes")
    (written["Figures"] / "notes").mkdir()
    write_pages([study], tmp_path / "none", tmp_path)
    assert sorted(p.name for p in written["Pages"].iterdir()) == ["index.md", "mine.md", "normalizer.md"]
    assert [p.name for p in written["Figures"].iterdir()] == ["notes"]


@pytest.mark.parametrize("name", NAMES)
def test_a_study_without_results_decides_nothing(name: str, tmp_path: Path) -> None:
    study = find_study(name)
    assert study.name == name
    assert study.state(tmp_path).done == 0
    page = study.page(tmp_path)
    undecided = {claim.verdict for claim in page.claims} <= {Verdict.OPEN, Verdict.UNTESTABLE}
    # Sizes, sums, angles and arithmetic need no measurement.
    assert undecided or name in ("overhead", "scale", "separation", "ablations", "post-hoc")
    assert Verdict.OPEN in {claim.verdict for claim in page.claims} or not page.claims
    assert page.figures == []
    assert page_text(study, page, tmp_path).startswith("<!-- Made by")


def test_every_recipe_can_be_trained_and_no_model_is_trained_twice() -> None:
    """Each setting names a key that exists, and no two names are the same training, in all studies."""
    seen: dict[tuple[str, str], str] = {}
    for base, recipe in dict.fromkeys((job.base, job.recipe) for study in STUDIES for job in study.jobs()):
        config = load(TrainConfig, None, [*base.settings, *recipe.settings])
        same = base.name, json.dumps(worker.identity(config), sort_keys=True)
        assert seen.setdefault(same, recipe.name) == recipe.name


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_a_study_trains_every_model_that_its_page_reads(
    study: ModelStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, `gates` left two claims open with all its models trained: `budgets` alone trained the others."""
    read: set[tuple[str, str]] = set()
    real = Store.path

    def path(store: Store, base: Base, recipe: Recipe | str) -> Path:
        found = real(store, base, recipe)
        read.add((base.name, found.stem))
        return found

    monkeypatch.setattr(Store, "path", path)
    study.page(tmp_path)
    assert read <= {(group.base.name, recipe.name) for group in study.groups for recipe in group.recipes}


def test_the_same_recipe_has_the_same_settings_in_all_studies() -> None:
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for study in STUDIES:
        for job in study.jobs():
            key = job.base.name, job.recipe.name
            assert found.setdefault(key, job.recipe.settings) == job.recipe.settings


def test_parts_of_a_study(tmp_path: Path) -> None:
    place = Place(results=tmp_path, work=tmp_path, only=("grmoe", "hash"), seeds=2, steps=7)
    jobs = language_model.STUDY.jobs(place)
    assert [job.name for job in jobs] == ["grmoe-0", "hash-0", "grmoe-1", "hash-1"]
    assert {job.base.name for job in jobs} == {"small-2500-for-7"}
    assert "steps=7" in jobs[0].base.settings


def test_a_part_is_of_one_of_the_studies() -> None:
    """Before, only studies that train models looked: `grmoe reproduce depth --only magic` did nothing."""
    studies = find_studies([])
    check_only([part for study in studies for part in study.parts], studies)
    assert all(study.parts for study in studies)
    with pytest.raises(
        ValueError, match=r"unknown part \(--only\) 'magic'\. `grmoe reproduce STUDY --only \?` lists"
    ):
        check_only(["grmoe", "magic"], find_studies(["depth"]))
    check_keep(["none", "grmoe"], find_studies(["gates"]))
    with pytest.raises(ValueError, match=r"unknown recipe \(--keep\) 'grmoo'; did you mean 'grmoe'"):
        check_keep(["grmoo"], find_studies(["gates"]))


def test_a_recipe_on_one_base_alone(tmp_path: Path) -> None:
    """The name stands on two bases: models of 8 wide and of 32 narrow experts."""
    study = find_study("gates")
    assert isinstance(study, ModelStudy)

    def bases(only: str) -> set[str]:
        check_only([only], [study])
        return {job.base.name for job in study.jobs(Place(results=tmp_path, work=tmp_path, only=(only,)))}

    assert bases("vmf") == {"small-2500", "small-fine-2500"}
    assert bases("small-2500/vmf") == {"small-2500"}
    assert "small-2500/vmf-one" not in study.parts  # it stands on one base only


def test_differences_pair_seeds_and_one_seed_has_no_interval() -> None:
    a, b = [a_run(0, 3.5), a_run(1, 4.5), a_run(9, 0.0)], [a_run(1, 4.0), a_run(0, 3.0)]
    found = difference(a, b)
    assert found is not None
    assert (found.value, found.half, found.seeds) == (pytest.approx(0.5), pytest.approx(0.0), 2)
    assert mean([2.0]) == Mean(2.0, None, 1)
    assert mean([]) is None
    (cells,) = model_table("", [("A", [a_run(0, 3.0)], None)]).rows
    assert cells[3:5] == ("3.0000", f"{math.exp(3):.2f}")
    assert cells[8] == "0/1 (0–79 %)"


def test_learning_rates_are_those_that_were_best() -> None:
    """The table of recipes agrees with results, where there are any."""
    for (setting, method), best in best_rates(Store(RESULTS)).items():
        assert best_rate(setting, method) == best, f"{method} ({setting}) is best at {best:g}"


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner()
    shown = run.invoke(app, ["reproduce", "all", "--status", "--results", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "language-model" in shown.output
    assert "0/84" in shown.output
    screen = Console(width=80)
    with screen.capture() as printed:
        screen.print(status_table(find_studies([]), tmp_path))
    # A column per verdict once left five letters of a name for a line.
    assert {"language-model", "learned-normalizer", "Sections", "measured"} <= set(printed.get().split())
    nothing = run.invoke(app, ["reproduce", "--results", str(tmp_path)])
    assert nothing.exit_code == 2
    assert "name a study, or all" in nothing.output
    unknown = run.invoke(app, ["reproduce", "magic"])
    assert "study must be one of 'synthetic'" in unknown.output
    parts = run.invoke(app, ["reproduce", "depth", "--only", "?"])
    assert parts.exit_code == 0, parts.output
    assert parts.output.split() == ["grmoe", "depth", "grmoe-amortised", "depth"]
    kept = run.invoke(app, ["reproduce", "depth", "--keep", "?"])
    assert [line.split()[0] for line in kept.output.splitlines()] == ["none", "grmoe", "grmoe-amortised"]
    no_data = run.invoke(app, ["reproduce", "hash", "language-model", "--results", str(tmp_path)])
    assert no_data.exit_code == 2
    assert run.invoke(app, ["reproduce", "dynamics", "--results", str(tmp_path)]).exit_code == 2
