"""Studies of trained models: a tiny run is measured once, and every page is made of what was found."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grmoe.routing import GrassmannRouter
from grmoe.runs.config import TrainConfig
from grmoe.studies import (
    depth,
    downstream,
    kappa_start,
    learned_normalizer,
    metrics,
    model_analysis,
    separation,
    token_analysis,
)
from grmoe.studies.kappa_start import Kappas, count_within
from grmoe.studies.measured import Measured
from grmoe.studies.metrics import metric_claims
from grmoe.studies.models.recipes import Base, Recipe
from grmoe.studies.models.summary import Mean
from grmoe.studies.page import Page, Verdict
from grmoe.studies.pages import page_text
from grmoe.studies.registry import find_study
from grmoe.studies.study import Place
from grmoe.studies.token_analysis.claims import claims, reaches
from grmoe.studies.token_analysis.reading import specialists
from grmoe.terminal import silent
from grmoe.train.loop import train

ANALYSED = (separation, token_analysis, depth, learned_normalizer)
BASE, MINE = Base("tiny", ()), Recipe("mine", "Mine", ())
# κ of the literal gate by seed and layer: near its start, and away from it without the paper's spread.
KEPT: Kappas = [[[1.4, 1.6], [1.3, 1.8]]] * 3
MOVED: Kappas = [[[0.2, 0.5], [0.3, 0.7]]] * 3


@pytest.fixture(scope="module")
def body(make_settings: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of a few steps, measured as the studies measure it."""
    folder = tmp_path_factory.mktemp("measured")
    settings = make_settings(folder)
    config: TrainConfig = settings(
        steps=4,
        model={**dict(settings().model), "num_hidden_layers": 4, "router_options": {"amortizer": "affinity"}},
    )
    train(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_analysis, "TOKENS", 1500)
        patch.setattr(model_analysis.normalizers, "__defaults__", (1000,))
        place = Place(results=folder / "results", work=folder, tokens=512)
        found: dict[str, Any] = json.loads(
            json.dumps(dict(model_analysis.measure_run(Path(config.out), place, silent)))
        )
    return found


def measured(body: dict[str, Any], recipe: str = "grmoe-amortised", seeds: int = 3) -> dict[str, Any]:
    runs = [Measured(recipe=recipe, seed=s, revision="r", machine="m", body=body) for s in range(seeds)]
    return {"grmoe": runs, "grmoe-amortised": runs}


def verdicts(page: Page) -> list[Verdict]:
    return [claim.verdict for claim in page.claims]


def test_a_run_is_measured(body: dict[str, Any]) -> None:
    assert [layer["layer"] for layer in body["layers"]] == [1, 3]
    assert len(body["normalizer"]) == 4  # the smallest and the largest κ of each layer
    for layer in body["layers"]:
        rows = [row for row in body["normalizer"] if row["layer"] == layer["layer"]]
        assert [row["learned"] for row in rows] == pytest.approx([min(layer["kappa"]), max(layer["kappa"])])
        assert layer["separation"]["gaps"][0]["left_out"] == 0
    names = [row["name"] for row in body["settings"]]
    assert names[-2:] == ["early .8, late 1.5", "early 1.5, late .8"]
    experts = [row["experts_per_token"] for row in body["settings"][:7]]
    assert experts == sorted(experts, reverse=True)  # a larger α, fewer experts
    assert "text" not in body  # paths of a machine are not kept


@pytest.mark.parametrize("module", [*ANALYSED, downstream])
def test_a_page_without_results_is_open(module: Any, tmp_path: Path) -> None:
    study = find_study(module.STUDY.name)
    assert study is module.STUDY
    page = study.page(tmp_path)
    measurable = [claim for claim in page.claims if claim not in metric_claims()]
    assert measurable
    assert {claim.verdict for claim in measurable} <= {Verdict.OPEN, Verdict.UNTESTABLE}
    assert study.state(tmp_path).done == 0
    assert page_text(study, page, tmp_path) == page_text(study, study.page(tmp_path), tmp_path)


