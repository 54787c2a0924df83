"""The dial's promise: a tiny model is dialled as the study does it, and the page follows from what was found."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from grmoe.dial import calibration
from grmoe.studies import promise
from grmoe.studies.measuring import Measured
from grmoe.studies.model_study import list_jobs
from grmoe.studies.page import Verdict
from grmoe.studies.study import Place
from grmoe.terminal import silent
from grmoe.train.loop import train


@pytest.fixture(scope="module")
def body(make_settings: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("promise")
    config = make_settings(folder)(steps=4)
    train(config)
    other = folder / "other.txt"
    other.write_text("def total(values):\n    return sum(values)\n" * 60)
    place = Place(results=folder / "results", work=folder, tokens=512, texts=(other,))
    with pytest.MonkeyPatch.context() as patch:
        # Beside other trainings a speed means nothing, and it takes longer than all else.
        patch.setattr(calibration, "time_points", lambda *_: pytest.fail("something was timed"))
        found = promise.measure_run(Path(config.out), place, silent)
    loaded: dict[str, Any] = json.loads(json.dumps(dict(found)))
    return loaded


def models(*bodies: dict[str, Any]) -> dict[str, list[Measured]]:
    """The same models for both gates."""
    runs = [Measured(recipe="r", seed=i, revision="r", machine="m", body=b) for i, b in enumerate(bodies)]
    return dict.fromkeys(("token-mass", "softmax-token-mass"), runs)


def changed(body: dict[str, Any], **chosen: float) -> dict[str, Any]:
    found = copy.deepcopy(body)
    found["chosen"] |= {"experts_per_token": 1.05, "load_cv": 0.05, "min_load": 0.6, **chosen}
    found["checks"][0] |= {"missed_by": -0.002}
    return found


def verdicts(*bodies: dict[str, Any]) -> list[Verdict]:
    return [claim.verdict for claim in promise.write(models(*bodies)).claims[:3]]


def test_a_run_is_dialled_and_checked(body: dict[str, Any]) -> None:
    (check,) = body["checks"]
    assert check["text"] == "other.txt"
    assert check["missed_by"] == pytest.approx(check["increase"]["value"] - 0.01)
    assert body["chosen"]["increase"]["high"] <= 0.01  # what the dial promises on the text it chose on
    assert body["budgets"][0]["budget"] == 2
    assert body["frontier"][0]["experts_per_token"] == 1


def test_every_seed_counts(body: dict[str, Any]) -> None:
    good = changed(body)
    assert verdicts(good, good) == [Verdict.OPEN] * 3
    assert verdicts(good, good, good) == [Verdict.HOLDS] * 3
    assert verdicts(good, good, changed(body, experts_per_token=1.11))[0] is Verdict.FAILS
    missed = changed(body)
    missed["checks"][0]["missed_by"] = 1e-6
    assert verdicts(good, missed, good)[1] is Verdict.FAILS
    assert verdicts(good, good, changed(body, load_cv=0.21))[2] is Verdict.FAILS
    assert verdicts(good, good, changed(body, min_load=0.009))[2] is Verdict.FAILS


def test_each_text_has_its_own_increase_by_budget(body: dict[str, Any]) -> None:
    bodies = [copy.deepcopy(body) for _ in range(3)]
    for i, one in enumerate(bodies):
        for row in one["checks"][0]["budgets"]:
            row["increase"]["value"] = 0.01 * i + (0.02 if row["budget"] == 1 else 0)
    table = promise.write(models(*bodies)).tables[2]
    assert list(table.headings) == ["model", "budget", "validation", "other.txt"]
    row_at = {row[1]: row for row in table.rows if row[0] == "GrMoE"}
    assert list(row_at) == [f"{row['budget']:g}" for row in body["budgets"]]
    assert row_at["1"][3] == "+3.00 ± 2.48; +4.00"
    assert row_at["2"][3] == "+1.00 ± 2.48; +2.00"
    here = 100 * body["budgets"][-1]["increase"]["value"]
    assert row_at["1"][2] == f"{here:+.2f} ± 0.00; {here:+.2f}"


def test_without_results_nothing_is_decided() -> None:
    page = promise.write({"token-mass": [], "softmax-token-mass": []})
    assert {claim.verdict for claim in page.claims} == {Verdict.OPEN}
    assert {claim.ours for claim in page.claims} == {""}


def test_the_page_has_both_models(body: dict[str, Any], tmp_path: Path) -> None:
    page = promise.write(models(changed(body)))
    assert [table.title for table in page.tables] == [
        "1 % asked for, by seed",
        "`set_budget`: means over seeds",
        "Increase on each text: mean over seeds, and the worst seed, %",
    ]
    assert {row[0] for table in page.tables for row in table.rows} == {"GrMoE", "softmax"}
    first = page.tables[0]
    worst = first.headings.index("worst domain")
    unknown = changed(body) | {"domains": {}}
    assert promise.write(models(unknown)).tables[0].rows[0][worst] == "–"
    known = changed(body) | {"domains": {"wiki": {"value": 0.002}, "code": {"value": 0.0071}}}
    assert promise.write(models(known)).tables[0].rows[0][worst] == "code +0.71 %"
    (figure,) = page.figures
    figure.draw(tmp_path / "promise.png")
    assert (tmp_path / "promise.png").stat().st_size > 10_000


def test_the_models_are_not_those_that_the_margin_was_chosen_from() -> None:
    chosen_from = json.loads((Path(__file__).parents[2] / "results" / "dial-small-domains.json").read_text())
    before = {model["seed"] for model in chosen_from["models"]}
    assert before == set(range(5))
    seeds = [job.seed for job in list_jobs((promise.GROUP,))]
    assert not before & set(seeds)
    assert sorted(seeds) == sorted([5, 6, 7, 8, 9] * 2)
    assert {job.seed for job in list_jobs((promise.GROUP,), Place(results=Path(), work=Path(), seeds=2))} == {
        5,
        6,
    }


def test_it_asks_for_other_texts(tmp_path: Path) -> None:
    assert "--text" in promise.KIND.lacks(Place(results=tmp_path, work=tmp_path))
    assert not promise.KIND.lacks(Place(results=tmp_path, work=tmp_path, texts=(Path("a.txt"),)))
