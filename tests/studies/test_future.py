"""The study of what the paper leaves open: verdicts by rule, and models that are pruned once they are trained."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_models_store import a_run

import grmoe.prune
from grmoe.model import GrmoeConfig
from grmoe.prune.certificate import Certified
from grmoe.studies import future, pruning
from grmoe.studies.models import Store, Trained, run_folder
from grmoe.studies.page import OWN, Verdict
from grmoe.studies.study import Place
from grmoe.terminal import silent


def put(results: Path, losses: dict[str, list[float]]) -> None:
    for name, each in losses.items():
        runs = [a_run(seed, loss) for seed, loss in enumerate(each)]
        data = {"tokens": 1, "vocabulary": 8}
        about = Trained(recipe=name, label=name, settings=(), config={}, data=data, runs=runs)
        Store(results).add(future.BASE, about)


def verdicts(results: Path) -> dict[str, Verdict]:
    return {claim.text: claim.verdict for claim in future.STUDY.page(results).claims}


def test_an_idea_holds_if_one_variant_does_and_fails_if_none_of_all_does(tmp_path: Path) -> None:
    entropy = [recipe.name for recipe in future.PARTS["entropy"].recipes]
    text = "Entropy-aware objectives could improve the subspaces that are learned"
    put(tmp_path, {"grmoe": [3.0, 3.1, 3.2], entropy[0]: [3.1, 3.2, 3.31]})
    assert verdicts(tmp_path)[text] is Verdict.OPEN  # the others may still do it
    put(tmp_path, {name: [3.1, 3.2, 3.31] for name in entropy})
    assert verdicts(tmp_path)[text] is Verdict.FAILS
    put(tmp_path, {entropy[1]: [2.9, 3.3, 3.2]})
    assert verdicts(tmp_path)[text] is Verdict.UNDECIDED
    put(tmp_path, {entropy[-1]: [2.9, 3.0, 3.11]})
    assert verdicts(tmp_path)[text] is Verdict.CHANGED  # the plain recipe is ours


def test_a_lower_loss_of_a_model_that_sees_later_tokens_decides_nothing(tmp_path: Path) -> None:
    """Before, it decided, though the same loss is no language model's elsewhere."""
    text = "Soft MoE with Grassmannian affinities could have the benefits of both"
    assert verdicts(tmp_path)[text] is Verdict.UNTESTABLE
    put(tmp_path, {"soft-moe": [0.5, 0.6, 0.7], "grassmann-soft-moe": [0.3, 0.4, 0.51]})
    assert verdicts(tmp_path)[text] is Verdict.UNTESTABLE
    (found,) = (claim for claim in future.STUDY.page(tmp_path).claims if claim.text == text)
    assert found.ours.startswith("subspaces of rank 1: -0.1967 ± 0.0143")


def test_depths_and_heads_have_their_own_counterparts(tmp_path: Path) -> None:
    depth, heads = (
        "The gate could be applied to mixture of depths",
        "The gate could be applied to attention head selection",
    )
    put(tmp_path, {"grmoe": [3.0, 3.1, 3.2], "grmoe-one": [3.3, 3.4, 3.5], "identity-8": [3.2, 3.3, 3.41]})
    put(tmp_path, {"heads-4": [3.001, 3.103, 3.201]})
    assert (verdicts(tmp_path)[depth], verdicts(tmp_path)[heads]) == (Verdict.CHANGED, Verdict.CHANGED)
    put(tmp_path, {"identity-8": [3.305, 3.406, 3.505]})  # as good as top-1, within 0.01 nats
    assert verdicts(tmp_path)[depth] is Verdict.CHANGED
    put(tmp_path, {"identity-8": [3.305, 3.43, 3.505]})
    assert verdicts(tmp_path)[depth] is Verdict.UNDECIDED
    put(tmp_path, {"identity-8": [3.4, 3.5, 3.61], "heads-4": [3.1, 3.2, 3.31]})
    assert (verdicts(tmp_path)[depth], verdicts(tmp_path)[heads]) == (Verdict.FAILS, Verdict.FAILS)


def test_the_recipes_switch_on_what_they_name() -> None:
    """And the Grassmannian Soft MoE differs from Soft MoE in the router alone."""
    settings = {recipe.name: recipe.settings for recipe in future.ALL}
    soft, grassmann = set(settings["soft-moe"]), set(settings["grassmann-soft-moe"])
    assert soft ^ grassmann == {"model.router=soft_moe", "model.router=grassmann_soft_moe"}
    assert "model.identity_experts=8" in settings[future.HALF.name]
    assert "alpha.schedule=learned" in settings["alpha-learned"]
    # Half of the choices compute nothing once the load is even: as many experts as top-1.
    config = GrmoeConfig(num_experts=8, identity_experts=8)
    assert (config.num_experts_per_tok or 0) * config.num_experts / config.gate_experts == 1.0


def an_outcome(method: str, loss: float) -> Any:
    return SimpleNamespace(method=method, experts=6, divergence=0.01, texts=[SimpleNamespace(loss=loss)])


