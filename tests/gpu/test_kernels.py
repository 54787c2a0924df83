"""The kernels as compiled, on a CUDA device: the layer against the fp64 reference, determinism, no waiting, graphs.

Kernels are compiled for each shape, so most tests share one shape; tests/kernels covers the rest in the interpreter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from waiting import no_sync

from grmoe.experts import Dispatch
from grmoe.experts.reference import reference_experts
from grmoe.kernels import runtime
from grmoe.layer import MoE
from grmoe.routing import (
    AtLeast,
    Dense,
    GrassmannRouter,
    Mass,
    Router,
    Selection,
    SoftmaxRouter,
    Threshold,
    TopK,
)

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"
# In norm, against fp64 on the same rounded tokens and weights. Rounding to bf16 (2^-9) happens to frames, hidden
# values, their gradients and the results; fp16 has three bits more; fp32 GEMMs take three tf32 products.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Shape:
    T: int
    D: int
    N: int
    I: int
    k: int = 2


SMALL = Shape(1500, 256, 8, 352)
ODD = Shape(777, 768, 5, 520, 3)
NARROW = Shape(1500, 256, 8, 32)  # fewer values in two rows than threads in a program
LARGE = Shape(4096, 2048, 64, 1024, 8)
SELECTIONS: list[Selection] = [
    Dense(),
    TopK(1, renormalize=False),
    TopK(2, renormalize=True),
    Mass(0.7),
    Mass(0.9, cap=3),
    AtLeast(0.2, cap=3),
    Threshold(0.1, renormalize=False),
]


@pytest.fixture(autouse=True)
def nothing_fell_back() -> Iterator[None]:
    """A kernel that does not compile leaves a warning and PyTorch in its place: here that is a failure."""
    runtime._failed.clear()
    yield
    failed = set(runtime._failed)
    runtime._failed.clear()
    assert not failed


def make(
    s: Shape = SMALL,
    dtype: torch.dtype = torch.bfloat16,
    router: str = "grassmann",
    selection: Selection | None = None,
    **options: Any,
) -> MoE:
    """Uneven loads through the prior; the last expert never leads and, unless the layer is dense, stays idle."""
    torch.manual_seed(0)
    chosen = selection if selection is not None else TopK(s.k)
    if router == "grassmann":
        gate: Router = GrassmannRouter(s.D, s.N, max(1, s.D // s.N), selection=chosen)
    else:
        gate = SoftmaxRouter(s.D, s.N, top_k=s.k, selection=chosen)
    gate.log_prior.copy_(torch.linspace(-1, 1, s.N))
    gate.log_prior[-1] = -50.0
    with torch.device(DEVICE):  # the large layer has 400 million weights
        moe = MoE(s.D, s.I, s.N, gate, **{"backend": "triton", **options})
    return moe.to(device=DEVICE, dtype=dtype)


def tokens(
    s: Shape = SMALL, dtype: torch.dtype = torch.bfloat16, seed: int = 0, T: int | None = None
) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(s.T if T is None else T, s.D, generator=g).to(DEVICE, dtype)


def upstream(x: Tensor) -> Tensor:
    """The gradient that arrives: of order one, fixed."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(x.device, x.dtype)


def run(moe: MoE, x: Tensor, through: Any = None) -> dict[str, Tensor]:
    """Output, gradient of the tokens and of every parameter; `through` runs the layer otherwise."""
    moe.zero_grad(set_to_none=True)
    leaf = x.detach().requires_grad_()
    y = (moe if through is None else through)(leaf)
    y.backward(upstream(x))
    assert leaf.grad is not None
    grads = {name: p.grad for name, p in moe.named_parameters()}
    assert all(g is not None for g in grads.values())
    return {"y": y.detach(), "x": leaf.grad, **grads}


def reference(moe: MoE, x: Tensor, selected: Tensor) -> dict[str, Tensor]:
    """The same in fp64 by torch, for a given selection: near ties may fall otherwise after rounding."""
    exact = copy.deepcopy(moe).double()
    exact.zero_grad(set_to_none=True)
    leaf = x.double().requires_grad_()
    probs = torch.softmax(exact.router.gate(leaf, None), -1)
    weights = torch.where(selected, probs, 0.0)
    if exact.router.selection.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    y = reference_experts(leaf, Dispatch.build(weights, selected, exact.router.max_experts()), exact.experts)
    y.backward(upstream(x).double())
    assert leaf.grad is not None
    return {"y": y.detach(), "x": leaf.grad, **{n: p.grad for n, p in exact.named_parameters()}}


