"""Where kernels cannot run: one warning and PyTorch's result, or a message that says what is missing."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.compiler.errors import CompilationError

from grmoe.experts import pick_backend
from grmoe.kernels import dispatch as dispatch_module
from grmoe.kernels import experts as experts_module
from grmoe.kernels import gate as gate_module
from grmoe.kernels import metrics as metrics_module
from grmoe.kernels import runtime
from grmoe.layer import MoE
from grmoe.routing import GrassmannRouter, Mass, Router, SoftmaxRouter, TopK

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def raiser(error: BaseException, module: str = "anywhere") -> Callable[..., Any]:
    """A function that raises from within a module of that name."""
    space = types.ModuleType(module)
    vars(space)["error"] = error
    exec("def fail(*args, **kwargs):\n    raise error", vars(space))
    return vars(space)["fail"]


def compile_errors() -> list[Callable[..., Any]]:
    class PTXASError(Exception):
        pass

    return [
        raiser(CompilationError("def f(): pass", types.SimpleNamespace(lineno=1, col_offset=0), "no")),
        raiser(RuntimeError("PassManager::run failed"), "triton.compiler.compiler"),
        raiser(RuntimeError("Internal Triton PTX codegen error"), "triton.backends.nvidia.compiler"),
        raiser(FileNotFoundError("no C compiler"), "triton.runtime.build"),
        raiser(triton.runtime.errors.OutOfResources(300000, 232448, "shared memory")),
        raiser(PTXASError("ptxas fatal")),
        raiser(ImportError("cannot import name 'tma'")),
    ]


@pytest.mark.parametrize("kind", range(7))
def test_what_does_not_compile_is_reported_once(kind: int) -> None:
    fail = compile_errors()[kind]
    with pytest.warns(
        RuntimeWarning, match="the kernel 'k' did not compile; a slower path replaces it"
    ) as seen:
        assert runtime.attempt("k", fail, lambda: "torch") == "torch"
    assert len(seen) == 1
    assert runtime.has_failed("k")
    assert not runtime.has_failed("another")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime.attempt("k", lambda: pytest.fail("tried again"), lambda: "torch") == "torch"
        assert runtime.attempt("another", lambda: "kernel", lambda: "torch") == "kernel"


@pytest.mark.parametrize(
    "fail",
    [
        raiser(ValueError("a mistake of the caller")),
        raiser(torch.OutOfMemoryError("CUDA out of memory")),
        raiser(torch.OutOfMemoryError("CUDA out of memory"), "triton.compiler.compiler"),
        raiser(KeyboardInterrupt(), "triton.compiler.compiler"),
        pytest.param(
            raiser(
                RuntimeError("Triton Error [CUDA]: an illegal memory access"), "triton.backends.nvidia.driver"
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:the kernel")
def test_other_errors_pass_through(fail: Callable[..., Any]) -> None:
    with pytest.raises((ValueError, RuntimeError, KeyboardInterrupt)):
        runtime.attempt("k", fail, lambda: "torch")
    assert not runtime.has_failed("k")


def tokens() -> torch.Tensor:
    return torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))


def make(backend: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(16, 8, 5, GrassmannRouter(16, 5, 3, selection=TopK(2)), backend=backend)


BROKEN = RuntimeError("PassManager::run failed")
PLACES: list[Any] = [
    (gate_module, "gate"),
    (metrics_module, "metrics"),
    (experts_module, "experts"),
    pytest.param(
        *(dispatch_module, "dispatch"),
    ),
]


@pytest.mark.parametrize(("module", "name"), PLACES, ids=lambda p: p if isinstance(p, str) else "")
@pytest.mark.filterwarnings("ignore:the kernel")
def test_layer_falls_back(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """One kernel after another does not compile: the result stays, gradients and metrics included."""
    monkeypatch.setattr(
        module, "launch" if hasattr(module, "launch") else "_forward", raiser(BROKEN, "triton.compiler.x")
    )
    ours, plain = make("triton"), make("reference")
    results = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for moe in (ours, plain):
            for _ in range(2):
                moe.zero_grad()
                x = tokens().requires_grad_()
                y = moe(x)
                y.square().sum().backward()
            grads = [p.grad for p in moe.parameters()]
            results.append([y.detach(), x.grad, *grads, moe.router.counter.sums, moe.router.prior_sums])
    told = [w for w in seen if "did not compile" in str(w.message)]
    assert len(told) == 1
    assert f"kernel '{name}' did not compile" in str(told[0].message)
    assert told[0].category is RuntimeWarning
    for a, b in zip(*results, strict=True):
        # fp32 on both sides, sums in another order.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.filterwarnings("ignore:the kernel")
def test_router_falls_back_in_eval_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where packing is what does not compile."""
    monkeypatch.setattr(gate_module, "launch", raiser(BROKEN, "triton.compiler.x"))
    ours, plain = make("triton").eval().router, make("reference").eval().router
    for _ in range(2):
        assert torch.equal(ours(tokens()).logits, plain(tokens()).logits)
    assert runtime._failed == {"gate"}


