"""The experts by kernels against the reference loop in fp64: output and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe.experts import BACKENDS, Dispatch, ExpertWeights
from grmoe.experts.reference import reference_experts
from grmoe.kernels import experts as module
from grmoe.kernels.experts import Engines, Fused, experts
from grmoe.kernels.grouped_gemm import Tiles

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

D, I, N = 20, 12, 5
SMALL = Tiles(32, 32, 16, 4, 2)
ENGINES = {
    "own": Engines(SMALL, SMALL, SMALL),
    "grouped_mm": Engines(SMALL, SMALL, None),
}


def selection(T: int, kind: str) -> tuple[Tensor, Tensor, int]:
    """(weights, selected, most). Expert 3 never has a token."""
    g = torch.Generator().manual_seed(0)
    score = torch.rand(T, N, generator=g)
    score[:, 3] = -1
    if kind == "uneven":  # most tokens on expert 0; tokens with none to three experts
        score[:, 0] += 0.8
        count = torch.randint(4, (T, 1), generator=g)
    elif kind == "one":  # all on one expert
        score[:, 2] += 5
        count = torch.ones(T, 1, dtype=torch.long)
    else:
        count = torch.zeros(T, 1, dtype=torch.long)
    selected = score.argsort(1, descending=True).argsort(1) < count
    return torch.where(selected, torch.rand(T, N, generator=g), 0.0), selected, 3


Results = dict[str, Tensor]


def run(
    backend: Any, weights: ExpertWeights, x: Tensor, gates: tuple[Tensor, Tensor, int], **build: Any
) -> Results:
    weights.zero_grad()
    leaf, gate = x.clone().requires_grad_(), gates[0].to(x.dtype, copy=True).requires_grad_()
    y = backend(leaf, Dispatch.build(gate, *gates[1:], **build), weights)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(x.dtype)
    y.backward(upstream)
    grads = {"x": leaf.grad, "gate": gate.grad, **{n: p.grad for n, p in weights.named_parameters()}}
    assert all(g is not None for g in grads.values())
    return {"y": y.detach(), **grads}


def compare(activation: Any, T: int, kind: str) -> Results:
    torch.manual_seed(0)
    weights = ExpertWeights(D, I, N, activation)
    x = 2 * torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    gates = selection(T, kind)
    ours = run(BACKENDS["triton"], weights, x, gates, kernels=True)
    exact = run(reference_experts, copy.deepcopy(weights).double(), x.double(), gates)
    for name, expected in exact.items():
        # fp32 chains of sums over at most T terms.
        torch.testing.assert_close(ours[name].double(), expected, rtol=1e-4, atol=1e-5, msg=name)
    return ours


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("engine", ENGINES)
def test_output_and_every_gradient(monkeypatch: pytest.MonkeyPatch, activation: Any, engine: str) -> None:
    monkeypatch.setattr(module, "engines", lambda *_: ENGINES[engine])
    monkeypatch.setattr(module, "THIN_MEAN", -1)
    ours = compare(activation, 45, "uneven")
    assert not ours["down_proj"][3].any()  # the idle expert


@pytest.mark.parametrize("parts", [(True, True, True), (False, True, False)], ids=str)
def test_fused_parts_of_the_backward(monkeypatch: pytest.MonkeyPatch, parts: tuple[bool, bool, bool]) -> None:
    monkeypatch.setattr(module, "engines", lambda *_: ENGINES["own"])
    monkeypatch.setattr(module, "fused_parts", lambda _: Fused(*parts))
    compare("swiglu" if all(parts) else "gelu", 15, "uneven")
    if all(parts):
        compare("swiglu", 2, "none")


def test_tiles_are_thin_where_experts_have_few_rows() -> None:
    tiles = module.engines(torch.float16, True)
    for tokens, each, rows in ((1, 1, 16), (20, 8, 16), (20, 20, 32), (300, 9, 32), (300, 17, 64)):
        thin = module.thin_engines(tiles, 8 * each, 8, tokens)
        assert (thin.up.rows, thin.plain.rows) == (rows, rows)
        assert thin.up.thin
        assert thin.grad_weight == tiles.grad_weight
    assert module.thin_engines(tiles, 49 * 8, 8, 300) == tiles
    assert not tiles.up.thin


@pytest.mark.parametrize("kind", ["uneven", "one", "none"])
@pytest.mark.parametrize("T", [0, 1, 9])
def test_loads(T: int, kind: str) -> None:
    ours = compare("swiglu", T, kind)
    if kind == "none":
        assert not any(v.any() for v in ours.values())


@pytest.mark.parametrize("engine", ["own", "grouped_mm"])
@pytest.mark.parametrize("training", [True, False])
def test_what_is_kept_for_the_backward(monkeypatch: pytest.MonkeyPatch, engine: str, training: bool) -> None:
    """Pre-activations where a gradient may be asked for; nothing where none can."""
    monkeypatch.setattr(module, "engines", lambda *_: ENGINES[engine])
    kept: list[int] = []
    original = module._forward

    def spy(*args: Any) -> Any:
        y, inner = original(*args)
        kept.append(inner.numel())
        return y, inner

    monkeypatch.setattr(module, "_forward", spy)
    weights, gates = ExpertWeights(D, I, N), selection(9, "uneven")
    d = Dispatch.build(*gates, kernels=True)
    x = torch.randn(9, D)
    for p in weights.parameters():
        p.requires_grad_(training)
    y = BACKENDS["triton"](x, d, weights)
    assert (y.grad_fn is not None) == training
    assert kept.pop() == (27 * 2 * I if training else 0)
    with torch.no_grad():
        assert BACKENDS["triton"](x.requires_grad_(), d, weights).grad_fn is None
    assert kept == [0]


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_kept_graph_gives_the_same_gradients_again(
    monkeypatch: pytest.MonkeyPatch, activation: Any
) -> None:
    """The last backward writes over the pre-activations, an earlier one must not."""
    spent: list[bool] = []
    original = module.rows.activation_backward

    def spy(*args: Any) -> Any:
        spent.append(args[-1])
        return original(*args)

    monkeypatch.setattr(module.rows, "activation_backward", spy)
    torch.manual_seed(0)
    weights, (gate, *rest) = ExpertWeights(D, I, N, activation), selection(9, "uneven")
    x = torch.randn(9, D, requires_grad=True)
    leaves = [x, gate.requires_grad_(), *weights.parameters()]
    y = BACKENDS["triton"](x, Dispatch.build(gate, *rest, kernels=True), weights)
    loss = y.square().sum()
    runs = [torch.autograd.grad(loss, leaves, retain_graph=keep) for keep in (True, True, False)]
    assert spent == [False, False, True]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_strided_operands() -> None:
    torch.manual_seed(0)
    weights, gates = ExpertWeights(D, I, N), selection(9, "uneven")
    x = torch.randn(9, D)
    plain = run(BACKENDS["triton"], weights, x, gates, kernels=True)
    d = Dispatch.build(*gates, kernels=True)
    up, down = (
        p.detach().transpose(1, 2).contiguous().transpose(1, 2) for p in (weights.up, weights.down_proj)
    )
    tail = (d.token_A, d.pair_A, d.offset_N, d.slot_TM)
    leaves = [x.T.contiguous().T.requires_grad_(), up.requires_grad_(), down.requires_grad_()]
    y = experts(leaves[0], d.weight_TM, leaves[1], leaves[2], *tail, glu=True)
    y.T.contiguous().T.backward(torch.randn(x.shape, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(y, plain["y"])
    for leaf, name in zip(leaves, ("x", "gate_up_proj", "down_proj"), strict=True):
        assert torch.equal(leaf.grad, plain[name])


def test_a_list_built_by_torch_serves_too() -> None:
    """The contract of a backend is a `Dispatch`, whoever built it."""
    torch.manual_seed(0)
    weights, gates = ExpertWeights(D, I, N), selection(9, "uneven")
    x = torch.randn(9, D)
    d = Dispatch.build(*gates)
    torch.testing.assert_close(BACKENDS["triton"](x, d, weights), reference_experts(x, d, weights))


def test_nan_token_touches_no_other() -> None:
    torch.manual_seed(0)
    weights, gates = ExpertWeights(D, I, N), selection(20, "uneven")
    x = torch.randn(20, D)
    clean = run(BACKENDS["triton"], weights, x, gates, kernels=True)
    bad = int(gates[1].any(1).nonzero()[3])
    x[bad] = float("nan")
    ours = run(BACKENDS["triton"], weights, x, gates, kernels=True)
    others = torch.arange(20) != bad
    assert ours["y"][bad].isnan().all()
    assert torch.equal(ours["y"][others], clean["y"][others])
    assert torch.equal(ours["x"][others], clean["x"][others])


def test_second_derivative_is_refused_not_dropped() -> None:
    weights, gates = ExpertWeights(D, I, N), selection(9, "uneven")
    x = torch.randn(9, D, requires_grad=True)
    y = BACKENDS["triton"](x, Dispatch.build(*gates, kernels=True), weights)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|differentiat"):
        (first.sum() + x.sum()).backward()


def test_half_precision() -> None:
    torch.manual_seed(0)
    weights, gates = ExpertWeights(24, 16, N).half(), selection(30, "uneven")
    x = torch.randn(30, 24).half()
    with torch.no_grad():
        y = BACKENDS["triton"](x, Dispatch.build(*gates, kernels=True), weights)
        gates = (gates[0].double(), *gates[1:])
        exact = reference_experts(x.double(), Dispatch.build(*gates), weights.double())
    # Hidden values and rows are rounded to 11 bits, three rows a token.
    assert float((y - exact).norm() / exact.norm()) < 2**-10


def test_the_backward_is_fused_for_wide_tokens_in_16_bits_on_a_hopper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    width = module.FUSED_WIDTH
    for hopper in (True, False):
        monkeypatch.setattr(module, "specialises", lambda _, hopper=hopper: hopper)
        for D, dtype, want in (
            (width, torch.bfloat16, hopper),
            (width, torch.float16, hopper),
            (width - 8, torch.bfloat16, False),
            (width, torch.float32, False),
        ):
            assert module.fused_parts(torch.empty(1, D, dtype=dtype)) == Fused(want, want, want)
