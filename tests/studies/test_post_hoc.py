"""The dial after training: what each α costs and saves, and models at the throughput of others."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from test_models_store import a_run

from grmoe.routing import SoftMoERouter
from grmoe.studies import throughput
from grmoe.studies.language_model import BASE
from grmoe.studies.models import Run, Store, Trained, run_folder
from grmoe.studies.page import Claim, Verdict
from grmoe.studies.post_hoc import STUDY, study
from grmoe.studies.post_hoc.claims import said_cost
from grmoe.studies.post_hoc.models import cut, dense
from grmoe.studies.study import Place
from grmoe.studies.tasks import result_file

CHANGED, FAILS, UNDECIDED, OPEN = Verdict.CHANGED, Verdict.FAILS, Verdict.UNDECIDED, Verdict.OPEN
AS_PAPER = {0.5: 0.015, 1.0: 0.0, 2.0: 0.01, 5.0: 0.045}  # nats above α = 1
EXPERTS = {0.5: 5.2, 1.0: 3.1, 2.0: 1.8, 5.0: 1.1}


def put_one(results: Path, name: str, run: Run) -> None:
    data = {"tokens": 1, "vocabulary": 8}
    Store(results).add(BASE, Trained(recipe=name, label=name, settings=(), config={}, data=data, runs=[run]))


def put_dial(
    results: Path,
    costs: Mapping[float, float],
    experts: Mapping[float, float] = EXPERTS,
    cut_costs: float = 0.1,
) -> None:
    """Three seeds of the model trained dense. cut_costs: what the 90 % rule costs at every α."""
    for seed in range(3):
        one = a_run(seed)
        rows = [
            replace(
                one.rows[0], setting=setting(alpha), loss=3.0 + seed / 10 + cost + seed * cost / 100 + more,
                effective_experts=experts[alpha],
            )
            for alpha, cost in costs.items()
            for setting, more in ((dense, 0.0), (cut, cut_costs))
        ]  # fmt: skip
        put_one(results, "grmoe-dense", replace(one, rows=rows))


def put_speeds(results: Path, **speeds: float) -> None:
    """Of the model trained dense by the 90 % rule: a0_5=82.0 is α = 0.5."""
    rows = [
        throughput.Speed(
            recipe="grmoe-dense",
            setting=cut(float(name[1:].replace("_", "."))),
            tokens_per_second=speed,
            how="eager",
        )
        for name, speed in speeds.items()
    ]
    throughput.speed_file(results).write_text(json.dumps({"rows": [asdict(row) for row in rows]}))


def claim(results: Path, start: str) -> Claim:
    (found,) = (c for c in STUDY.page(results).claims if c.text.startswith(start))
    return found


def test_what_an_alpha_costs_is_measured_by_one_rule(tmp_path: Path) -> None:
    """What the 90 % rule costs at α = 1 too is no cost of α."""
    text = "α = 2 costs"
    assert claim(tmp_path, text).verdict is OPEN
    put_dial(tmp_path, AS_PAPER)
    found = claim(tmp_path, text)
    assert found.verdict is CHANGED
    assert found.ours.startswith("α = 2: +0.0101")
    assert "dense +0.0101" in found.ours
    put_dial(tmp_path, AS_PAPER | {2.0: 0.012})
    assert claim(tmp_path, text).verdict is FAILS


def test_the_ends_of_the_frontier_need_loss_and_speed(tmp_path: Path) -> None:
    text = "The frontier spans"
    assert [round(said_cost(alpha), 4) for alpha in (0.5, 1.0, 2.0, 5.0)] == [0.0164, 0.0, 0.011, 0.0485]
    put_dial(tmp_path, AS_PAPER)
    assert claim(tmp_path, text).verdict is OPEN
    put_speeds(tmp_path, a1=100.0, a0_5=83.0, a2=124.0, a5=142.0)
    assert claim(tmp_path, text).verdict is CHANGED
    assert "1.42× at α = 5" in claim(tmp_path, text).ours
    assert claim(tmp_path, "α = 2 has 1.24").verdict is CHANGED
    put_speeds(tmp_path, a1=100.0, a0_5=81.0, a2=123.0, a5=142.0)
    assert claim(tmp_path, text).verdict is FAILS
    assert claim(tmp_path, "α = 2 has 1.24").verdict is FAILS
    put_speeds(tmp_path, a1=100.0, a2=123.6)  # before, "1.24×" and "does not hold"
    assert (claim(tmp_path, "α = 2 has 1.24").ours, claim(tmp_path, "α = 2 has 1.24").verdict) == (
        "1.24×",
        CHANGED,
    )
    put_speeds(tmp_path, a1=100.0, a0_5=83.0, a5=142.0)
    put_dial(tmp_path, AS_PAPER | {5.0: 0.05})
    assert claim(tmp_path, text).verdict is FAILS


def test_the_trained_alpha_is_the_best_if_all_others_lose_more(tmp_path: Path) -> None:
    text = "α = 1, as trained"
    put_dial(tmp_path, AS_PAPER)
    assert claim(tmp_path, text).verdict is CHANGED
    put_dial(tmp_path, AS_PAPER | {0.5: 0.0})
    assert claim(tmp_path, text).verdict is UNDECIDED
    put_dial(tmp_path, AS_PAPER | {0.5: -0.01})
    assert claim(tmp_path, text).verdict is FAILS


def test_effective_experts_fall_with_alpha(tmp_path: Path) -> None:
    put_dial(tmp_path, AS_PAPER)
    assert claim(tmp_path, "A larger α").verdict is CHANGED
    put_dial(tmp_path, AS_PAPER, EXPERTS | {5.0: 1.9})
    assert claim(tmp_path, "A larger α").verdict is FAILS


def test_alpha_adjusts_the_effective_experts_of_soft_moe(tmp_path: Path) -> None:
    """Without training: so the paper's sentence does not hold."""
    router = SoftMoERouter(32, 8, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for alpha in (0.5, 1.0, 2.0, 5.0):
        router.alpha = alpha
        found.append(float(1 / router(x).probs.detach().square().sum(-1).mean()))
    assert found == sorted(found, reverse=True)
    assert found[0] > 1.5 * found[-1]
    assert claim(tmp_path, "Soft MoE has no post-hoc").verdict is FAILS


def test_one_setting_is_named_once(tmp_path: Path) -> None:
    names = [row[0] for row in STUDY.page(tmp_path).tables[2].rows]
    assert names == ["Softmax + bias, top-2", "Softmax + bias, top-1"]


def test_the_model_with_random_budgets_is_named_so(tmp_path: Path) -> None:
    """Before, "per token, mass (default)", which says nothing beside models of other methods."""
    _, frontier, matched = STUDY.page(tmp_path).tables
    assert [row[0] for row in frontier.rows][:6:5] == ["GrMoE, random budgets", "Softmax + bias"]
    assert list(matched.headings[-2:]) == ["GrMoE, trained dense", "GrMoE, random budgets"]


def test_first_seeds_are_timed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Speeds of two calls do not compare."""
    place = Place(results=tmp_path / "results", work=tmp_path / "work", device="cpu")
    place.results.mkdir()
    jobs = STUDY.needs(place).models
    assert [job.name for job in jobs] == ["grmoe-dense-0", "token-mass-0", "softmax-bias-0", "softmax-one-0"]
    seen = []

    def timed(recipe: str, folder: Path, device: str) -> list[throughput.Speed]:
        seen.append(recipe)
        return [throughput.Speed(recipe=recipe, setting="top-1", tokens_per_second=100.0, how="eager")]

    monkeypatch.setattr(study, "time_run", timed)
    for job in jobs:
        STUDY.finish(place, lambda *_: None)
        assert f"{job.name}, " in capsys.readouterr().err or job is jobs[-1]
        folder = run_folder(place.work, job)
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
        result_file(folder).touch()
    STUDY.finish(replace(place, until=time.monotonic() + 60), lambda *_: None)
    assert "60 s are left" in capsys.readouterr().err.replace("\n", " ")  # it would be stopped half way
    assert seen == []
    STUDY.finish(place, lambda *_: None)
    STUDY.finish(place, lambda *_: None)
    assert seen == [job.recipe.name for job in jobs]
    assert set(throughput.read_speeds(place.results)) == {(name, "top-1") for name in seen}
    assert STUDY.state(place.results).done == 1
    assert STUDY.needs(place).models == []
    assert STUDY.needs(replace(place, steps=7)).models == []


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

    def dominates(speeds: Mapping[tuple[str, str], float]) -> Claim:
        rows = [
            throughput.Speed(recipe=recipe, setting=setting, tokens_per_second=speed, how="eager")
            for (recipe, setting), speed in speeds.items()
        ]
        throughput.speed_file(tmp_path).write_text(json.dumps({"rows": [asdict(row) for row in rows]}))
        return claim(tmp_path, "One GrMoE model dominates")

    speeds = {
        ("token-mass", "top-2"): 100.0, ("token-mass", "top-1"): 200.0, ("softmax-bias", "top-2"): 110.0,
        ("softmax-one", "top-1"): 190.0,
    }  # fmt: skip
    found = dominates(speeds)
    assert found.verdict is OPEN  # the model trained dense may do it without random budgets
    assert "top-2: -0.0300" in found.ours
    assert "top-1: -0.0701" in found.ours
    assert "top-1: not as fast" in dominates(speeds | {("token-mass", "top-1"): 150.0}).ours
    for seed in range(3):
        put_one(tmp_path, "grmoe-dense", a_frontier(seed, top_2=3.3 + 1.01 * seed / 100))
    speeds[("grmoe-dense", "top-2")] = 195.0  # as fast as both, and worse
    assert dominates(speeds).verdict is CHANGED
    assert dominates(speeds | {("token-mass", "top-1"): 150.0}).verdict is FAILS