def with_types(body: dict[str, Any], r: float = -0.5) -> dict[str, Any]:
    """As if the text had tokens of all types. The small corpus has two."""
    correlation = {"r": r, "lower": r - 0.1, "upper": r + 0.1, "n": 8}
    found = planted(
        body, type_entropy=[[1.0] * 7, [1.1] * 7], of_type=[[[0.25] * 7] * 4] * 2,
        amortized=[amortized(0.9, 1.1, 1.0)] * 2,
    )  # fmt: skip
    return found | {
        "type_tokens": [100] * 7, "kappa_correlation": correlation, "kappa_correlation_within": correlation,
    }  # fmt: skip


@pytest.mark.parametrize("module", ANALYSED)
def test_pages_of_a_measured_run(module: Any, body: dict[str, Any], tmp_path: Path) -> None:
    body = with_types(body)
    literal = (KEPT,) if module in (token_analysis, depth) else ()
    page = module.write(measured(body), *literal)
    assert Verdict.OPEN not in verdicts(page)
    assert all(claim.ours for claim in page.claims if claim.verdict is not Verdict.UNTESTABLE)
    assert all(table.rows for table in page.tables)
    assert "nan" not in page_text(module.STUDY, page, tmp_path)
    for figure in page.figures:
        figure.draw(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 1000
    one = [claim for claim in module.write(measured(body, seeds=1)).claims if claim not in metric_claims()]
    assert {claim.verdict for claim in one} <= {Verdict.OPEN, Verdict.UNTESTABLE}  # one seed decides nothing


def planted(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Layers with the given fields, one value per layer."""
    found = copy.deepcopy(body)
    for name, values in changes.items():
        for layer, value in zip(found["layers"], values, strict=True):
            layer[name] = value
    return found


def amortized(low: float, high: float, ambiguous: float) -> dict[str, Any]:
    """90 % of the concentrations are from low to high. h of the leading expert is 1.2, but for the first two types."""
    return {
        "concentration": 1.0, "concentration_low": low, "concentration_high": high, "ratio": 1.0, "ratio_low": 0.5,
        "ratio_high": 1.5, "type_ratio": [1.0] * 7,
        "type_h": [ambiguous] * 2 + [1.2] * 5,
    }  # fmt: skip


def seeds_of(body: dict[str, Any]) -> list[Measured]:
    return [Measured(recipe="x", seed=s, revision="r", machine="m", body=body) for s in range(3)]


def as_paper(body: dict[str, Any]) -> dict[str, Any]:
    """Measurements as the paper has them: in the last layer a specialist of code, one of names and a generalist."""
    code, names, broad, other = ([0.0] * 7 for _ in range(4))
    code[2], code[3], names[4] = 0.8, 0.7, 0.75
    broad[0] = broad[1] = 0.9
    other[5] = 1.0
    shares = [code, names, broad, other]
    return planted(
        with_types(body, -0.9), kappa=[[1.0, 1.2, 1.1, 1.1], [4.2, 3.5, 0.4, 1.0]], entropy=[1.65, 1.15],
        of_type=[[[0.25] * 7] * 4, shares], type_entropy=[[1.9, 1.9, 0.6, 0.6, 0.6, 0.6, 0.6]] * 2,
        amortized=[amortized(0.97, 1.03, 0.9)] * 2,
    )  # fmt: skip


def test_verdicts_follow_the_numbers(body: dict[str, Any]) -> None:
    """Measurements as the paper has them, and the opposite."""
    paper = as_paper(body)
    runs = seeds_of(paper)
    assert set(verdicts(Page(claims(runs, MOVED)))) == {Verdict.CHANGED}  # the gate is ours
    assert verdicts(Page(depth._claims(runs, MOVED)))[:4] == [Verdict.CHANGED] * 4
    found = specialists(paper)
    assert (found.code, found.math, found.nouns) == (0.8, 0.7, 0.75)
    tokens = paper["type_tokens"]
    assert found.all == pytest.approx((0.8 * tokens[2] + 0.7 * tokens[3]) / sum(tokens))
    assert (found.kappas, found.others) == ((4.2, 3.5), (0.4, 1.0))
    flat = planted(
        with_types(body, 0.3), kappa=[[2.0, 2.1, 2.1, 2.1], [0.5, 1.0, 1.0, 1.1]], entropy=[1.0, 1.3],
        of_type=[[[0.25] * 7] * 4, [[0.2] * 2 + [0.26] * 5] * 4],
        type_entropy=[[0.3, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4]] * 2, amortized=[amortized(0.97, 1.3, 1.3)] * 2,
    )  # fmt: skip
    runs = seeds_of(flat)
    assert set(verdicts(Page(claims(runs, MOVED)))) == {Verdict.FAILS}
    found_by_layer = verdicts(Page(depth._claims(runs, MOVED)))[:4]
    assert [verdict for i, verdict in enumerate(found_by_layer) if i != 1] == [Verdict.FAILS] * 3


def claim(page: Page, start: str) -> Verdict:
    (found,) = (c.verdict for c in page.claims if c.text.startswith(start))
    return found


def test_specialists_are_told_by_their_kappa(body: dict[str, Any]) -> None:
    both, most, least = "These two", "The expert with the largest", "The expert with the smallest"
    for kappa, expected in (
        ([4.2, 3.5, 0.4, 1.0], (Verdict.CHANGED, Verdict.CHANGED, Verdict.CHANGED)),
        ([3.5, 4.2, 0.4, 1.0], (Verdict.CHANGED, Verdict.FAILS, Verdict.CHANGED)),
        ([4.2, 1.0, 0.4, 3.5], (Verdict.FAILS, Verdict.CHANGED, Verdict.CHANGED)),
        ([4.2, 3.5, 1.0, 0.4], (Verdict.CHANGED, Verdict.CHANGED, Verdict.FAILS)),
    ):
        found = planted(as_paper(body), kappa=[[1.0] * 4, kappa])
        page = Page(claims(seeds_of(found)))
        assert tuple(claim(page, start) for start in (both, most, least)) == expected


@pytest.mark.parametrize(
    ("value", "half", "verdict"),
    [
        (0.80, 0.1, Verdict.HOLDS),
        (0.71, 0.1, Verdict.HOLDS),
        (0.69, 0.1, Verdict.UNDECIDED),  # less than nine tenths, but they are inside
        (0.75, 0.4, Verdict.UNDECIDED),  # half of it is inside, too
        (0.45, 0.35, Verdict.UNDECIDED),
        (0.60, 0.05, Verdict.FAILS),
    ],
)
def test_a_number_is_found_near_its_mean(value: float, half: float, verdict: Verdict) -> None:
    assert reaches(Mean(value, half, 3), 0.78) is verdict
    assert reaches(Mean(value, half, 2), 0.78) is reaches(None, 0.78) is Verdict.OPEN


def test_average_concentration_is_not_the_logit(body: dict[str, Any]) -> None:
    """Of the same model: concentrations within 0.05 of 1, logits far from it."""
    start = "Σ_e h_e = N"
    kept = planted(as_paper(body), amortized=[amortized(0.96, 1.04, 0.9)] * 2)
    assert claim(Page(claims(seeds_of(kept))), start) is Verdict.CHANGED
    lost = planted(kept, amortized=[amortized(0.96, 1.04, 0.9), amortized(0.94, 1.0, 0.9)])
    assert claim(Page(claims(seeds_of(lost))), start) is Verdict.FAILS


def test_entropy_counts_as_a_share_of_its_largest(body: dict[str, Any]) -> None:
    """65 % of log 4 are 0.9 nats."""
    assert body["experts"] == 4
    for entropy, expected in ((0.91, Verdict.CHANGED), (0.89, Verdict.FAILS)):
        found = planted(as_paper(body), type_entropy=[[entropy] * 2 + [0.6] * 5] * 2)
        assert claim(Page(claims(seeds_of(found))), "Function words") is expected


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        ((0.8, 1.5), (0.4, 4.2), Verdict.CHANGED),
        ((0.41, 2.9), (0.21, 8.3), Verdict.CHANGED),
        ((0.8, 1.5), (0.001, 50.0), Verdict.FAILS),
        ((0.8, 3.1), (0.4, 4.2), Verdict.FAILS),
    ],
)
def test_a_range_is_found_within_a_factor_of_two(
    body: dict[str, Any], first: tuple[float, float], last: tuple[float, float], expected: Verdict
) -> None:
    found = planted(with_types(body), kappa=[[*first, *first], [*last, *last]])
    assert claim(Page(depth._claims(seeds_of(found), MOVED)), "κ ranges") is expected
    # The literal gate decides first.
    literal = [[first, last]] * 3
    wide = planted(with_types(body), kappa=[[0.01, 90.0] * 2] * 2)
    assert claim(Page(depth._claims(seeds_of(wide), literal)), "κ ranges") is expected


def test_a_start_that_kappa_never_left_refutes_nothing(body: dict[str, Any], tmp_path: Path) -> None:
    """Before, "does not hold": of ours, which starts at 4 where the literal gate starts at 1.5."""
    claims_of = {"Two experts have": claims, "κ ranges": depth._claims}
    ours = {
        name: planted(with_types(body), kappa=[[kappa] * 4] * 2)
        for name, kappa in (("high", 4.0), ("low", 0.1))
    }
    for start, judged in claims_of.items():
        for found in ours.values():
            runs = seeds_of(found)
            assert claim(Page(judged(runs, KEPT)), start) is Verdict.UNTESTABLE
            assert claim(Page(judged(runs, MOVED)), start) is Verdict.FAILS
            assert claim(Page(judged(runs, KEPT[:2])), start) is Verdict.OPEN
            assert claim(Page(judged(runs[:2], KEPT)), start) is Verdict.OPEN
        assert claim(Page(judged(seeds_of(as_paper(body)), KEPT)), start) is Verdict.CHANGED
    # The stored models are read, and κ starts where it is said to start.
    results = Path(__file__).parents[2] / "results"
    literal = kappa_start.literal_kappas(results)
    assert len(literal) >= 3
    (shown,) = (c.ours for c in find_study("depth").page(results).claims if c.text.startswith("κ ranges"))
    assert f"literal gate: last {min(layers[-1][0] for layers in literal):.2f}" in shown
    scaling = next(s for s in kappa_start.LITERAL.settings if "scaling" in s).partition("=")[2]
    assert GrassmannRouter(8, 2, 2, scaling=scaling).kappa.tolist()[0] == pytest.approx(kappa_start.START)


def test_experts_are_counted_from_the_ends_of_layers() -> None:
    """Of four experts with κ 1, 2, 3, 4 and no more known than 1 and 4."""
    layers = [[1.0, 4.0]]
    assert count_within(layers, 0.0, 5.0, 4) == (4, 4)
    assert count_within(layers, 5.0, 6.0, 4) == count_within(layers, 0.0, 0.5, 4) == (0, 0)
    assert count_within(layers, 3.0, math.inf, 4) == (1, 3)
    assert count_within(layers, 2.0, 3.0, 4) == (0, 2)
    assert count_within([*layers, [3.5, 4.0]], 3.0, math.inf, 4) == (5, 7)
    two = token_analysis.claims.has_two_sharp
    assert two([(2, 2)] * 3, [(0.5, 0.5)] * 3) is Verdict.HOLDS
    assert two([(1, 7)] * 3, [(0.5, 0.5)] * 3) is Verdict.UNDECIDED
    assert two([(2, 2)] * 3, [(0.5, 0.5), (0.4, 0.6), (0.5, 0.5)]) is Verdict.UNDECIDED
    assert two([(2, 2), (1, 1), (2, 2)], [(0.4, 0.6)] * 3) is Verdict.FAILS
    assert two([(2, 2)] * 2, [(0.5, 0.5)] * 2) is Verdict.OPEN


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([[1.0, 1.1, 1.0], [1.5, 1.4, 1.5], [2.0, 2.1, 2.0]], Verdict.HOLDS),
        ([[1.0, 1.1, 1.0], [2.2, 1.9, 2.1], [2.0, 2.1, 2.0]], Verdict.UNDECIDED),  # it may fall at the end
        ([[1.0, 1.1, 1.0], [3.0, 3.1, 3.0], [2.0, 2.2, 2.0]], Verdict.FAILS),
        ([[1.0, 2.1, 1.0], [1.5, 1.4, 1.5], [2.0, 2.0, 2.0]], Verdict.UNDECIDED),
        ([[2.0, 2.1, 2.0], [1.5, 1.4, 1.5], [1.0, 1.2, 1.0]], Verdict.FAILS),
    ],
)
def test_rising_with_depth(layers: list[list[float]], expected: Verdict) -> None:
    assert depth._rises(layers)[0] is expected
    assert depth._rises([[-value for value in layer] for layer in layers], -1)[0] is expected


def test_the_theorem_is_judged_by_its_hypothesis(body: dict[str, Any]) -> None:
    def with_gap(holds: bool, paper: float | None, load_cv: float, mixture: float = 0.0) -> dict[str, Any]:
        found = copy.deepcopy(body)
        for layer in found["layers"]:
            layer["separation"] |= {
                "holds": holds, "paper": paper, "load_cv": load_cv, "mixture_cv": mixture,
            }  # fmt: skip
        return measured(found)

    assert verdicts(separation.write(with_gap(True, 0.2, 0.1)))[:2] == [Verdict.CHANGED] * 2  # our prior
    assert verdicts(separation.write(with_gap(True, 0.2, 0.3)))[1] is Verdict.FAILS
    uneven = separation.write(with_gap(True, 0.2, 0.3, mixture=0.4)).claims[1]
    assert uneven.verdict is Verdict.UNTESTABLE  # the theorem assumes a balanced mixture
    assert "CV 0.40" in uneven.reason
    nothing = verdicts(separation.write(with_gap(False, None, 0.1)))
    assert nothing[:3] == [Verdict.FAILS, Verdict.UNTESTABLE, Verdict.CHANGED]
    two = {name: runs[:2] for name, runs in with_gap(False, None, 0.1).items()}  # four models, two seeds
    assert verdicts(separation.write(two))[:3] == [Verdict.OPEN] * 3


@pytest.mark.parametrize(
    ("broken", "verdict"),
    [(0, Verdict.CHANGED), (1, Verdict.FAILS), (None, Verdict.OPEN)],  # the logits have our prior
)
def test_the_corollary_is_judged_by_single_tokens(
    broken: int | None, verdict: Verdict, body: dict[str, Any]
) -> None:
    found = copy.deepcopy(body)
    if broken is None:
        del found["layers"][0]["top_mass"][0]["broken"]  # results of before do not have it
    else:
        found["layers"][0]["top_mass"][0]["broken"] = broken
    (claim,) = [c for c in separation.write(measured(found)).claims if c.text.startswith("G_k")]
    assert claim.verdict is verdict


def test_metrics_agree_on_tokens_and_not_on_subspaces() -> None:
    assert [claim.verdict for claim in metric_claims()] == [Verdict.HOLDS, Verdict.FAILS]
    assert metrics.distances([30.0, 90.0]) == pytest.approx((1.25**0.5, (1 / 36 + 1 / 4) ** 0.5 * math.pi))


def test_concentrations_and_arguments_of_z_are_judged_apart(body: dict[str, Any]) -> None:
    def with_kappa(kappa: float, scale: float) -> list[Verdict]:
        found = copy.deepcopy(body)
        for row in found["normalizer"]:
            row |= {"learned": kappa, "kappa": scale * kappa, "kume_wood_1": 0.01, "gradient_1": 0.004}
        return verdicts(learned_normalizer.write(measured(found)))

    saddle, gradient, learned, _, argument = with_kappa(4.0, 8.0)
    assert (saddle, gradient) == (Verdict.CHANGED, Verdict.FAILS)
    assert (learned, argument) == (Verdict.CHANGED, Verdict.FAILS)  # κ = 4, c·κ = 32
    assert with_kappa(11.0, 0.5)[2::2] == [Verdict.FAILS, Verdict.HOLDS]


def test_equal_alpha_is_compared_at_as_many_experts() -> None:
    rows = [
        {"name": f"α {a}", "experts_per_token": e, "loss": x} for a, e, x in ((1, 2.0, 3.0), (2, 1.0, 4.0))
    ]
    body = {"settings": [*rows, {"name": "early .8, late 1.5", "experts_per_token": 1.25, "loss": 3.5}]}
    assert depth.cost(body, "early .8, late 1.5") == pytest.approx(3.5 - 3.75)
    body["settings"][-1]["experts_per_token"] = 2.5  # outside: nothing to compare with
    assert depth.cost(body, "early .8, late 1.5") is None


# -- downstream ---------------------------------------------------------------------------------------------------


def scores(seed: int, *accuracies: float) -> dict[str, Any]:
    """Without and with examples."""
    found = {}
    for shots, accuracy in zip(downstream.SHOTS, accuracies, strict=True):
        numbers = {
            f"{metric},none": accuracy + 0.001 * seed for metric in ("acc", "acc_norm")
        } | dict.fromkeys(("acc_stderr,none", "acc_norm_stderr,none"), 0.01)  # fmt: skip
        found[str(shots)] = dict.fromkeys(downstream.METRICS, numbers)
    return found


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ((0.4, 0.4), Verdict.CHANGED),  # the prior is ours
        ((0.45, 0.4), Verdict.CHANGED),  # the paper has examples in the prompt
        ((0.4, 0.42), Verdict.UNDECIDED),
        ((0.4, 0.45), Verdict.FAILS),
    ],
)
def test_accuracy_is_compared_by_seed(other: tuple[float, float], verdict: Verdict, tmp_path: Path) -> None:
    accuracies = dict.fromkeys(downstream.STUDY.parts, other) | {"grmoe-amortised": (0.42, 0.42)}
    models = {
        name: [
            Measured(recipe=name, seed=s, revision="r", machine="m", body=scores(s, *values))
            for s in range(3)
        ]
        for name, values in accuracies.items()
    }
    page = downstream.write(models)
    assert verdicts(page) == [verdict, verdict, Verdict.UNTESTABLE, Verdict.UNTESTABLE]
    row = next(row for row in page.tables[0].rows if row[0] == "GrMoE + amortiser")
    assert row[2] == "42.1 ± 0.2 (1.0)"
    assert "paper, 350M: GrMoE |" in page_text(downstream.STUDY, page, tmp_path)


def test_downstream_measures_every_task_and_number_of_examples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans: list[Any] = []

    def evaluate(plan: Any, progress: Any) -> Any:
        from types import SimpleNamespace

        plans.append(plan)
        return SimpleNamespace(
            evaluation=SimpleNamespace(points=[SimpleNamespace(tasks={"piqa": plan.shots})])
        )

    monkeypatch.setattr(downstream, "evaluate", evaluate)
    place = Place(results=Path("r"), work=Path("w"), tasks=Path("evals"))
    assert downstream.measure_run(Path("run"), place, silent) == {"0": {"piqa": 0}, "5": {"piqa": 5}}
    (tmp_path / "piqa_val.jsonl").touch()
    assert "no rows of arc_easy, hellaswag, lambada_openai" in downstream._lacks(
        replace(place, tasks=tmp_path)
    )
    assert "--tasks-from" in downstream._lacks(replace(place, tasks=None))
    assert all(plan.tasks == tuple(downstream.METRICS) and plan.scorer == "grmoe" for plan in plans)
