"""Identity experts (mixture of depths): routed like the others, never computed, counted apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from grmoe.layer import MoE
from grmoe.model import GrmoeConfig, GrmoeForCausalLM, count
from grmoe.model.count import parameters
from grmoe.prune.gates import check_router
from grmoe.routing import Dense, GrassmannRouter, Mass, Selection, SwitchRouter, TopK, routers
from grmoe.runs.config import TrainConfig

D, N, I = 16, 4, 2
F64 = torch.float64


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(1), dtype=F64)


def make(selection: Selection, **options: Any) -> MoE:
    torch.manual_seed(0)
    router = GrassmannRouter(D, N + I, 2, kappa=4.0, selection=selection, identity=I)
    return MoE(D, 8, N, router, **options).double()


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@pytest.mark.parametrize(
    "selection", [TopK(2), TopK(3, renormalize=True), Mass(0.6, cap=4), Dense()], ids=str
)
def test_the_layer_is_the_sum_over_the_other_experts(selection: Selection, backend: Any) -> None:
    layer, x = make(selection, backend=backend), tokens(2, 9)
    if backend == "grouped":  # it has no fp64
        layer, x = layer.float(), x.float()
    y, routing = layer.run(x)
    skipped = 0
    for b in range(2):
        for t in range(9):
            gate_N = layer.router.gate(x[b, t], None).softmax(-1)
            chosen = selection(gate_N[None])[0]
            total = gate_N[chosen].sum() if selection.renormalize else 1.0
            want = torch.zeros_like(x[b, t])
            for e in range(N):  # identity experts come last, and give nothing
                if chosen[e]:
                    up, down = layer.experts.up[e], layer.experts.down_proj[e]
                    want = want + gate_N[e] / total * (layer.experts.activate(x[b, t] @ up.T) @ down.T)
            torch.testing.assert_close(y[b, t], want, rtol=0, atol=1e-6 if backend == "grouped" else 1e-12)
            skipped += int(chosen[N:].sum())
            assert torch.equal(routing.computed[b, t], chosen[:N])
    metrics = layer.router.read_metrics()
    assert skipped > 0
    assert sum(metrics.identity_load) == pytest.approx(skipped / 18)
    assert metrics.experts_per_token == pytest.approx(float(routing.computed.sum()) / 18)
    assert len(metrics.load) == len(metrics.leading_load) == len(metrics.gate_load) == N
    assert sum(metrics.load) == pytest.approx(metrics.experts_per_token)


def test_a_token_that_skips_everything_passes_unchanged() -> None:
    layer, x = make(TopK(1)), tokens(6)
    layer.router.log_prior[N:] = 100.0
    y, routing = layer.run(x)
    assert bool((y == 0).all())
    assert not bool(routing.computed.any())
    assert layer.router.read_metrics().experts_per_token == 0.0


@pytest.mark.parametrize("selection", [TopK(2), TopK(2, renormalize=True)], ids=str)
def test_the_bound_on_dropped_experts_still_holds(selection: Selection) -> None:
    layer, x = make(selection), tokens(40)
    bound, exact = layer.truncation(x).bound, layer.truncation(x, exact=True).bound
    y, _ = layer.run(x)
    layer.router.selection = Dense()
    dense, _ = layer.run(x)
    torch.testing.assert_close(exact, (dense - y).norm(dim=-1).detach(), rtol=0, atol=1e-12)
    assert bool((exact <= bound).all())


def test_the_balanced_prior_gives_identity_experts_their_share() -> None:
    layer, x = make(TopK(2)).train(), tokens(400)
    layer.router.log_prior[0] = 5.0
    for _ in range(150):
        layer.router(x)
        layer.router.update_prior(0.1)
    layer.router.reset_metrics()
    layer.router(x)
    metrics = layer.router.read_metrics()
    assert sum(metrics.identity_load) == pytest.approx(2 * I / (N + I), abs=0.05)
    assert metrics.experts_per_token == pytest.approx(2 * N / (N + I), abs=0.05)


def test_a_model_with_identity_experts(build: Any, ids: Tensor, tmp_path: Path) -> None:
    """Saved, loaded, budgeted, counted; the measured FLOPs are those of the experts that were computed."""
    model = build(identity_experts=2, experts_implementation="reference", attn_implementation="eager")
    config = model.config
    assert [r.num_experts for r in routers(model)] == [6, 6]
    assert [len(layer.mlp.experts.down_proj) for layer in model.model.layers[1::2]] == [4, 4]
    assert parameters(config) == count(config).total == sum(p.numel() for p in model.parameters())
    row = torch.arange(12)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(row)
    per_token = sum(m.experts_per_token for m in model.routing_metrics()) / 2
    assert 0.5 < per_token < 2.0
    cost = count(config, context=12)
    assert cost.experts_per_token == 2.0  # an upper bound
    pairs = 4 * 32 * 4 * (12 - 6.5)  # eager attention multiplies masked pairs too
    forward = cost.train_flops_at(per_token) / 3
    assert counter.get_total_flops() == pytest.approx(12 * (forward + pairs) + 2 * 12 * 4)
    model.save_pretrained(tmp_path)
    again = GrmoeForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert json.loads((tmp_path / "config.json").read_text())["identity_experts"] == 2
    text = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert text.shape == (3, 13)


def test_old_configurations_have_none(config: Callable[..., GrmoeConfig]) -> None:
    old = config().to_dict()
    old.pop("identity_experts")
    assert GrmoeConfig(**old).gate_experts == 4


def test_wrong_settings_are_refused(config: Callable[..., GrmoeConfig]) -> None:
    with pytest.raises(ValueError, match=r"identity_experts must be an integer >= 0, got -1"):
        config(identity_experts=-1)
    with pytest.raises(
        ValueError, match=r"identity_experts must be 0 with router 'switch', which chooses by itself"
    ):
        config(identity_experts=1, router="switch", router_kappa=None)
    with pytest.raises(
        ValueError, match=r"identity must leave an expert that computes, got 4 of num_experts = 4"
    ):
        GrassmannRouter(D, 4, 2, identity=4)
    with pytest.raises(ValueError, match=r"identity must be 0 for a SwitchRouter"):
        MoE(D, 8, 3, SwitchRouter(D, 4, identity=1))
    with pytest.raises(
        ValueError, match=r"router must be built for \(dim, num_experts\) = \(16, 4\), got \(16, 3\)"
    ):
        MoE(D, 8, 4, GrassmannRouter(D, 4, 2, identity=1))
    with pytest.raises(ValueError, match="identity experts cannot be pruned"):
        check_router(config(identity_experts=1))
    with pytest.raises(
        ValueError, match=r"router_options.identity is not an option: set model.identity_experts"
    ):
        TrainConfig(model={"router_options": {"identity": 1}})
