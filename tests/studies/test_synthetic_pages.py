"""Verdicts follow from results alone: the same rows with other numbers give other verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grmoe.studies import alpha_sweep, synthetic_map
from grmoe.studies.page import Page, Verdict
from grmoe.studies.study import Place, State, Study
from grmoe.studies.synthetic import STUDY, heatmap, oracle, results
from grmoe.studies.synthetic.claims import claims
from grmoe.studies.synthetic.evaluation import DialSweep, SeedScore
from grmoe.studies.synthetic.methods import METHODS, Method, find_methods
from grmoe.studies.synthetic.questions import Found
from grmoe.studies.synthetic.results import Config, MethodResult, Saved, Screening, SettingResult, spec_of
from grmoe.studies.synthetic.study import DIALED, SETTINGS
from grmoe.studies.synthetic.task import Setting
from grmoe.terminal import silent

STORED = Path(__file__).parents[2] / "results"
GATES = find_methods(DIALED)
STUDIES: tuple[Study, ...] = (STUDY, synthetic_map.STUDY, alpha_sweep.STUDY)


def seed_score(accuracy: float, *, load: float = 0.1, lead: float = 0.1, experts: float = 8.0) -> SeedScore:
    return SeedScore(
        accuracy=accuracy, share=accuracy, load_cv=0.0, min_load=load, collapsed=load < 0.0125, leading_cv=0.05,
        collapsed_paper=load < 0.01, leading_min_load=lead, leading_collapsed=lead < 0.0125, entropy=1.5,
        experts_per_token=experts, loss=0.5,
    )  # fmt: skip


def falling(outside: int | None = 0) -> DialSweep:
    return DialSweep(
        alphas=[0.5, 1.0, 2.0], entropy_AS=[[2.0] * 3, [1.0] * 3, [0.5] * 3], lower=[1.5, 0.5, 0.1],
        upper=[2.05, 1.5, 1.0], paper_lower=[1.0, 0.0, -1.0], paper_upper=[2.06, 1.6, 1.1], outside=outside,
        paper_outside=outside, tokens=9,
    )  # fmt: skip


def method_result(method: Method, setting: Setting, scores: list[SeedScore]) -> MethodResult:
    return MethodResult(
        method=method.key, title=method.title, setting=setting, num_experts=8, scores=scores, oracle_accuracy=0.9,
        overlap=(0.1, 0.08, 0.12), dial=falling(), recovery=[[1.0]],
        screening=Screening(rates=[1.0], loss=[[0.5]], accuracy=[[0.5]]),
    )  # fmt: skip


Changes = dict[str, list[SeedScore]]


def as_in_the_paper(method: Method, changes: Changes) -> dict[str, MethodResult]:
    """GrMoE 95 %, the others 80 %, no collapse, on every setting. `changes`: other scores of a method."""
    ours = method.key.startswith("grmoe")
    scores = [seed_score(0.95 if ours else 0.8, experts=8.0 if ours or method.key == "vmf" else 1.0)] * 3
    return {s.name: method_result(method, s, changes.get(method.key, scores)) for s in SETTINGS.values()}


def judged(changes: Changes | None = None) -> Page:
    """The claims of the table, without files."""
    rows = [as_in_the_paper(method, changes or {}) for method in METHODS]
    settings = {
        s.name: SettingResult(setting=s, methods=[row[s.name] for row in rows]) for s in SETTINGS.values()
    }
    return Page(claims(Found(settings), []))


def store(
    folder: Path, dials: dict[str, DialSweep] | None = None, methods: tuple[Method, ...] = METHODS
) -> Path:
    for method in methods:
        found = as_in_the_paper(method, {})
        if method.key in (dials or {}):
            found = {name: replace(r, dial=(dials or {})[method.key]) for name, r in found.items()}
        fingerprint = Config().fingerprint
        saved = Saved(
            method=method.key, fingerprint=fingerprint, spec=spec_of(method), machine="CPU", results=found
        )
        results.write(saved, folder / "synthetic")
    return folder


def verdict(page: Page, words: str) -> Verdict:
    (claim,) = [claim for claim in page.claims if words in claim.text]
    assert claim.reason
    assert (claim.ours == "") == (claim.verdict is Verdict.OPEN)
    return claim.verdict


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_without_results_every_claim_is_open(study: Study, tmp_path: Path) -> None:
    page = study.page(tmp_path)
    assert page.claims
    assert {claim.verdict for claim in page.claims} == {Verdict.OPEN}
    assert (page.tables, page.figures) == ([], [])
    state = study.state(tmp_path)
    assert state.done == 0 < state.total


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_pages_of_stored_results_are_always_the_same(study: Study) -> None:
    first, second = study.page(STORED), study.page(STORED)
    assert first.claims == second.claims
    assert [t.markdown() for t in first.tables] == [t.markdown() for t in second.tables]
    assert first.notes == second.notes
    state = study.state(STORED)
    if state.done == state.total:
        assert Verdict.OPEN not in {claim.verdict for claim in first.claims}


def test_stored_results_refute_what_they_must() -> None:
    page = STUDY.page(STORED)
    assert verdict(page, "GrMoE assigns 91.7 %") is Verdict.HOLDS
    assert verdict(page, "The baselines reach") is Verdict.FAILS
    assert verdict(page, "Hard setting: GrMoE 78.3 %") is Verdict.FAILS
    (hard,) = [claim for claim in page.claims if "78.3" in claim.text]
    assert "rank 27" in hard.reason
    assert verdict(alpha_sweep.STUDY.page(STORED), "smooth, monotonic") is Verdict.HOLDS


def test_a_page_shows_all_settings_and_rates(tmp_path: Path) -> None:
    page = STUDY.page(store(tmp_path))
    assert STUDY.state(tmp_path) == State(len(METHODS), len(METHODS) + 1)  # the oracle by rank is missing
    assert [t.title.split(":")[0] for t in page.tables] == [*SETTINGS, *SETTINGS]
    assert [f.name for f in page.figures] == [f"synthetic-{name}" for name in SETTINGS]
    assert page.claims == judged().claims


def test_verdicts_follow_the_scores() -> None:
    page = judged()
    assert verdict(page, "GrMoE outperforms all") is Verdict.HOLDS
    assert verdict(page, "GrMoE collapses in 0 %") is Verdict.HOLDS
    assert verdict(page, "L_subspace") is Verdict.UNTESTABLE
    assert (
        verdict(page, "Baselines collapse") is Verdict.HOLDS
    )  # 0 of 3 seeds: Wilson's interval reaches 56 %
    assert verdict(page, "advantage grows") is Verdict.FAILS
    assert verdict(page, "dispense with load balancing") is Verdict.HOLDS
    assert verdict(page, "entropy of 1.52") is Verdict.HOLDS

    dead = [seed_score(0.95), seed_score(0.95), seed_score(0.95, lead=0.0)]
    paper = judged({"grmoe_paper": dead, "grmoe_paper_prior": dead})
    assert verdict(paper, "GrMoE collapses in 0 %") is Verdict.CHANGED
    assert verdict(paper, "L_subspace") is Verdict.CHANGED
    assert verdict(paper, "dispense with load balancing") is Verdict.FAILS
    keys = ("grmoe", "grmoe_paper", "grmoe_paper_prior", "grmoe_paper_low_hinge")
    both = judged(dict.fromkeys(keys, dead))
    assert verdict(both, "GrMoE collapses in 0 %") is Verdict.FAILS
    assert verdict(both, "L_subspace") is Verdict.FAILS
    alone = judged({"grmoe_paper_prior": dead})
    assert verdict(alone, "L_subspace") is Verdict.HOLDS

    close = judged({"switch": [seed_score(0.92, experts=1.0)] * 3})
    assert verdict(close, "GrMoE outperforms all") is Verdict.FAILS
    noisy = [seed_score(a, experts=1.0) for a in (0.7, 0.8, 0.9)]  # GrMoE is 15 ± 25 points above
    unsure = judged({m.key: noisy for m in METHODS if not m.key.startswith("grmoe")})
    assert verdict(unsure, "GrMoE outperforms all") is Verdict.FAILS
    starving = judged({"softmax_top1": [seed_score(0.8, load=0.0, experts=1.0)] * 3})
    assert verdict(starving, "Baselines collapse") is Verdict.FAILS  # 3 of 3 is not 36 %


def test_alpha_verdicts_follow_the_sweeps(tmp_path: Path) -> None:
    study = alpha_sweep.STUDY
    page = study.page(store(tmp_path / "a", methods=GATES))
    assert verdict(page, "smooth, monotonic") is Verdict.HOLDS
    assert verdict(page, "erratic") is Verdict.FAILS
    assert verdict(page, "within the bounds") is Verdict.HOLDS
    assert verdict(page, "predictable") is Verdict.FAILS  # of softmax as well
    rising = replace(falling(outside=2), entropy_AS=[[2.0] * 3, [1.0, 1.0, 2.1], [0.5] * 3])
    page = study.page(store(tmp_path / "b", dials={"softmax_top1": rising}, methods=GATES))
    assert verdict(page, "erratic") is Verdict.HOLDS
    assert verdict(page, "predictable") is Verdict.HOLDS
    page = study.page(store(tmp_path / "c", dials={"grmoe": rising}, methods=GATES))
    assert verdict(page, "smooth, monotonic") is Verdict.FAILS
    assert verdict(page, "within the bounds") is Verdict.FAILS
    old = study.page(
        store(tmp_path / "d", dials={"grmoe": falling(outside=None)}, methods=GATES)
    )  # of an earlier version
    assert verdict(old, "within the bounds") is Verdict.OPEN
    assert verdict(old, "predictable") is Verdict.OPEN
    assert [figure.name for figure in page.figures] == ["alpha-sweep"]
    one = method_result(METHODS[0], SETTINGS["easy"], [seed_score(0.5)] * 3)
    alpha_sweep.draw_sweep([one], tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 10_000


def test_map_verdicts_follow_the_cells(tmp_path: Path) -> None:
    def cells(advantage: dict[str, float], folder: Path, noise: float = 0.0) -> Page:
        by_key = {m.key: m for m in METHODS}
        for key in heatmap.METHODS:
            found = {}
            for i, s in enumerate(heatmap.grid()):
                gain = advantage[s.name] if key == "grmoe" else 0.0
                tilt = noise * (i - 12) / 12 if key == "grmoe" else 0.0  # the second seed favours hard cells
                scores = [seed_score(0.2 + gain), seed_score(0.2 + gain + tilt)]
                found[s.name] = replace(method_result(by_key[key], s, scores), oracle_accuracy=1 - i / 50)
            saved = Saved(method=key, fingerprint={}, spec={}, machine="CPU", results=found)
            results.write(saved, folder / "synthetic-map")
        return synthetic_map.STUDY.page(folder)

    names = [s.name for s in heatmap.grid()]  # the oracle falls from the first to the last
    grows = cells({name: 0.1 + i / 50 for i, name in enumerate(names)}, tmp_path / "grows")
    assert verdict(grows, "most valuable") is Verdict.HOLDS
    assert verdict(grows, "every overlap and noise") is Verdict.HOLDS
    assert len(grows.tables) == 4
    level = cells(
        {name: 0.3 + (i in (20, 24)) / 500 for i, name in enumerate(names)}, tmp_path / "level", 0.05
    )
    assert verdict(level, "most valuable") is Verdict.FAILS  # within noise; before, the means alone decided
    falls = cells({name: 0.48 - i / 50 for i, name in enumerate(names)}, tmp_path / "falls")
    assert verdict(falls, "most valuable") is Verdict.FAILS
    assert verdict(falls, "every overlap and noise") is Verdict.FAILS  # no advantage in the last cell


def test_a_study_runs_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("grmoe.studies.synthetic.study.run", lambda plan, progress: asked.append(plan))
    monkeypatch.setattr(oracle, "measure", lambda: [oracle.OracleRow(4, 0.9, None)])
    place = Place(results=tmp_path, work=tmp_path / "work", device="cpu", at_once=3, until=5.0)
    for study in STUDIES:
        study.run(place, silent)
    assert [plan.out.name for plan in asked] == ["synthetic", "synthetic-map", "synthetic"]
    assert [len(plan.methods) for plan in asked] == [len(METHODS), 3, 3]
    assert {(plan.at_once, plan.until, plan.config.device) for plan in asked} == {(3, 5.0, "cpu")}
    STUDY.run(replace(place, only=("hash", "grmoe")), silent)  # before, --only was not heard
    assert [method.key for method in asked[-1].methods] == ["hash", "grmoe"]
    assert oracle.read(tmp_path / "synthetic") == [oracle.OracleRow(4, 0.9, None)]
    assert STUDY.state(tmp_path).done == 1