def test_models_of_the_plain_recipe_are_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(results=tmp_path / "results", work=tmp_path / "work", device="cpu", tokens=99)
    wanted = future.STUDY.needs(place).measurements
    assert [w.job.name for w in wanted] == ["grmoe-0", "grmoe-1", "grmoe-2"]
    asked = []

    def prune(plan: grmoe.prune.Plan, progress: Any) -> Any:
        asked.append(plan)
        seed = int(str(plan.model)[-1])
        losses = {
            "load drop": 3.2,
            "certificate drop": 3.1,
            "fisher drop": 3.3 + seed / 100,
            "overlap drop": 3.4,
            "overlap merge": 3.4,
        }
        body = SimpleNamespace(
            ranked=[an_outcome(method, loss) for method, loss in losses.items()],
            texts=[SimpleNamespace(loss=3.0)],
            beaten=lambda outcome, kind, text: 7,
            certificates=(Certified(block=1, bound=5.0, error=0.5, output=2.0),),
        )
        return SimpleNamespace(body=body)

    monkeypatch.setattr(grmoe.prune, "run", prune)
    for one in wanted:
        body = pruning.prune_run(run_folder(place.work, one.job), place, silent)
        path = one.kind.path(place.results, one.job)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(
                {"recipe": "grmoe", "seed": one.job.seed, "revision": "r", "machine": "m", "body": body}
            )
        )
    assert [(plan.experts, plan.tokens) for plan in asked] == [(6, 99)] * 3
    assert future.STUDY.state(place.results).done == 3
    assert future.STUDY.needs(place).measurements == []
    claims = {claim.text: claim for claim in future.STUDY.page(place.results).claims}
    better = "better experts to drop than the load does"
    assert claims[f"Certificates choose {better}"].verdict is Verdict.HOLDS
    assert claims[f"Fisher information chooses {better}"].verdict is Verdict.FAILS
    assert claims[f"Certificates choose {better}"].where == OWN
    assert claims["Certificates guarantee what pruning costs"].ours == (
        "the bound is 10 to 10 times the error, and 2 to 2 times the output"
    )
    costly = next(claim for text, claim in claims.items() if text.startswith("Subspace-aware criteria"))
    assert costly.verdict is Verdict.FAILS
    assert costly.ours.startswith("fisher drop: +0.3100 ± 0.0248 (36 % of perplexity)")
    table = next(t for t in future.STUDY.page(place.results).tables if t.title.startswith("Pruned from"))
    assert ("certificate drop", "3", "+0.1000 ± 0.0000", "0.0100 ± 0.0000", "21 of 30") in table.rows


@pytest.mark.parametrize(
    ("bound", "verdict"),
    [
        (0.5, Verdict.CHANGED),
        (0.49, Verdict.FAILS),  # broken
        (2.0, Verdict.FAILS),  # as large as the output itself: it says nothing
    ],
)
def test_a_certificate_guarantees_if_no_layer_moves_further(bound: float, verdict: Verdict) -> None:
    bounds = [
        pruning.Bound(seed=seed, block=block, bound=bound if (seed, block) == (2, 3) else 1.5, error=0.5, output=2.0)
        for seed in range(3)
        for block in (1, 3)
    ]  # fmt: skip
    (found,) = (c for c in pruning.claims([], bounds) if c.text.startswith("Certificates guarantee"))
    assert found.verdict is verdict
    (few,) = (c for c in pruning.claims([], bounds[:4]) if c.text.startswith("Certificates guarantee"))
    assert few.verdict is Verdict.OPEN


@pytest.mark.parametrize(
    ("merged", "dropped", "verdict"),
    [
        (3.009, 3.1, Verdict.CHANGED),
        (3.011, 3.1, Verdict.FAILS),  # better than dropping by load, and still missed
        (3.009, 3.0, Verdict.FAILS),
    ],
)
def test_redundant_experts_are_not_missed(merged: float, dropped: float, verdict: Verdict) -> None:
    rows = [
        pruning.Pruned(seed=seed, method=method, experts=6, loss=value, trained=3.0, divergence=0.0, beaten=0)
        for seed in range(3)
        for method, value in (("overlap merge", merged), ("load drop", dropped))
    ]
    (found,) = (c for c in pruning.claims(rows, []) if c.text.startswith("Subspace overlap identifies"))
    assert found.verdict is verdict


@pytest.mark.parametrize(("loss", "verdict"), [(3.009, Verdict.CHANGED), (3.011, Verdict.FAILS)])
def test_quality_is_preserved_within_a_hundredth(loss: float, verdict: Verdict) -> None:
    rows = [
        pruning.Pruned(seed=seed, method=method, experts=6, loss=value, trained=3.0, divergence=0.0, beaten=0)
        for seed in range(3)
        for method, value in (("fisher drop", loss), ("overlap drop", 3.2), ("overlap merge", 3.2))
    ]
    (found,) = (c for c in pruning.claims(rows, []) if c.text.startswith("Subspace-aware criteria"))
    assert found.verdict is verdict
