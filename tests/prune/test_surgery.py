"""Layers with fewer experts against the layers they came from: twins, drops, slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from twins import TWINS, make_twins, tokens, untrained

from grmoe.layer import MoE
from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.probe.routing import moe_layers
from grmoe.prune.choose import output_drops, overlap_merge
from grmoe.prune.gates import combine_weights, reduce_router, similarity
from grmoe.prune.layers import PrunableLayer, all_experts, drop, install, merge
from grmoe.prune.small import size, small_config, small_model
from grmoe.prune.units import match_units, outputs

GATES: list[dict[str, Any]] = [
    {},
    {"hidden_act": "gelu"},
    {"alpha": 1.7},
    {"alpha": 1.7, "router_options": {"dial": "likelihood"}},
    {"router_options": {"concentration": "diagonal"}},
    {"router_options": {"linear": True}},
    {"router_options": {"prior": "uniform"}},
    {"router_options": {"prior": "paper"}},
    {"router_options": {"prior": "paper", "scaling": "raw"}, "router_kappa": 0.1},
    {"router": "softmax", "alpha": 0.6},
    {"router": "vmf"},
]


def prunable(model: GrmoeForCausalLM) -> list[PrunableLayer]:
    return [PrunableLayer(layer, i, tokens()) for i, layer in enumerate(moe_layers(model))]


def logits(model: GrmoeForCausalLM) -> Tensor:
    ids = torch.randint(0, 50, (4, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out: Tensor = model(input_ids=ids).logits
    return out


@pytest.mark.parametrize("fields", GATES, ids=str)
def test_twins_are_found_and_merged_without_a_trace(fields: dict[str, Any]) -> None:
    """Exact where it must be: without selection the merged expert has the mass of both, and computes what both do."""
    model = untrained(selection="dense", **fields)
    truth = make_twins(model)
    found = prunable(model)
    before = logits(model)
    pair = merge(all_experts(4), *TWINS)
    for own, (order, sign) in zip(found, truth, strict=True):
        assert overlap_merge(own, all_experts(4)) == pair
        match = match_units(own.experts, *TWINS)
        assert torch.equal(match.order_I, order)
        assert torch.equal(match.sign_I, sign)
    install(found, [pair, pair])
    # fp32 sums of a few dozen terms of size one, through two blocks.
    torch.testing.assert_close(logits(model), before, rtol=0, atol=2e-5)
    torch.testing.assert_close(logits(small_model(model, 3)), before, rtol=0, atol=2e-5)
    install(found, [all_experts(4)] * 2)
    assert torch.equal(logits(model), before)  # the original was not touched


def test_merging_strangers_is_not_free() -> None:
    """The same comparison fails where it should: the test above would notice a wrong pair."""
    model = untrained(selection="dense")
    make_twins(model)
    found = prunable(model)
    before = logits(model)
    install(found, [merge(all_experts(4), 0, 2)] * 2)
    assert float((logits(model) - before).abs().max()) > 1e-2


def test_under_top_k_tokens_that_use_neither_twin_are_left_alone() -> None:
    # Renormalised, else the twins' mass is part of every weight. A flat gate, so that many tokens use neither twin.
    model = untrained(num_experts_per_tok=2, norm_topk_prob=True, router_kappa=1.5)
    make_twins(model)
    own, layer, x_TD = prunable(model)[0], moe_layers(model)[0], tokens(2000, seed=5)
    with torch.no_grad():
        y_TD, weights_TN = layer.run(x_TD)[0], combine_weights(layer.router, x_TD)
        own.install(merge(all_experts(4), *TWINS))
        small_TD, small_TN = layer.run(x_TD)[0], combine_weights(layer.router, x_TD)
    groups = merge(all_experts(4), *TWINS)
    alone_T = (weights_TN[:, list(TWINS)].sum(-1) == 0) & (small_TN[:, groups.index(TWINS)] == 0)
    assert 20 < int(alone_T.sum()) < 1980
    torch.testing.assert_close(small_TD[alone_T], y_TD[alone_T], rtol=0, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"router": "softmax"}, {"alpha": 2.5}], ids=str)
def test_a_merged_expert_keeps_the_load_of_its_members(fields: dict[str, Any]) -> None:
    model = untrained(num_experts_per_tok=2, **fields)
    for own in prunable(model):
        layout = merge(all_experts(4), 0, 2)
        share = float(
            combine_weights(own.small_router(layout), own.x_TD)[:, layout.index((0, 2))].double().mean()
        )
        # Tokens are few and the share jumps as they change sides; without the search it is off by a fifth.
        assert share == pytest.approx(float(own.load_N[[0, 2]].sum()), rel=0.03)


@pytest.mark.parametrize(
    "fields",
    [{}, {"router": "softmax"}, {"selection": "mass", "alpha": 0.7}, {"norm_topk_prob": True}],
    ids=str,
)
def test_dropping_is_the_reference_loop(fields: dict[str, Any]) -> None:
    model = untrained(num_experts_per_tok=2, **fields)
    own, layer, x_TD = prunable(model)[1], moe_layers(model)[1], tokens(64, seed=6)
    with torch.no_grad():
        logits_TN = own.router.gate(x_TD, None).double()
        f_NTD = outputs(own.experts, x_TD).double()
        own.install(drop(all_experts(4), 1))
        y_TD = layer.run(x_TD)[0]
    kept = [0, 2, 3]
    for t in range(len(x_TD)):
        g = torch.softmax(logits_TN[t, kept], 0)
        ranked = g.argsort(descending=True).tolist()
        chosen, mass = [], 0.0
        for place in ranked[:2]:
            if layer.router.selection.__class__.__name__ == "Mass" and mass >= 0.9:
                break
            chosen.append(place)
            mass += float(g[place])
        scale = mass if model.config.norm_topk_prob else 1.0
        want = sum(g[p] / scale * f_NTD[kept[p], t] for p in chosen)
        torch.testing.assert_close(y_TD[t].double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fields", GATES, ids=str)
def test_every_parameter_and_buffer_is_sliced(fields: dict[str, Any]) -> None:
    model = untrained(**fields)
    own = prunable(model)[0]
    router, experts = own.small_router(((0,), (2,), (3,))), own.small_experts(((0,), (2,), (3,)))
    keep = [0, 2, 3]
    fixed = getattr(own.router, "prior", "balanced") != "balanced"
    for name, tensor in own.router.state_dict().items():
        if not (fixed and name == "log_prior"):
            assert torch.equal(router.state_dict()[name], tensor[keep] if tensor.ndim else tensor), name
    assert set(router.state_dict()) == set(own.router.state_dict())
    assert router.num_experts == 3
    assert router.prior_sums.shape == (4,)
    assert router.counter.num_experts == 3
    assert router.counter.sums.shape == (3 * 3 + 4,)
    assert router.alpha == own.router.alpha
    for name, tensor in own.experts.state_dict().items():
        assert torch.equal(experts.state_dict()[name], tensor[keep]), name
    with torch.no_grad():
        mine, theirs = router.gate(own.x_TD, None), own.router.gate(own.x_TD, None)[:, keep]
    torch.testing.assert_close(
        mine, theirs, rtol=0, atol=1e-5
    )  # the log Z of a uniform prior is rounded to fp32
    router(own.x_TD)
    assert router.read_metrics().tokens == len(own.x_TD)
    assert own.router.read_metrics().tokens == 0  # metrics do not count measurements


def test_output_drops_come_in_the_order_of_the_error_they_make() -> None:
    model = untrained(num_experts_per_tok=2)
    own, layer = prunable(model)[0], moe_layers(model)[0]
    layout = merge(all_experts(4), 0, 2)
    ranked = output_drops(own, layout)
    with torch.no_grad():
        y_TD = layer.run(own.x_TD)[0]
        errors = []
        for candidate in ranked:
            own.install(candidate)
            errors.append(float((layer.run(own.x_TD)[0] - y_TD).square().sum()))
    assert len(set(ranked)) == 3
    assert errors == sorted(errors)


def test_overlap_of_a_linear_gate_ignores_a_common_vector() -> None:
    model = untrained(router="softmax")
    router = moe_layers(model)[0].router
    before = similarity(router)
    with torch.no_grad():
        router.weight += 5 * torch.randn(32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(similarity(router), before, rtol=0, atol=1e-5)


def test_a_group_of_three_equals_twins_of_twins() -> None:
    layer: MoE = moe_layers(untrained(selection="dense"))[0]
    with torch.no_grad():
        for e in (1, 2):
            layer.router.frames[e] = layer.router.frames[0]
            layer.router.log_kappa[e] = layer.router.log_kappa[0]
        x_TD = tokens()
        small = reduce_router(layer.router, [[0, 1, 2], [3]], torch.tensor([0.2, 0.3, 0.1, 0.4]), x_TD)
        g_TN, small_TN = layer.router(x_TD).probs, small(x_TD).probs
    torch.testing.assert_close(small_TN[:, 0], g_TN[:, :3].sum(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "per_token"),
    [
        ({"selection": "dense"}, 3),
        ({"selection": "threshold", "selection_tau": 0.2}, 3),
        ({"num_experts_per_tok": 2}, 2),
        ({"selection": "mass", "num_experts_per_tok": 3}, 3),
    ],
    ids=str,
)
def test_the_small_configuration_is_complete(fields: dict[str, Any], per_token: int) -> None:
    model = untrained(**fields)
    small = small_config(model.config, 3)
    assert (small.num_experts, small.num_experts_per_tok, model.config.num_experts) == (3, per_token, 4)
    assert small.router_rank == model.config.router_rank
    found = prunable(model)
    install(found, [drop(all_experts(4), 0)] * 2)
    assert torch.equal(logits(small_model(model, 3)), logits(model))
    assert size(small_model(model, 3)) == size(model)
    found[1].install(all_experts(4))
    with pytest.raises(RuntimeError, match="size mismatch"):  # a layer that was forgotten
        small_model(model, 3)


def test_a_curve_of_budgets_goes_with_the_experts_it_was_calibrated_with() -> None:
    curve = [{"experts_per_token": e, "tau": 1.0, "alpha": 1.0, "cap": int(e)} for e in (1.0, 4.0)]
    config = GrmoeConfig(num_experts=4, budget_curve=curve, budget=4.0)
    small = small_config(config, 3)
    assert (small.budget, small.budget_curve) == (None, None)
    assert config.budget == 4.0
