"""Studies of the paper: pages that results alone decide, verdicts by rule, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from test_language_model import put_one
from test_models_store import a_run
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.config import load
from grmoe.runs.config import TrainConfig
from grmoe.studies import language_model, post_hoc, throughput
from grmoe.studies.learning_rates import best_rates
from grmoe.studies.model_study import ModelStudy
from grmoe.studies.models import Run, Store, run_folder, worker
from grmoe.studies.models.recipes import best_rate
from grmoe.studies.models.summary import Mean, difference, mean, model_table
from grmoe.studies.page import Verdict
from grmoe.studies.pages import page_files, page_text, write_pages
from grmoe.studies.registry import NAMES, check_keep, check_only, find_studies, find_study
from grmoe.studies.study import Place
from grmoe.studies.tasks import result_file

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
    # Sizes, sums and angles need no measurement.
    assert undecided or name in ("overhead", "scale", "separation")
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
    with pytest.raises(ValueError, match=r"only must be one of 'grmoe', 'grmoe-amortised', got 'magic'"):
        check_only(["grmoe", "magic"], find_studies(["depth"]))
    check_keep(["none", "grmoe"], find_studies(["gates"]))
    with pytest.raises(ValueError, match="keep must be one of"):
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


def test_first_seeds_are_timed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Speeds of two calls do not compare."""
    place = Place(results=tmp_path / "results", work=tmp_path / "work", device="cpu")
    place.results.mkdir()
    jobs = post_hoc.STUDY.needs(place).models
    assert [job.name for job in jobs] == ["grmoe-dense-0", "token-mass-0", "softmax-bias-0", "softmax-one-0"]
    seen = []

    def timed(recipe: str, folder: Path, device: str) -> list[throughput.Speed]:
        seen.append(recipe)
        return [throughput.Speed(recipe=recipe, setting="top-1", tokens_per_second=100.0, how="eager")]

    monkeypatch.setattr(post_hoc, "time_run", timed)
    for job in jobs:
        post_hoc.STUDY.finish(place, lambda *_: None)
        assert f"{job.name}, " in capsys.readouterr().err or job is jobs[-1]
        folder = run_folder(place.work, job)
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
        result_file(folder).touch()
    assert seen == []
    post_hoc.STUDY.finish(place, lambda *_: None)
    post_hoc.STUDY.finish(place, lambda *_: None)
    assert seen == [job.recipe.name for job in jobs]
    assert set(throughput.read_speeds(place.results)) == {(name, "top-1") for name in seen}
    assert post_hoc.STUDY.state(place.results).done == 1
    assert post_hoc.STUDY.needs(place).models == []
    assert post_hoc.STUDY.needs(replace(place, steps=7)).models == []


def a_frontier(seed: int, **losses: float) -> Run:
    """A model with these losses by setting."""
    one = a_run(seed)
    rows = [replace(one.rows[0], setting=name.replace("_", "-"), loss=loss) for name, loss in losses.items()]
    return replace(one, rows=rows)


def test_the_loss_at_a_throughput_lies_between_settings() -> None:
    run = a_frontier(0, top_2=3.0, mass=3.3, top_1=3.2)
    speeds = {"top-2": 100.0, "mass": 120.0, "top-1": 200.0}  # mass is slower and worse than top-1
    assert throughput.loss_at(run, speeds, 150.0) == pytest.approx(3.1)
    assert throughput.loss_at(run, speeds, 50.0) == 3.0  # as fast as asked, and faster
    assert throughput.loss_at(run, speeds, 203.0) == 3.2  # within the error of timing
    assert throughput.loss_at(run, speeds, 210.0) is None
    assert throughput.loss_at(run, {}, 100.0) is None


def test_models_are_compared_at_the_measured_throughput(tmp_path: Path) -> None:
    """Before, at equal experts per token, whatever their speed."""
    for seed in range(3):
        more = seed / 100
        put_one(tmp_path, "token-mass", a_frontier(seed, top_2=3.0 + more, top_1=3.2 + more))
        put_one(tmp_path, "softmax-bias", a_frontier(seed, top_2=3.05 + more))
        put_one(tmp_path, "softmax-one", a_frontier(seed, top_1=3.25 + 1.01 * more))

    def claim(**speeds: float) -> Any:
        rows = [
            asdict(throughput.Speed(recipe=recipe, setting=setting, tokens_per_second=speed, how="eager"))
            for (recipe, setting), speed in zip(
                (("token-mass", "top-2"), ("token-mass", "top-1"), ("softmax-bias", "top-2"), ("softmax-one", "top-1")),
                speeds.values(),
                strict=True,
            )
        ]  # fmt: skip
        throughput.speed_file(tmp_path).write_text(json.dumps({"rows": rows}))
        page = post_hoc.STUDY.page(tmp_path)
        return next(c for c in page.claims if c.where.startswith("Figure 4"))

    found = claim(two=100.0, one=200.0, softmax_two=110.0, softmax_one=190.0)
    assert found.verdict is Verdict.CHANGED
    assert "top-2: -0.0300" in found.ours
    assert "top-1: -0.0701" in found.ours
    assert claim(two=100.0, one=200.0, softmax_two=140.0, softmax_one=190.0).verdict is Verdict.OPEN
    slow = claim(two=100.0, one=150.0, softmax_two=110.0, softmax_one=190.0)
    assert "top-1: not as fast" in slow.ours


def test_learning_rates_are_those_that_were_best() -> None:
    """The table of recipes agrees with results, where there are any."""
    for (setting, method), best in best_rates(Store(RESULTS)).items():
        assert best_rate(setting, method) == best, f"{method} ({setting}) is best at {best:g}"


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner()
    shown = run.invoke(app, ["reproduce", "all", "--status", "--results", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "language-model" in shown.output
    assert "0/81" in shown.output
    nothing = run.invoke(app, ["reproduce", "--results", str(tmp_path)])
    assert nothing.exit_code == 2
    assert "name a study, or all" in nothing.output
    unknown = run.invoke(app, ["reproduce", "magic"])
    assert "study must be one of 'synthetic'" in unknown.output
    no_data = run.invoke(app, ["reproduce", "hash", "language-model", "--results", str(tmp_path)])
    assert no_data.exit_code == 2
    assert run.invoke(app, ["reproduce", "dynamics", "--results", str(tmp_path)]).exit_code == 2
