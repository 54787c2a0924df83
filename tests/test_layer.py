"""The MoE layer against a plain sum over experts, for every router and backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from grmoe.certificates import truncation_error_bound
from grmoe.experts import pick_backend
from grmoe.experts.bounds import output_gains
from grmoe.experts.weights import Activation, ExpertWeights
from grmoe.kernels import runtime
from grmoe.layer import MoE
from grmoe.model.choices_grmoe import SLOT_ROUTERS
from grmoe.routing import (
    ROUTERS,
    Dense,
    GrassmannRouter,
    Mass,
    Router,
    Selection,
    SwitchRouter,
    Threshold,
    TopK,
    build_router,
)

DIM, HIDDEN, N = 16, 24, 5
# Our kernels through Triton's interpreter, where there is one (see conftest); more of them in tests/kernels. It
# multiplies whole tiles, rows that nobody wrote included.
TRITON = pytest.param(
    "triton",
    marks=[
        pytest.mark.skipif(not runtime.INTERPRETED, reason="no Triton, or kernels are compiled here"),
        pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    ],
)


def make_router(name: str = "grassmann", **options: Any) -> Router:
    torch.manual_seed(0)
    if name == "grassmann":
        options["rank"] = 3
    return build_router(name, DIM, N, **options)


def layer(router: Router, **options: Any) -> MoE:
    torch.manual_seed(1)
    return MoE(DIM, HIDDEN, N, router, **options)


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def plain_expert(weights: ExpertWeights, e: int, x: Tensor) -> Tensor:
    inner = x @ weights.up[e].T
    if weights.activation == "gelu":
        return nn.functional.gelu(inner) @ weights.down_proj[e].T
    gate, up = inner[..., : inner.shape[-1] // 2], inner[..., inner.shape[-1] // 2 :]
    return (nn.functional.silu(gate) * up) @ weights.down_proj[e].T


def plain_sum(moe: MoE, x: Tensor) -> Tensor:
    routing = moe.router(x)
    return sum(routing.weights[..., e : e + 1] * plain_expert(moe.experts, e, x) for e in range(N))


SELECTIONS: list[Selection] = [Dense(), TopK(1), TopK(3), Mass(0.7), Mass(0.9, cap=2), Threshold(0.3)]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_output_and_every_gradient_equal_the_plain_sum(
    selection: Selection, activation: Activation, backend: Any
) -> None:
    moe = layer(make_router(selection=selection, linear=True), activation=activation, backend=backend)
    x, direction = tokens(3, 7), tokens(3, 7) ** 2
    results = []
    for run in (moe, lambda x: plain_sum(moe, x)):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        (y * direction).sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in moe.parameters())])
    for ours, plain in zip(*results, strict=True):
        assert ours is not None
        # fp32 sums of a few dozen terms of order one, in another order.
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", [n for n in ROUTERS if n not in SLOT_ROUTERS])
@pytest.mark.parametrize("backend", ["reference", "grouped", TRITON])
def test_every_router_runs_through_the_layer(name: str, backend: Any) -> None:
    moe = layer(make_router(name), backend=backend)
    x = tokens(2, 9)
    torch.testing.assert_close(moe(x), plain_sum(moe, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "grouped", TRITON])
def test_soft_moe_runs_through_the_layer(backend: Any) -> None:
    moe = layer(make_router("soft_moe", slots=2), backend=backend)
    x = tokens(3, 6)
    y, routing = moe.run(x)
    assert routing.slots is not None
    expected = torch.zeros_like(x)
    for b in range(3):
        for e in range(N):
            for p in range(2):
                slot = routing.slots.to_slots[b, :, e, p] @ x[b]
                expected[b] += torch.outer(
                    routing.slots.from_slots[b, :, e, p], plain_expert(moe.experts, e, slot)
                )
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    poisoned = x.clone()
    poisoned[1, 2] = float("nan")
    y = moe(poisoned)
    assert y[1, 2].isnan().all()
    keep = torch.ones(3, 6, dtype=torch.bool)
    keep[1, 2] = False
    assert y[keep].isfinite().all()


def test_gradcheck_in_fp64() -> None:
    torch.manual_seed(0)
    moe = MoE(6, 4, 3, GrassmannRouter(6, 3, 2, selection=Mass(0.8, cap=2))).double()
    x = tokens(4, dtype=torch.float64)[:, :6].clone().requires_grad_()
    assert pick_backend("auto", x) == "reference"
    with pytest.raises(ValueError, match=r"backend 'grouped' needs 16 or 32 bit floats, got torch.float64"):
        pick_backend("grouped", x)
    frames = moe.router.get_parameter("frames")
    assert torch.autograd.gradcheck(lambda x, *_: moe(x), (x, frames, moe.experts.up, moe.experts.down_proj))


def test_no_tokens_empty_experts_and_dropped_tokens() -> None:
    moe = layer(make_router(selection=TopK(2)), backend="grouped")
    empty = torch.zeros(0, DIM, requires_grad=True)
    assert moe(empty).shape == (0, DIM)
    one = tokens(1)  # three of five experts get nothing
    torch.testing.assert_close(moe(one), plain_sum(moe, one), rtol=1e-4, atol=1e-5)
    # Switch drops what exceeds capacity: such a token leaves the layer as zero.
    switch = SwitchRouter(DIM, N, capacity_factor=0.5)
    moe = layer(switch, backend="grouped")
    y, routing = moe.run(tokens(20))
    dropped = ~routing.selected.any(-1)
    assert dropped.any()
    assert (y[dropped] == 0).all()
    assert (y[~dropped].abs().sum(-1) > 0).all()


def test_nan_token_touches_no_other() -> None:
    moe = layer(make_router(selection=TopK(2)), backend="grouped")
    x = tokens(12)
    clean = moe(x)
    x[5] = float("nan")
    y = moe(x)
    keep = torch.arange(12) != 5
    torch.testing.assert_close(y[keep], clean[keep], rtol=1e-5, atol=1e-6)
    assert y[5].isnan().all()


def test_bf16_layer_keeps_its_router_in_fp32() -> None:
    moe = layer(make_router(selection=TopK(2)), backend="grouped")
    expected = moe(tokens(64)).detach()
    moe = moe.bfloat16()
    assert moe.experts.down_proj.dtype == torch.bfloat16
    assert moe.router.get_parameter("frames").dtype == torch.float32
    y = moe(tokens(64).bfloat16()).detach()
    assert y.dtype == torch.bfloat16
    # bf16 carries 8 bits; tokens rounded to bf16 may also swap a near tie, so compare in norm.
    assert ((y.float() - expected).norm() / expected.norm()).item() < 2e-2


def test_repeated_runs_give_the_same_bits() -> None:
    moe = layer(make_router(selection=Mass(0.9, cap=3)), backend="grouped")
    grads = []
    for _ in range(2):
        moe.zero_grad()
        x = tokens(40).requires_grad_()
        moe(x).square().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in moe.parameters() if p.grad is not None)])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_shared_experts_are_added_with_weight_one() -> None:
    moe = layer(make_router(selection=TopK(1)), shared_experts=2)
    assert moe.shared is not None
    assert moe.shared.down_proj.shape == (1, DIM, 2 * HIDDEN)
    x = tokens(6)
    expected = plain_sum(moe, x) + plain_expert(moe.shared, 0, x)
    torch.testing.assert_close(moe(x), expected, rtol=1e-4, atol=1e-5)


def test_compiles_whole_and_takes_a_new_alpha_without_recompiling() -> None:
    from torch._dynamo.testing import CompileCounter

    # bf16: the shape function of grouped_mm in torch 2.11–2.13 refuses fp32, which its kernel takes.
    moe = layer(make_router(selection=Mass(0.9, cap=3)), backend="grouped").bfloat16()
    counter = CompileCounter()
    compiled = torch.compile(moe, backend=counter, fullgraph=True)
    x, outputs = tokens(32).bfloat16(), []
    for alpha in (1.0, 3.0, 0.3):
        moe.router.alpha = alpha
        outputs.append(compiled(x))
        torch.testing.assert_close(outputs[-1], moe(x), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    assert not torch.allclose(outputs[0], outputs[1])


def test_exported_for_any_number_of_tokens() -> None:
    moe = layer(make_router(selection=Mass(0.9, cap=3)), backend="grouped").eval()
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(moe, (tokens(2, 16),), dynamic_shapes=({1: length},)).module()
    for alpha, count in ((1.0, 3), (3.0, 33)):
        moe.router.alpha = alpha  # the exported program shares it
        x = tokens(2, count)
        torch.testing.assert_close(exported(x), moe(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [("switch", {"capacity_factor": 0.7}), ("softmax", {"load_loss": 0.01, "z_loss": 0.001})],
    ids=["capacity", "losses"],
)
def test_exported_with_numbers_that_depend_on_the_number_of_tokens(
    name: str, options: dict[str, Any]
) -> None:
    """Capacities and means over tokens. Before, the example's number of tokens was fixed by `len`."""
    moe = layer(make_router(name, **options), backend="grouped").eval()
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(moe, (tokens(2, 16),), dynamic_shapes=({1: length},)).module()
    for count in (3, 33):
        x = tokens(2, count)
        torch.testing.assert_close(exported(x), moe(x), rtol=1e-5, atol=1e-6)