def compare(moe: MoE, x: Tensor) -> None:
    with torch.no_grad():
        routing = moe.router(x)
    ours, exact = run(moe, x), reference(moe, x, routing.selected)
    errors = {n: float((ours[n].double() - exact[n]).norm() / exact[n].norm()) for n in exact}
    assert max(errors.values()) <= TOLERANCE[x.dtype], errors  # also fails for NaN
    load = routing.selected.sum(0)
    if not moe.router.selection.dense:
        assert int(load[-1]) == 0
        assert int(load.max()) > 2 * int(load[:-1].min())
        for name in ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj"):
            assert name not in ours or not ours[name][-1].any()


# ------------------------------------------------------------------------------------------------ numbers


CASES = [
    *[(SMALL, dtype) for dtype in TOLERANCE],
    (ODD, torch.bfloat16),
    (ODD, torch.float32),
    (NARROW, torch.bfloat16),
    (LARGE, torch.bfloat16),
]


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_output_and_every_gradient(shape: Shape, dtype: torch.dtype) -> None:
    compare(make(shape, dtype), tokens(shape, dtype))


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_every_selection(selection: Selection) -> None:
    moe, x = make(selection=selection), tokens()
    compare(moe, x)
    with torch.no_grad():
        routing = moe.router(x)
    # Torch's policy on the kernel's gate; a mass within rounding of its limit may fall either way.
    other = selection(routing.probs) != routing.selected
    assert float(other.any(-1).float().mean()) < 2e-3


@pytest.mark.parametrize("router", ["grassmann", "softmax"])
def test_renormalised_weights_where_a_bias_picks_vanished_gates(router: str) -> None:
    """Gates of e^-130 are zero in fp32, and none is in fp64."""
    moe, x = make(router=router, selection=TopK(2, renormalize=True)), tokens()
    moe.router.log_prior[-2:] = -130.0
    moe.router.budget.biased = True
    moe.router.budget.set_bias([0.0] * (SMALL.N - 2) + [500.0] * 2)
    with torch.no_grad():
        routing = moe.router(x)
    assert not routing.probs[:, -2:].any()
    assert int(routing.selected[:, -2:].sum()) == int(routing.selected.sum()) == 2 * len(x)
    ours, exact = run(moe, x), reference(moe, x, routing.selected)
    errors = {n: float((ours[n].double() - exact[n]).norm() / exact[n].norm()) for n in exact}
    assert max(errors.values()) <= TOLERANCE[x.dtype], errors  # also fails for NaN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gelu(dtype: torch.dtype) -> None:
    compare(make(dtype=dtype, activation="gelu"), tokens(dtype=dtype))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_linear_gate(dtype: torch.dtype) -> None:
    compare(make(dtype=dtype, router="softmax"), tokens(dtype=dtype))


# (tokens, width, experts, rank). A race in the pipeline of the kernel's loads shows as an error that moves.
@pytest.mark.parametrize("shape", [(16384, 2048, 16, 64), (16384, 768, 8, 48), (4096, 2560, 32, 64)], ids=str)
def test_logits_over_many_seeds(shape: tuple[int, int, int, int]) -> None:
    T, D, N, K = shape
    torch.manual_seed(0)
    router = GrassmannRouter(D, N, K, selection=TopK(2)).to(DEVICE).eval()
    router.backend = "triton"
    exact = copy.deepcopy(router)
    exact.backend = "reference"
    with torch.no_grad():
        exact.frames.copy_(router.frames.bfloat16())  # as the kernel rounds them; the rest is fp32
        for seed in range(20):
            g = torch.Generator(DEVICE).manual_seed(seed)
            x = torch.randn(T, D, generator=g, device=DEVICE).bfloat16()
            logits = router(x).logits
            # Logits of a few units, fp32 sums of some thousand terms: 1e-5.
            assert float((logits - exact(x).logits).abs().max()) < 1e-4, seed
            assert torch.equal(router(x).logits, logits), seed


def test_off_alignment() -> None:
    """A view that starts one element into its storage: the copy engine wants addresses of whole 16 bytes."""
    moe, x = make(), tokens()
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    assert shifted.data_ptr() % 16
    assert shifted.is_contiguous()
    plain, ours = run(moe, x), run(moe, shifted)
    assert all(torch.equal(plain[name], ours[name]) for name in plain)


