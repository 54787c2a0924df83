"""Training curves over seeds: spread, dips and starved experts."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_language_model import put, put_one
from test_models_store import a_run

from grmoe.studies import dynamics
from grmoe.studies.models import Point
from grmoe.studies.page import Verdict


def curve(*losses: float, min_load: float = 0.1) -> list[Point]:
    return [
        Point(step=100 * i, loss=loss, entropy=1.0, load_cv=0.1, min_load=min_load if i == 3 else 0.1)
        for i, loss in enumerate(losses)
    ]


DOWN = [4.0 - i / 10 for i in range(12)]
DIPPING = [*DOWN[:4], DOWN[3] + 0.05, *DOWN[5:]]


def claim(results: Path, start: str) -> tuple[str, Verdict]:
    found = (c for c in dynamics.STUDY.page(results).claims if c.text.startswith(start))
    return next((c.ours, c.verdict) for c in found)


def test_every_figure_draws(tmp_path: Path) -> None:
    """With results for every model of the study."""
    names = {job.recipe.name for job in dynamics.STUDY.jobs()}
    put(tmp_path, {name: [3.0, 3.1, 3.2] for name in names}, curve=curve(*DOWN))
    (figure,) = dynamics.STUDY.page(tmp_path).figures
    figure.draw(tmp_path / "dynamics.png")
    assert (tmp_path / "dynamics.png").stat().st_size > 10_000


def test_dips_and_spread() -> None:
    smooth, dipping = a_run(0, curve=curve(3.0, 2.9, 2.91)), a_run(1, curve=curve(3.0, 2.8, 2.9))
    assert (dynamics.dips(smooth), dynamics.dips(dipping)) == ([], [1.0])
    third = a_run(2, curve=curve(3.0, 2.7))
    assert dynamics.shared_steps([smooth, dipping, third]) == [0, 100]
    assert dynamics.spread([smooth, dipping, third], 100) == pytest.approx(0.1)
    assert dynamics.spread([smooth, dipping], 100) is None


def test_dips_of_grmoe_are_judged_without_those_of_softmax(tmp_path: Path) -> None:
    ours, theirs = "GrMoE has no such dips", "Two of five softmax seeds"
    put(tmp_path, {"grmoe": [3.0] * 3}, curve=curve(*DOWN))
    assert claim(tmp_path, ours)[1] is Verdict.UNDECIDED  # none of three
    put(tmp_path, {"grmoe": [3.0] * 5}, curve=curve(*DOWN))
    assert claim(tmp_path, ours)[1] is Verdict.CHANGED  # the prior is ours
    assert claim(tmp_path, theirs) == ("", Verdict.OPEN)
    put(tmp_path, {"softmax": [3.0] * 5}, curve=curve(*DOWN))
    assert claim(tmp_path, theirs)[1] is Verdict.UNDECIDED  # at 40 % of seeds, none of five is no surprise
    put_one(tmp_path, "softmax", a_run(4, curve=curve(*DIPPING)))
    assert claim(tmp_path, theirs) == ("1/5 (4–62 %), after 36 % of the training", Verdict.HOLDS)
    put_one(tmp_path, "grmoe", a_run(2, curve=curve(*DIPPING)))
    assert claim(tmp_path, ours)[1] is Verdict.FAILS


@pytest.mark.parametrize(("least", "verdict"), [(0.01, Verdict.CHANGED), (0.0099, Verdict.FAILS)])
def test_no_expert_is_starved_at_any_point(least: float, verdict: Verdict, tmp_path: Path) -> None:
    put(tmp_path, {"grmoe": [3.0] * 5, "softmax": [3.0]}, curve=curve(*DOWN))
    put_one(tmp_path, "grmoe", a_run(1, curve=curve(*DOWN, min_load=least)))
    shown, found = claim(tmp_path, "GrMoE has stable, balanced routing")
    assert found is verdict
    assert shown.startswith("GrMoE 0/5" if verdict is Verdict.CHANGED else "GrMoE 1/5")


def test_the_amortised_gate_is_judged_by_itself(tmp_path: Path) -> None:
    """An amortiser can starve an expert where the plain gate does not. The paper's gate is shown beside ours."""
    ours, amortised = "GrMoE has stable, balanced routing", "GrMoE + Amort. has stable"
    put(tmp_path, {name: [3.0] * 5 for name in ("grmoe", "grmoe-amortised")}, curve=curve(*DOWN))
    assert (claim(tmp_path, ours)[1], claim(tmp_path, amortised)[1]) == (Verdict.CHANGED, Verdict.CHANGED)
    put(tmp_path, {"grmoe-paper": [3.0]}, curve=curve(*DOWN, min_load=0.0))
    put_one(tmp_path, "grmoe-amortised", a_run(1, curve=curve(*DOWN, min_load=0.0)))
    assert claim(tmp_path, amortised) == ("1/5 (4–62 %)", Verdict.FAILS)
    shown, found = claim(tmp_path, ours)
    assert (shown.endswith("penalty 1/1 (21–100 %)"), found) == (True, Verdict.CHANGED)