def test_default_router_and_mistakes() -> None:
    moe = MoE(DIM, HIDDEN, 4)
    assert isinstance(moe.router, GrassmannRouter)
    assert moe.router.rank == 4
    assert moe.router.selection == TopK(2)
    with pytest.raises(ValueError, match=r"router must be built for .* \(16, 4\), got \(16, 5\)"):
        MoE(DIM, HIDDEN, 4, make_router())
    with pytest.raises(ValueError, match=r"backend must be one of .* got 'cuda'"):
        MoE(DIM, HIDDEN, 4, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation must be one of"):
        ExpertWeights(4, 4, 2, "relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden must be an integer >= 1, got 0"):
        MoE(DIM, 0, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"router": "x"}, "router must be a Router, such as .* got 'x'"),
        ({"router": GrassmannRouter}, "router must be a Router"),
        ({"selection": "topk"}, "selection must be a policy such as .* got 'topk'"),
        ({"selection": TopK}, "selection must be a policy"),
        ({"experts": 3}, "experts must be ExpertWeights or None, got 3"),
        ({"num_experts": 0}, "num_experts must be an integer >= 1, got 0"),
        ({"dim": "16"}, "dim must be an integer >= 1, got '16'"),
        ({"shared_experts": -1}, "shared_experts must be an integer >= 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    """These once ended in an AttributeError, a ZeroDivisionError or a TypeError."""
    with pytest.raises(ValueError, match=message):
        MoE(**({"dim": DIM, "hidden": HIDDEN, "num_experts": 4} | arguments))


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_selection_never_exceeds_its_own_bound(selection: Selection) -> None:
    g = torch.Generator().manual_seed(0)
    probs = torch.softmax(3 * torch.randn(2000, N, generator=g), -1)
    probs = torch.cat([probs, torch.full((1, N), 1 / N), torch.eye(N)])
    count = selection(probs).sum(-1)
    assert int(count.max()) <= selection.max_experts(N)
    assert selection.max_experts(N) <= N


def test_selection_argument() -> None:
    assert MoE(DIM, HIDDEN, N, selection=Mass(0.8)).router.selection == Mass(0.8)
    for name in ("grassmann", "softmax", "vmf"):
        moe = layer(make_router(name), selection=Mass(0.8))
        assert moe.router.selection == Mass(0.8)
        assert torch.equal(moe.run(tokens(9))[1].selected, Mass(0.8)(moe.router(tokens(9)).probs))
    for name in ("switch", "expert_choice", "hash", *SLOT_ROUTERS):
        router = make_router(name)
        before = router.selection
        with pytest.raises(ValueError, match=r"selection must be None for a .*Router, which makes its own"):
            layer(router, selection=Mass(0.8))
        with pytest.raises(ValueError, match=r"selection must be None for a .*Router, which makes its own"):
            router.selection = Mass(0.8)
        assert router.selection == before


# ------------------------------------------------------------------------------------------------ truncation


def dense_and_routed(moe: MoE, x: Tensor, routing: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The dense sum, the routed one, and the outputs of all experts, by the plain formula."""
    f = torch.stack([plain_expert(moe.experts, e, x) for e in range(moe.router.num_experts)], dim=-2)
    return (routing.probs.unsqueeze(-1) * f).sum(-2), (routing.weights.unsqueeze(-1) * f).sum(-2), f


@given(
    activation=st.sampled_from(["swiglu", "gelu"]),
    selection=st.one_of(
        st.builds(Mass, st.floats(0.05, 1.0), st.sampled_from([None, 1, 3]), st.booleans()),
        st.builds(TopK, st.integers(1, N), st.booleans()),
        st.builds(Threshold, st.floats(0.02, 0.9), st.booleans()),
    ),
    shared=st.integers(0, 1),
    decades=st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(-1, 1)),
    seed=st.integers(0, 2**32 - 1),
)
def test_truncation_bound_holds_for_every_token(
    activation: Activation,
    selection: Any,
    shared: int,
    decades: tuple[float, float, float],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    router = GrassmannRouter(DIM, N, 3, alpha=10 ** decades[2])
    options: dict[str, Any] = {"activation": activation, "shared_experts": shared, "selection": selection}
    moe = MoE(DIM, HIDDEN, N, router, **options).double()
    x = torch.randn(3, 8, DIM, dtype=torch.float64) * 10 ** decades[1]
    with torch.no_grad():
        for weight in moe.experts.parameters():
            weight *= 10 ** decades[0] * torch.rand(N, 1, 1)
        y, routing = moe.run(x)
        dense, routed, f = dense_and_routed(moe, x, routing)
    error = (dense - routed).norm(dim=-1)
    tolerance = 1e-13 * f.norm(dim=-1).amax(-1)  # the rounding of the sums on both sides
    found = moe.truncation(x, routing, y, output_gains(moe.experts))
    assert found.dropped.shape == found.bound.shape == found.holds.shape == (3, 8)
    assert bool(found.holds.all())
    assert bool((error <= found.bound + tolerance).all())
    # Nothing dropped, nothing lost; and a bound of zero says that nothing was dropped.
    assert torch.equal(found.bound == 0, found.dropped == 0)
    assert bool((found.dropped[routing.selected.all(-1)] == 0).all())
    kept = torch.where(routing.selected, routing.probs, 0.0).sum(-1)
    torch.testing.assert_close(found.dropped, 1 - kept, rtol=0, atol=1e-12)
    if isinstance(selection, Mass) and selection.cap is None:
        assert float(found.dropped.max()) < 1 - selection.tau + 1e-12
    alone = moe.truncation(x)
    torch.testing.assert_close(alone.bound, found.bound, rtol=1e-6, atol=0)
    exact = moe.truncation(x, exact=True)
    assert bool(((exact.bound - error).abs() <= tolerance).all())
    assert bool((exact.bound[exact.dropped == 0] == 0).all())
    if selection.renormalize:
        sharp = truncation_error_bound(routing.probs, routing.selected, outputs=f).bound
        assert bool((exact.bound <= sharp * (1 + 1e-7) + tolerance).all())


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_truncation_bound_is_nearly_attained(activation: Activation, renormalize: bool) -> None:
    """Kept and dropped experts point in opposite directions at full gain: a bound 0.1 % smaller would be wrong."""
    moe = layer(
        make_router(), activation=activation, selection=TopK(2, renormalize), shared_experts=1
    ).double()
    direction, probe = tokens(2, dtype=torch.float64)
    x = 40 * probe / probe.norm()
    routing = moe.router(x)
    with torch.no_grad():
        moe.experts.up.zero_()
        moe.experts.down_proj.zero_()
        moe.experts.up[:, ::HIDDEN] = probe
        for e in range(N):
            moe.experts.down_proj[e, :, 0] = direction if routing.selected[e] else -direction
        y, routing = moe.run(x)
        dense, routed, _ = dense_and_routed(moe, x, routing)
    error, found = float((dense - routed).norm()), moe.truncation(x, routing, y)
    assert 0.1 < float(found.dropped) < 0.9
    assert 0.999 * float(found.bound) < error <= float(found.bound)


def test_truncation_in_bf16_with_shared_experts() -> None:
    moe = layer(make_router(selection=Mass(0.6)), shared_experts=2).bfloat16()
    with torch.no_grad():
        for weight in moe.shared.parameters():  # type: ignore[union-attr]
            weight *= 10  # most of the output: subtracting it leaves little
    x = tokens(50).bfloat16()
    y, routing = moe.run(x)
    given, alone = moe.truncation(x, routing, y), moe.truncation(x, routing)
    assert given.bound.dtype == torch.float32
    assert bool((given.bound >= alone.bound * (1 - 1e-6)).all())  # the subtraction rounds up
    dense, routed, _ = dense_and_routed(moe.float(), x.float(), routing)
    assert bool(((dense - routed).norm(dim=-1) <= alone.bound).all())


@pytest.mark.parametrize("name", [n for n in ROUTERS if n not in SLOT_ROUTERS])
def test_truncation_counts_nothing_and_fits_every_router(name: str) -> None:
    balanced = name != "grassmann" and ROUTERS[name].reads_prior
    moe = layer(make_router(name, balance=True) if balanced else make_router(name))
    x = tokens(40)
    with torch.no_grad():
        y, routing = moe.run(x)
        before = moe.router.counter.sums.clone(), moe.router.prior_sums.clone()
        found, again = moe.truncation(x), moe.truncation(x, routing, y)
        assert torch.equal(moe.router.counter.sums, before[0])
        assert torch.equal(moe.router.prior_sums, before[1])
        dense, routed, _ = dense_and_routed(moe, x, routing)
    torch.testing.assert_close(found.bound, again.bound)
    assert not moe.truncation(x).bound.requires_grad
    assert not moe.router.counter.paused
    # fp32 sums on both sides.
    assert bool(((dense - routed).norm(dim=-1) <= found.bound + 1e-5).all())


def test_truncation_of_bad_tokens_and_mistakes() -> None:
    moe = layer(make_router(selection=TopK(2)))
    x = tokens(6)
    clean = moe.truncation(x)
    x[2, 3], x[4] = float("nan"), 1e30  # 1e60 does not fit into fp32
    found = moe.truncation(x)
    good = torch.tensor([True, True, False, True, False, True])
    assert torch.equal(found.holds, good)
    assert bool(found.bound[~good].isinf().all())
    torch.testing.assert_close(found.bound[good], clean.bound[good])
    assert moe.truncation(x[:0]).bound.shape == (0,)
    with pytest.raises(ValueError, match="y must come with the routing"):
        moe.truncation(x, y=moe(x))
    with pytest.raises(ValueError, match=r"gain_N must have shape \(5,\), got \(4,\)"):
        moe.truncation(x, gain_N=torch.ones(4))
    with pytest.raises(ValueError, match="Soft MoE has none"):
        layer(make_router("soft_moe")).truncation(tokens(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_layer_compiles_whole_and_takes_a_new_alpha(dtype: torch.dtype) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    moe = layer(make_router(selection=Mass(0.8, cap=3)), backend="grouped")
    moe.experts.to(dtype)
    compiled = torch.compile(moe, fullgraph=True, backend=counter)
    parameters = list(moe.parameters())
    for alpha in (1.0, 2.5):
        moe.router.alpha = alpha
        results = []
        for run in (compiled, moe):
            x = tokens(3, 7, dtype=dtype).requires_grad_()
            y = run(x)
            results.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *parameters])])
        for a, b in zip(*results, strict=True):
            # The compiler's order of sums; in bf16 an intermediate may round the other way.
            assert (a - b).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * b.norm()
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_under_autocast_the_experts_compute_as_a_linear_layer_would(backend: Any) -> None:
    moe = layer(make_router(selection=TopK(2)), backend=backend, shared_experts=1)
    x = tokens(3, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, routing = moe.run(x)
        assert y.dtype == nn.Linear(DIM, 2)(x).dtype == torch.bfloat16
    # The gate computes in fp32, on the tokens a model served in bf16 would give it.
    assert routing.probs.dtype == torch.float32
    assert torch.equal(routing.probs, moe.router(x.bfloat16()).probs)
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in moe.parameters())
    # bf16 keeps eight bits; a few roundings in a row.
    exact = moe(x.bfloat16().float())  # the same tokens, for at a near tie another expert would be chosen
    assert (y.float() - exact).norm() <= 2e-2 * exact.norm()


def test_autocast_leaves_fp64_alone() -> None:
    """As a linear layer does."""
    moe = layer(make_router(selection=TopK(2)), shared_experts=1).double()
    x = tokens(3, 7).double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = moe(x)
        assert y.dtype == nn.Linear(DIM, 2).double()(x).dtype == torch.float64
    assert torch.equal(y, moe(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_reference_computes_tokens_of_any_dtype(dtype: torch.dtype) -> None:
    layer = MoE(16, 8, 4, backend="reference")
    x = torch.randn(3, 16)
    y = layer(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), layer(x), rtol=0.1, atol=0.05)