def test_nan_token_touches_no_other() -> None:
    moe, x = make(), tokens()
    clean = run(moe, x)
    x[700] = float("nan")
    ours, others = run(moe, x), torch.arange(len(x), device=DEVICE) != 700
    for name in ("y", "x"):
        assert bool(ours[name][700].isnan().all())
        assert torch.equal(ours[name][others], clean[name][others])


@pytest.mark.parametrize("T", [0, 1, 129])
def test_few_tokens(T: int) -> None:
    moe, x = make(), tokens(T=T)
    ours = run(moe, x)
    assert ours["y"].shape == (T, SMALL.D)
    with torch.no_grad():
        selected = moe.router(x).selected
    exact = reference(moe, x, selected)
    for name in ("y", "x") if T else ():
        assert float((ours[name] - exact[name]).norm() / exact[name].norm()) <= TOLERANCE[x.dtype]


# ------------------------------------------------------------------------------------------------ behaviour


def test_the_same_bits_every_time() -> None:
    """Five runs, three of them beside other work on the device."""
    moe, x = make(selection=Mass(0.9, cap=3)), tokens()
    first = run(moe, x)
    side, load = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for repeat in range(5):
        if repeat >= 2:
            with torch.cuda.stream(side):
                for _ in range(10):
                    load @ load
        again = run(moe, x)
        assert all(torch.equal(first[name], again[name]) for name in first), repeat
    torch.cuda.synchronize()


