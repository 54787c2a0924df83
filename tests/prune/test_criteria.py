"""Pruning by certificate and by Fisher information, against plain computations."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from twins import untrained

from grmoe.probe.routing import moe_layers
from grmoe.probe.windows import Text
from grmoe.prune.certificate import certificate_drop, certified, drop_bound
from grmoe.prune.fisher import fisher_information, fisher_method
from grmoe.prune.layers import all_experts, drop, install, prunable_layers
from grmoe.routing import routers


def text(windows: int = 3) -> Text:
    return Text("random", torch.randint(0, 50, (windows, 33), generator=torch.Generator().manual_seed(0)))


MODELS: list[dict[str, Any]] = [
    {},
    {"hidden_act": "gelu", "norm_topk_prob": True},
    {"selection": "dense", "alpha": 2.0},
    {"selection": "mass", "selection_tau": 0.6, "num_experts_per_tok": 3},
    {"router": "softmax", "router_rank": None, "num_experts_per_tok": 1},
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fields", MODELS, ids=str)
@torch.no_grad()
def test_no_token_breaks_the_bound(fields: dict[str, Any], seed: int) -> None:
    """Every set of two kept experts, every token: the layer with them in place moves by no more than the bound.

    In fp64: where no weight changes, the bound is below the rounding of the layer in fp32.
    """
    model = untrained(seed, **fields).double()
    for layer in prunable_layers(model, text(1)):
        trained_TD = layer.layer.run(layer.x_TD)[0]
        for kept in combinations(range(4), 3 if model.config.num_experts_per_tok == 3 else 2):
            layout = tuple((e,) for e in kept)
            bound_T = drop_bound(layer, layout)
            layer.install(layout)
            error_T = (layer.layer.run(layer.x_TD)[0] - trained_TD).norm(dim=-1)
            layer.install(all_experts(4))
            assert bool((error_T <= bound_T + 1e-12).all())
            found = certified(layer, layout)
            assert found.error == pytest.approx(float(error_T.mean()), rel=1e-4)
            assert found.bound == pytest.approx(float(bound_T.mean()))
        assert float(drop_bound(layer, all_experts(4)).max()) == 0.0  # nothing is dropped, nothing moves


@torch.no_grad()
def test_the_bound_is_the_plain_sum_and_chooses_the_least() -> None:
    layer = prunable_layers(untrained(selection="dense"), text(1))[0]
    means = []
    for e in range(4):
        total = 0.0
        for x_D in layer.x_TD:
            gate_N = layer.router.gate(x_D.double(), None).softmax(-1)
            bounds = [float(layer.gain_N[f]) * float(x_D.double().norm()) ** 2 for f in range(4)]
            g = gate_N.tolist()
            # A dense gate gives the mass of the dropped expert to the others in proportion.
            total += g[e] * bounds[e] + sum(g[f] * g[e] / (1 - g[e]) * bounds[f] for f in range(4) if f != e)
        means.append(total / len(layer.x_TD))
    start = all_experts(4)
    got = [float(drop_bound(layer, drop(start, e)).mean()) for e in range(4)]
    assert got == pytest.approx(means, rel=1e-5)
    assert certificate_drop(layer, start) == drop(start, means.index(min(means)))


def test_fisher_information_is_the_plain_sum() -> None:
    """(w_te·⟨∂L/∂y_t, f_e(x_t)⟩)², summed in a loop over tokens and experts."""
    model = untrained(num_experts_per_tok=2, initializer_range=0.3)
    rows = text(2).rows_WS[:, :9]
    information = fisher_information(model, Text("random", rows))
    want = [torch.zeros(4, dtype=torch.float64) for _ in routers(model)]
    for row_S in rows:
        seen: list[tuple[Tensor, Tensor]] = []
        hooks = [
            layer.register_forward_hook(lambda _, x, out, seen=seen: seen.append((x[0], out[0])))
            for layer in moe_layers(model)
        ]
        logits_SV = model(input_ids=row_S[None, :-1]).logits[0]
        for hook in hooks:
            hook.remove()
        loss = sum(-logits_SV.log_softmax(-1)[t, row_S[t + 1]] for t in range(8))
        for layer, total_N, (x, y) in zip(moe_layers(model), want, seen, strict=True):
            (gradient,) = torch.autograd.grad(loss, y, retain_graph=True)
            weights_TN = layer.router(x).weights[0]
            for t in range(8):
                for e in range(4):
                    up, down = layer.experts.up[e], layer.experts.down_proj[e]
                    f_D = layer.experts.activate(x[0, t] @ up.T) @ down.T
                    total_N[e] += float(weights_TN[t, e] * (gradient[0, t] @ f_D)) ** 2
    for got, expected in zip(information, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=0)
    layers = prunable_layers(model, Text("random", rows))
    after = fisher_method(information)(layers, [all_experts(4)] * 2)
    for layout, F_N in zip(after, information, strict=True):
        assert layout == drop(all_experts(4), int(F_N.argmin()))
    install(layers, after)
    assert [router.num_experts for router in routers(model)] == [3, 3]


def test_measuring_fisher_information_leaves_the_model_as_it_was() -> None:
    model = untrained()
    ids = text(1).inputs_WS
    before = model(ids).logits
    fisher_information(model, text(2))
    assert torch.equal(model(ids).logits, before)
    assert all(p.grad is None for p in model.parameters())
    assert model.routing_metrics()[0].tokens == 2 * ids.numel()