def test_ordinary_errors_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "_forward", raiser(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        make("triton")(tokens())
    monkeypatch.setattr(gate_module, "launch", raiser(ValueError("a bug of ours")))
    with pytest.raises(ValueError, match="a bug of ours"):
        make("triton")(tokens())
    assert not runtime._failed


NEEDS = r"backend 'triton' needs CUDA .*16 or 32 bit floats, got "


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])  # bf16: in the interpreter
def test_backend_that_cannot_run_says_what_it_needs(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=NEEDS + f"{dtype} on cpu"):
        pick_backend("triton", torch.zeros(2, 16, dtype=dtype))
    assert pick_backend("auto", torch.zeros(2, 16, dtype=dtype)) in ("grouped", "reference")


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("backend", ["grouped", "triton"])
@pytest.mark.parametrize(("dim", "hidden"), [(18, 8), (16, 6), (17, 5)])
def test_odd_widths(dim: int, hidden: int, backend: Any, activation: Any) -> None:
    """Rows that are no whole 16 bytes take the same kernels as others: output and gradients of the loop."""
    torch.manual_seed(0)
    moe = MoE(dim, hidden, 3, selection=TopK(2), activation=activation, backend=backend)
    x = torch.randn(7, dim)
    results = []
    for name in (backend, "reference"):
        moe.use_backend(name)
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        y = moe(leaf)
        y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in moe.parameters())])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_backend_without_a_device_or_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 16)
    assert pick_backend("triton", x) == "triton"
    assert pick_backend("auto", x) == "grouped"  # never the interpreter by itself
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    with pytest.raises(ValueError, match=NEEDS + "torch.float32 on cpu"):
        pick_backend("triton", x)
    monkeypatch.setattr(runtime, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="backend 'triton' needs Triton; install with: pip install triton"):
        pick_backend("triton", x)
    assert pick_backend("auto", x) == "grouped"


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(
    "router",
    [
        GrassmannRouter(16, 5, 3, selection=Mass(0.8, cap=3), alpha=1.3),
        GrassmannRouter(
            16, 5, 3, selection=TopK(2, renormalize=False), concentration="diagonal", dial="likelihood"
        ),
        SoftmaxRouter(16, 5, 2),
    ],
)
def test_a_backward_that_does_not_compile_falls_back_in_the_same_step(
    router: Router, activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    router = copy.deepcopy(router)
    router.log_prior.normal_()
    moe = MoE(16, 8, 5, router, activation=activation, backend="triton")

    def gradients() -> tuple[torch.Tensor, ...]:
        x = tokens().requires_grad_()
        routing = moe.router(x)
        loss = (
            moe.compute(x, routing).square().sum() + routing.logits.sin().sum() + routing.probs.square().sum()
        )
        return torch.autograd.grad(loss, [x, *moe.parameters()])

    expected = gradients()
    for module in (gate_module, experts_module, dispatch_module):
        monkeypatch.setattr(module, "_backward", compile_errors()[0])
    with pytest.warns(RuntimeWarning, match="did not compile") as seen:
        plain = gradients()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*did not compile")
        gradients()
    named = [str(w.message).split("'")[1] for w in seen if "did not compile" in str(w.message)]
    assert sorted(named) == ["dispatch backward", "experts backward", "gate backward"]
    for a, b in zip(plain, expected, strict=True):
        # fp32 sums in another order.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.filterwarnings("ignore:the kernel")
def test_a_kernel_that_fails_after_the_pre_activations_were_overwritten(
    monkeypatch: pytest.MonkeyPatch, activation: Any
) -> None:
    torch.manual_seed(0)
    moe = MoE(16, 8, 5, GrassmannRouter(16, 5, 3, selection=TopK(2)), activation=activation, backend="triton")

    def gradients() -> tuple[torch.Tensor, ...]:
        x = tokens().requires_grad_()
        return torch.autograd.grad(moe(x).square().sum(), [x, *moe.parameters()])

    expected = gradients()
    monkeypatch.setattr(experts_module, "_weight_gradient", compile_errors()[0])
    plain = gradients()
    assert runtime._failed == {"experts backward"}
    for a, b in zip(plain, expected, strict=True):
        # fp32 sums in another order.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("capability", "hopper"), [((8, 6), False), ((9, 0), True), ((12, 0), False)])
def test_the_device_is_a_constant_to_the_compiler(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hopper: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    runtime._read_generation.cache_clear()
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def ask(x: torch.Tensor) -> torch.Tensor:
        return x + 2 * (runtime._generation(0) >= 8) + runtime.is_hopper(torch.device("cuda", 0))

    try:
        assert float(ask(torch.zeros(()))) == 2 + hopper
    finally:
        runtime._read_generation.cache_clear()
        torch._dynamo.reset()
