"""Gates at any α from one pass, against the router itself; and the hooks they rest on."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grmoe.probe.gates import affine_gate, affine_gates
from grmoe.probe.routing import DROPPED, layer_inputs, leading_expert, moe_layers, recorded
from grmoe.routing import Routing, build_router, routers

# Routers with a dial, and what changes their gate's form.
ROUTERS: list[tuple[str, dict[str, Any]]] = [
    ("grassmann", {"rank": 4}),
    ("grassmann", {"rank": 4, "prior": "paper"}),
    ("grassmann", {"rank": 4, "concentration": "diagonal"}),
    ("grassmann", {"rank": 4, "dial": "likelihood"}),
    ("grassmann", {"rank": 4, "amortizer": "input"}),
    ("grassmann", {"rank": 4, "scaling": "raw", "prior": "paper", "amortizer": "matrix"}),
    ("softmax", {}),
    ("vmf", {}),
]


@functools.cache
def built(place: int) -> Any:
    name, options = ROUTERS[place]
    torch.manual_seed(place)
    router = build_router(name, 16, 5, **options)
    for parameter_name, tensor in router.state_dict(keep_vars=True).items():
        if parameter_name.endswith(("log_prior", "log_kappa")):
            tensor.data += torch.randn_like(tensor)
    return router


@given(st.integers(0, len(ROUTERS) - 1), st.floats(0, 20), st.floats(0, 5), st.integers(0, 2**32))
def test_the_affine_gate_is_the_router_s_own_at_any_alpha(
    place: int, alpha: float, before: float, seed: int
) -> None:
    router = built(place)
    router.alpha = before
    x_TD = torch.randn(7, 16, generator=torch.Generator().manual_seed(seed))
    gate = affine_gate(router, x_TD)
    assert router.alpha == pytest.approx(before)  # as it was
    router.alpha = alpha
    with torch.no_grad():
        logits = router.gate(x_TD, None)
    assert torch.allclose(gate.a_TN + alpha * gate.b_TN, logits, rtol=1e-4, atol=1e-4)
    assert torch.allclose(gate.probs(alpha), logits.softmax(-1), rtol=1e-3, atol=1e-4)


def test_the_dial_comes_back_when_a_gate_fails() -> None:
    router = built(len(ROUTERS) - 2)
    router.alpha = 2.5
    with pytest.raises(RuntimeError):
        affine_gate(router, torch.randn(7, 15))
    assert router.alpha == 2.5


def test_gates_of_a_model_are_those_of_its_forward_pass(make: Any) -> None:
    model = make().model
    model.set_alpha([0.5, 3.0])
    ids_WS = torch.randint(0, model.config.vocab_size, (3, 20), generator=torch.Generator().manual_seed(0))
    gates = affine_gates(model, ids_WS)
    assert model.alpha == [0.5, 3.0]
    with torch.no_grad(), recorded(model) as seen:
        model(ids_WS)
    for gate, routing, alpha in zip(gates, seen, [0.5, 3.0], strict=True):
        assert torch.allclose(gate.probs(alpha), routing.probs.flatten(0, -2), rtol=1e-4, atol=1e-5)


def test_layer_inputs_are_what_the_layers_were_given(make: Any) -> None:
    model = make().model
    ids_WS = torch.randint(0, model.config.vocab_size, (3, 20), generator=torch.Generator().manual_seed(1))
    inputs = layer_inputs(model, ids_WS)
    assert all(metrics.tokens == 0 for metrics in model.routing_metrics())
    assert not any(layer._forward_pre_hooks for layer in moe_layers(model))
    with torch.no_grad(), recorded(model) as seen:
        model(ids_WS)
        for x_TD, layer, routing in zip(inputs, moe_layers(model), list(seen), strict=True):
            assert x_TD.shape == (60, model.config.hidden_size)
            again = layer.router(x_TD.view(3, 20, -1))
            assert torch.allclose(again.probs, routing.probs, rtol=1e-4, atol=1e-5)


def test_windows_in_one_pass_give_what_each_gives_alone(make: Any) -> None:
    model = make().model
    ids_WS = torch.randint(0, model.config.vocab_size, (70, 32), generator=torch.Generator().manual_seed(2))
    together = layer_inputs(model, ids_WS)  # two passes: 62 windows, and 8
    alone = [layer_inputs(model, row_S[None]) for row_S in ids_WS]
    for layer, x_TD in enumerate(together):
        assert torch.allclose(x_TD, torch.cat([found[layer] for found in alone]), rtol=1e-4, atol=1e-5)


def test_recording_leaves_the_routers_as_they_were(make: Any) -> None:
    model = make().model
    ids = torch.zeros(1, 8, dtype=torch.long)
    with torch.no_grad(), recorded(model) as seen:
        model(ids)
        assert len(seen) == 2
    assert all(metrics.tokens == 0 for metrics in model.routing_metrics())
    with torch.no_grad():
        model(ids)
    assert len(seen) == 2
    assert all(metrics.tokens == 8 for metrics in model.routing_metrics())
    assert not any(router._forward_hooks for router in routers(model))


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 6))
def test_the_leading_expert_is_a_loop_over_the_selected(seed: int, tokens: int, experts: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    weights = torch.rand(tokens, experts, generator=draw)
    selected = torch.rand(tokens, experts, generator=draw) < 0.4
    routing = Routing(
        logits=weights, probs=weights, weights=weights * selected, selected=selected, aux_loss=weights.sum()
    )
    for token, found in enumerate(leading_expert(routing).tolist()):
        chosen = [e for e in range(experts) if selected[token, e]]
        want = max(chosen, key=lambda e: float(weights[token, e])) if chosen else DROPPED
        assert found == want
