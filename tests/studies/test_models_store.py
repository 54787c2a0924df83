"""The store of trained models: jobs that run once, continue, fail alone, and are never mixed up."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from grmoe.config import from_dict, read_tree
from grmoe.runs.config import TrainConfig
from grmoe.studies import tasks
from grmoe.studies.models import (
    Base,
    Job,
    Point,
    Recipe,
    Row,
    Run,
    Store,
    StudyError,
    Trained,
    find_recipe,
    run_jobs,
    runner,
    vary,
    worker,
)
from grmoe.studies.models.recipes import RECIPES
from grmoe.studies.study import Place

TINY = (
    "model.preset=null", "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2",
    "model.num_attention_heads=2", "model.num_experts=4", "model.router_rank=8", "model.max_position_embeddings=32",
    "model.tie_word_embeddings=true", "data.batch_size=4", "optim.lr=3e-3", "validation.tokens=100",
)  # fmt: skip
BASE = Base("tiny", (*TINY, "steps=3", "validation.every=1", "checkpoint.every=0"))
MINE = Recipe("mine", "Mine", ("elastic.unit=off",))


def a_run(seed: int, loss: float = 3.0, **changes: Any) -> Run:
    row = Row(
        text="validation", setting="top-2", experts_per_token=2.0, loss=loss, load_cv=0.1, min_load=0.5, collapsed=False
    )  # fmt: skip
    point = Point(step=3, loss=loss, entropy=1.0, load_cv=0.1, min_load=0.1)
    told: dict[str, Any] = {
        "tokens": 9,
        "trained": "top-2",
        "revision": "r",
        "machine": "m",
        "curve": [point],
    }
    return Run(**({"seed": seed, "rows": [row]} | told | changes))


class FakeProcess:
    """In place of a process: does the work when it is started, and has the status that `behave` returns."""

    behave: Callable[[dict[str, Any]], int | None]

    def __init__(self, command: list[str], **_: Any) -> None:
        order = json.loads(Path(command[-1]).read_text())
        self.status, self.signals = FakeProcess.behave(order), list[int]()

    def poll(self) -> int | None:
        return self.status

    def terminate(self) -> None:
        self.signals.append(signal.SIGTERM)
        self.status = 143

    def wait(self, timeout: float) -> int | None:
        return self.status


def seed_of(order: dict[str, Any]) -> int:
    return int(next(s for s in order["settings"] if s.startswith("seed=")).removeprefix("seed="))


def trains(order: dict[str, Any]) -> int:
    run = a_run(seed_of(order), measured=order["tokens"])
    Path(order["result"]).write_text(json.dumps(asdict(run)))
    return 0


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(tasks, "POLL", 0.0)
    monkeypatch.setattr(tasks.subprocess, "Popen", FakeProcess)
    monkeypatch.setattr(FakeProcess, "behave", staticmethod(trains), raising=False)
    return Place(
        results=tmp_path / "results",
        work=tmp_path / "work",
        data=prepared,
        device="cpu",
        at_once=2,
        tokens=256,
    )


def jobs(recipe: Recipe = MINE, seeds: int = 2) -> list[Job]:
    return [Job(BASE, recipe, seed) for seed in range(seeds)]


def test_a_real_job_is_trained_measured_and_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def really(order: dict[str, Any]) -> int:
        return worker.main(str(Path(order["result"].replace(".result.", ".order."))))

    monkeypatch.setattr(FakeProcess, "behave", staticmethod(really))
    run_jobs(jobs(seeds=1), place)
    kept = Store(place.results).read(BASE, MINE)
    assert kept is not None
    (run,) = kept.runs
    assert kept.config["model.num_experts"] == 4
    assert "seed" not in kept.config
    assert kept.data["tokens"] > 0
    assert run.tokens == 3 * 4 * 32
    assert [point.step for point in run.curve] == [1, 2, 3]
    assert all(point.train_loss is not None for point in run.curve)
    assert [row.setting for row in run.rows] == ["top-2", "top-1", "mass 0.3", "mass 0.5", "mass 0.7"]
    assert [row.experts_per_token for row in run.rows[:2]] == [2.0, 1.0]
    assert run.trained == "top-2"
    # The text that it was trained on is kept apart: it is no other text to judge by.
    assert run.training is not None
    assert [row.setting for row in run.training] == [row.setting for row in run.rows]
    assert {row.text for row in run.rows} == {"validation"}
    seen, held_out = run.row("training"), run.row()
    assert seen is not None
    assert held_out is not None
    assert seen.text == "training"
    assert seen.loss != held_out.loss
    assert run.kappa is not None
    assert run.max_overlap is not None
    for row in (*run.rows, *run.training):
        assert row.starved is not None
        assert row.starved_paper is not None
        assert len(row.starved) == len(row.starved_paper) == len(run.kappa)  # by layer
        assert (any(row.starved), any(row.starved_paper)) == (row.collapsed, row.collapsed_paper)
    monkeypatch.setattr(
        FakeProcess, "behave", staticmethod(lambda _: pytest.fail("a finished job ran again"))
    )
    run_jobs(jobs(seeds=1), place)


def test_finished_jobs_are_skipped_and_new_seeds_added(place: Place) -> None:
    store = Store(place.results)
    run_jobs(jobs(seeds=1), place)
    run_jobs(jobs(seeds=3), place)
    assert [run.seed for run in store.runs(BASE, MINE)] == [0, 1, 2]
    text = store.path(BASE, MINE).read_text()
    run_jobs(jobs(seeds=3), place)
    assert store.path(BASE, MINE).read_text() == text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("elastic.unit=off", "optim.lr=1e-3"), r"optim.lr: 0.003 → 0.001"),
        (("elastic.unit=off", "steps=4"), r"steps: 3 → 4"),
        (("elastic.unit=off", "model.router=softmax"), r"model.router: 'grassmann' → 'softmax'"),
    ],
)
def test_a_name_with_other_settings_is_refused(place: Place, settings: tuple[str, ...], said: str) -> None:
    run_jobs(jobs(), place)
    with pytest.raises(ValueError, match=said):
        run_jobs(jobs(replace(MINE, settings=settings)), place)
    # What changes no number may change.
    run_jobs(jobs(seeds=3), replace(place, settings=("log.every=5", "compile=false")))


def test_a_setting_that_is_newer_than_the_file_counts_by_its_default(place: Place) -> None:
    run_jobs(jobs(), place)
    store = Store(place.results)
    path = store.path(BASE, MINE)
    old = json.loads(path.read_text())
    del old["config"]["routing.prior_rate"]
    path.write_text(json.dumps(old))
    run_jobs(jobs(seeds=3), place)
    assert store.read(BASE, MINE).seeds == [0, 1, 2]  # type: ignore[union-attr]
    old["config"]["optim.clip"] = 2.0
    path.write_text(json.dumps(old))
    with pytest.raises(ValueError, match=r"optim\.clip: 2\.0 → 1\.0"):
        run_jobs(jobs(), place)


def test_results_without_a_count_of_starved_experts_are_read_and_stay(tmp_path: Path) -> None:
    store, base = Store(tmp_path), Base("small", ())
    data = {"tokens": 1, "vocabulary": 8}
    new = replace(a_run(1).rows[0], starved=[0, 3], starved_paper=[0, 0])
    for run in (a_run(0), a_run(1, rows=[new])):
        store.add(base, Trained(recipe="grmoe", label="", settings=(), config={}, data=data, runs=[run]))
    rows = [run.rows[0] for run in store.runs(base, "grmoe")]
    assert [(row.starved, row.starved_paper) for row in rows] == [(None, None), ([0, 3], [0, 0])]
    assert store.path(base, "grmoe").read_text().count("starved") == 2  # both of the second model


def test_other_data_is_refused(place: Place) -> None:
    run_jobs(jobs(), place)
    path = Store(place.results).path(BASE, MINE)
    path.write_text(path.read_text().replace('"checksum": "', '"checksum": "0'))
    with pytest.raises(ValueError, match=r"the data: .* tokens, vocabulary .* checksum 0"):
        run_jobs(jobs(), place)


def test_models_measured_on_fewer_tokens_are_not_mixed_with_others(place: Place) -> None:
    run_jobs(jobs(), place)
    for other in (512, None):
        with pytest.raises(ValueError, match=r"mine\.json was measured with --tokens 256"):
            run_jobs(jobs(seeds=3), replace(place, tokens=other))
    assert Store(place.results).read(BASE, MINE).seeds == [0, 1]  # type: ignore[union-attr]


def test_a_failed_job_does_not_stop_the_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_first(order: dict[str, Any]) -> int:
        if seed_of(order) == 0:
            Path(order["result"].replace(".result.json", ".txt")).write_text("first\nout of memory\n")
            return 3
        return trains(order)

    monkeypatch.setattr(FakeProcess, "behave", staticmethod(fails_first))
    with pytest.raises(StudyError, match=r"mine-0 ended with status 3 .*:\nfirst\nout of memory"):
        run_jobs(jobs(seeds=3), replace(place, at_once=1))
    assert [run.seed for run in Store(place.results).runs(BASE, MINE)] == [1, 2]


def test_when_the_time_is_up_running_jobs_stop_and_nothing_starts(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def never_ends(order: dict[str, Any]) -> None:
        started.append(seed_of(order))

    monkeypatch.setattr(FakeProcess, "behave", staticmethod(never_ends))
    run_jobs(jobs(seeds=5), replace(place, until=time.monotonic() + 0.2))
    assert started == [0, 1]
    assert "5 of 5 jobs are left; the same command continues" in capsys.readouterr().err
    # A job that took longer than the time left is not started.
    Store(place.results).add(BASE, replace(a_plan(place), runs=[a_run(7, seconds=100.0, measured=256)]))
    run_jobs(jobs(seeds=5), replace(place, until=time.monotonic() + 50))
    assert started == [0, 1]


def a_plan(place: Place) -> Any:
    return runner._plans(jobs(), place, Store(place.results))["tiny", "mine"]


def test_models_are_removed_once_measured_unless_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_folder(order: dict[str, Any]) -> int:
        Path(order["result"].removesuffix(".result.json")).mkdir()
        return trains(order)

    monkeypatch.setattr(FakeProcess, "behave", staticmethod(with_folder))
    other = replace(MINE, name="other")
    run_jobs([*jobs(seeds=1), *jobs(other, seeds=1)], replace(place, keep=("other",)))
    folders = [runner.run_folder(place.work, job).is_dir() for job in (*jobs(seeds=1), *jobs(other, seeds=1))]
    assert folders == [False, True]


def test_every_recipe_is_a_training_that_exists() -> None:
    """Each setting names a key, and no two recipes are the same training."""
    from grmoe.config import load
    from grmoe.studies.models import small

    found = {}
    for recipe in RECIPES.values():
        config = load(TrainConfig, None, [*small(100).settings, *recipe.settings])
        found[recipe.name] = json.dumps(worker.identity(config), sort_keys=True)
    assert len(set(found.values())) == len(found)


def test_recipes_of_ones_own_and_lists() -> None:
    assert find_recipe("grmoe") is RECIPES["grmoe"]
    mine = find_recipe("my-z: model.router=softmax  elastic.unit=off")
    assert mine == Recipe("my-z", "my-z", ("model.router=softmax", "elastic.unit=off"))
    ranks = vary(mine, "model.router_rank=8,16")
    assert [r.name for r in ranks] == ["my-z-router_rank-8", "my-z-router_rank-16"]
    assert ranks[1].settings == (*mine.settings, "model.router_rank=16")
    for wrong, message in (
        ("?", r"unknown recipe '\?'\. `grmoe compare --recipe \?` lists all \d\d$"),
        (
            "softmax-bais",
            r"unknown recipe 'softmax-bais'; did you mean 'softmax-bias' or .*\? `grmoe compare",
        ),
        ("a b: x=1", "the name of a recipe must have letters"),
        ("grmoe: x=1", "must have a new name"),
    ):
        with pytest.raises(ValueError, match=message):
            find_recipe(wrong)
    with pytest.raises(ValueError, match="--vary must look like key=a,b,c"):
        vary(mine, "model.router_rank")


def test_a_wrong_recipe_is_named_before_anything_is_trained(place: Place) -> None:
    with pytest.raises(ValueError, match=r"recipe 'typo': unknown key 'optim\.lrr'"):
        run_jobs([*jobs(), *jobs(Recipe("typo", "", ("optim.lrr=1",)))], place)
    with pytest.raises(ValueError, match="give prepared text with --data FOLDER"):
        run_jobs(jobs(), replace(place, data=None))
    with pytest.raises(ValueError, match=r"source missing\.txt is neither a file"):
        run_jobs(jobs(), replace(place, texts=(Path("missing.txt"),)))


def test_a_file_that_is_not_of_results_is_named(tmp_path: Path) -> None:
    store, base = Store(tmp_path), Base("small", ())
    store.path(base, "grmoe").parent.mkdir(parents=True)
    store.path(base, "grmoe").write_text("{}")
    with pytest.raises(ValueError, match=r"grmoe\.json cannot be read: it is not a file of results"):
        store.runs(base, "grmoe")


def test_texts_of_one_name_are_refused(place: Place, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("words " * 50)
    texts = (tmp_path / "a" / "x.txt", tmp_path / "b" / "x.txt")
    with pytest.raises(ValueError, match=r"texts must have different names, got x\.txt, x\.txt"):
        run_jobs(jobs(seeds=1), replace(place, texts=texts))


def test_folders_with_unusual_names(place: Place, prepared: Path, tmp_path: Path) -> None:
    """All models of `--out 'a: b #1'` were once to be trained in the folder a, or in none."""
    work, data = tmp_path / "a: b #1", tmp_path / "x: y"
    data.symlink_to(prepared)
    (task,) = runner.training_tasks([Job(BASE, MINE, 0)], replace(place, work=work, data=data))
    config = from_dict(TrainConfig, read_tree(None, task.order["settings"]))
    assert (config.out, config.data.path) == (str(work / "models" / "tiny" / "mine-0"), str(data))


@pytest.mark.parametrize("setting", ["optim.lr=0.5", "steps=2", "seed=3", "out=elsewhere"])
def test_settings_that_change_a_study_are_refused(place: Place, setting: str) -> None:
    with pytest.raises(
        ValueError, match=f"these settings change what a study trains, or where: {setting[:4]}"
    ):
        run_jobs(jobs(seeds=1), replace(place, settings=("compile=false", setting)))
    assert not place.results.exists()


def test_two_processes_add_to_one_file(tmp_path: Path) -> None:
    """Each has its own handle of the folder, as two processes have."""
    base = Base("small", ())

    def add(seeds: range) -> None:
        for seed in seeds:
            data = {"tokens": 1, "vocabulary": 8}
            about = Trained(
                recipe="grmoe", label="", settings=(), config={}, data=data, runs=[a_run(seed, 3.0)]
            )
            Store(tmp_path).add(base, about)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(add, range(first, first + 20)) for first in (0, 20)]:
            done.result()
    assert [run.seed for run in Store(tmp_path).runs(base, "grmoe")] == list(range(40))