def test_a_kept_graph_gives_the_same_gradients_again() -> None:
    """The last backward writes over the pre-activations, an earlier one must not."""
    moe, x = make(), tokens().requires_grad_()
    y, leaves, direction = moe(x), [x, *moe.parameters()], upstream(x)
    runs = [torch.autograd.grad(y, leaves, direction, retain_graph=keep) for keep in (True, True, False)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    moe, x = make(dtype=dtype), tokens(dtype=dtype)
    direction = upstream(x)
    moe(x.clone().requires_grad_()).backward(direction)  # compiles, and cuBLAS sets itself up
    moe.eval()(x)
    leaf = x.clone().requires_grad_()
    with no_sync():
        moe.train()(leaf).backward(direction)
        moe.router.update_prior(0.01)
        moe.router.alpha = 1.3
        with torch.no_grad():
            moe.eval()(x)


def test_graph_replays_follow_every_change() -> None:
    moe, x = make().eval(), tokens()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                moe(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = moe(x)

        def check() -> Tensor:
            graph.replay()
            assert torch.equal(y, moe(x))
            return y.clone()

        seen = [check()]
        moe.router.alpha = 2.5
        seen.append(check())
        x.copy_(tokens(seed=1))
        seen.append(check())
        moe.router.log_prior.copy_(moe.router.log_prior.flip(0))
        seen.append(check())
        frames = moe.router.get_parameter("frames")
        frames.copy_(frames.flip(0))
        seen.append(check())
    for before, after in pairwise(seen):
        assert not torch.allclose(before, after)


def test_compiled_whole_it_equals_eager_and_takes_a_new_alpha() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    moe, x = make(), tokens()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(moe, fullgraph=True, backend=counter)
    outputs = []
    for alpha in (1.0, 2.5, 0.4):
        moe.router.alpha = alpha
        ours, eager = run(moe, x, compiled), run(moe, x)
        for name in eager:
            # The same kernels; what the compiler fuses around them may round once more.
            error = float((ours[name].double() - eager[name].double()).norm() / eager[name].double().norm())
            assert error <= 1e-3, name
        outputs.append(ours["y"])
    assert counter.frame_count == 1
    assert not torch.allclose(outputs[0], outputs[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit(reentrant: bool) -> None:
    moe, x = make(), tokens()
    plain = run(moe, x)
    again = run(moe, x, lambda t: checkpoint(moe, t, use_reentrant=reentrant))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def peak(moe: MoE, x: Tensor) -> int:
    """Bytes that forward and backward need beyond what is there before."""
    direction = upstream(x)
    for measured in (False, True):
        moe.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        moe(leaf).backward(direction)
        torch.cuda.synchronize()
        if measured:
            return torch.cuda.max_memory_allocated() - before
    raise AssertionError


def test_needs_no_more_memory_than_grouped_gemms() -> None:
    x = tokens(T=16384)
    ours, grouped = (peak(make(backend=backend), x) for backend in ("triton", "grouped"))
    assert ours <= grouped


def test_pre_activations_and_their_gradient_share_their_memory() -> None:
    """The largest tensors of the layer: with them side by side the sum below is exceeded by a third."""
    s, x = SMALL, tokens(T=16384)
    rows, size = 16384 * s.k, x.element_size()
    pre_activations, hidden, per_row = rows * 2 * s.I * size, rows * s.I * size, rows * s.D * size
    weights = 3 * s.N * s.I * s.D * size
    most = pre_activations + hidden + per_row + 2 * x.nbytes + weights
    assert peak(make(), x) <= 1.1 * most


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_on_another_device_than_the_current_one() -> None:
    moe, x = make(), tokens()
    here = run(moe, x)
    assert torch.cuda.current_device() == 0
    there = run(copy.deepcopy(moe).to("cuda:1"), x.to("cuda:1"))
    again = run(moe, x)
    for name in here:
        assert there[name].device.index == 1
        assert torch.equal(here[name], there[name].to("cuda:0"))
        assert torch.equal(here[name], again[name])


@pytest.mark.parametrize("vocabulary", [8192, 50257])
def test_head_and_loss_in_one(vocabulary: int) -> None:
    """Against fp64 from the same bf16 inputs: logits and their gradients are rounded to eight bits."""
    from grmoe.head import next_token_loss, next_token_loss_reference

    torch.manual_seed(0)
    x = torch.randn(3000, 256, device="cuda").bfloat16()
    weight = (torch.randn(vocabulary, 256, device="cuda") / 16).bfloat16().float()
    target = torch.randint(vocabulary, (3000,), device="cuda")
    target[::7] = -100
    count = (target != -100).sum()
    results = []
    for function, kinds in (
        (next_token_loss, (torch.bfloat16, torch.float32)),
        (next_token_loss_reference, (torch.float64, torch.float64)),
    ):
        leaves = [
            t.detach().clone().to(kind).requires_grad_() for t, kind in zip((x, weight), kinds, strict=True)
        ]
        loss = function(*leaves, target, count)
        loss.backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    assert not runtime.failures()
    for got, wanted in zip(*results, strict=True):
        assert (got.double() - wanted).norm() <= 1e-2 * wanted.norm()
    again = [t.detach().clone().requires_grad_() for t in (x, weight)]
    next_token_loss(*again, target, count).backward()
    assert all(torch.equal(a.grad, b) for a, b in zip(again, results[0][1:], strict=True))


@pytest.mark.parametrize("vocabulary", [8192, 50257])
def test_the_losses_of_tokens_in_parts(vocabulary: int) -> None:
    """Against fp64 from the same bf16 inputs, with nothing that waits. 50257 words: three parts."""
    from grmoe.head import next_token_loss, token_losses, token_losses_reference

    torch.manual_seed(0)
    x = torch.randn(3000, 256, device="cuda").bfloat16()
    weight = (torch.randn(vocabulary, 256, device="cuda") / 16).bfloat16()
    target = torch.randint(vocabulary, (3000,), device="cuda")
    target[::7] = -100
    first = token_losses(x, weight, target)
    with no_sync():
        found = token_losses(x, weight, target)
    assert not runtime.failures()
    assert torch.equal(found, first)
    wanted = token_losses_reference(x.double(), weight.double(), target)
    assert (found.double() - wanted).norm() <= 1e-2 * wanted.norm()
    whole = next_token_loss(x, weight, target, (target != -100).sum())
    torch.testing.assert_close(found.sum() / (target != -100).sum(), whole, rtol=1e-4, atol=0)


def test_a_training_step_in_cuda_graphs_is_the_eager_one() -> None:
    """A small model, compiled into graphs: losses of ten steps as without, but for bf16's rounding."""
    from grmoe.model import GrmoeConfig, GrmoeForCausalLM

    config = GrmoeConfig(
        vocab_size=1000,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_experts=8,
        router_rank=32,
    )
    ids = torch.randint(1000, (8, 129), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    losses = []
    for mode in (None, "reduce-overhead"):
        torch.manual_seed(0)
        model = GrmoeForCausalLM(config).cuda().train()
        forward = model if mode is None else torch.compile(model, dynamic=False, mode=mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        seen = []
        for _ in range(10):
            with torch.autocast("cuda", torch.bfloat16):
                targets = ids[:, 1:].contiguous()
                out = forward(
                    input_ids=ids[:, :-1],
                    labels=targets,
                    shift_labels=targets,
                    use_cache=False,
                    skip_logits=True,
                )
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.update_priors(0.01)
            seen.append(float(out.loss.detach()))
        losses.append(seen)
        metrics = model.routing_metrics()[0]
        assert metrics.tokens == 10 * 8 * 128
    assert losses[0][-1] < losses[0][0] - 0.1
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=5e-3, atol=0)
