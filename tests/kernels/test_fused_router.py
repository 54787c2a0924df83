"""A router by its kernel against the same router by torch: routing, metrics, prior, and the packed copy."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

pytest.importorskip("triton")

from grmoe.kernels import gate as gate_module
from grmoe.routing import (
    ROUTERS,
    Dense,
    GrassmannRouter,
    Mass,
    Router,
    Routing,
    SoftmaxRouter,
    Threshold,
    TopK,
    build_router,
    uncounted,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

D, N, K = 16, 5, 3


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(0))


def make(name: str = "grassmann", seed: int = 0, **options: Any) -> Router:
    torch.manual_seed(seed)
    if name == "grassmann":
        options["rank"] = K
    router = build_router(name, D, N, **options)
    router.backend = "triton"
    return router


def by_torch(router: Router) -> Router:
    other = copy.deepcopy(router)
    other.backend = "reference"
    return other


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the gate's own functions as they run."""
    seen: list[str] = []
    for name in ("pack", "_forward"):
        original = getattr(gate_module, name)

        def spy(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            seen.append(name)
            return original(*args, **options)

        monkeypatch.setattr(gate_module, name, spy)
    return seen


def assert_same_routing(ours: Routing, plain: Routing) -> None:
    assert torch.equal(ours.selected, plain.selected)
    for name in ("logits", "probs", "weights", "aux_loss"):
        a, b = getattr(ours, name), getattr(plain, name)
        assert a.shape == b.shape
        assert a.dtype == b.dtype == torch.float32
        # fp32 on both sides, sums of 16 terms in another order, logits of size ten.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("grassmann", {"selection": Dense()}),
    ("grassmann", {"selection": TopK(2), "concentration": "diagonal", "dial": "likelihood"}),
    ("grassmann", {"selection": Mass(0.7, cap=3), "prior": "uniform"}),
    ("softmax", {"balance": True, "z_loss": 0.1, "load_loss": 0.1}),
    ("softmax", {"balance": True, "selection": Threshold(0.2)}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_routing_metrics_and_prior(name: str, options: dict[str, Any], calls: list[str]) -> None:
    """Two batches with a NaN token in train mode, one in eval mode: also what accumulates."""
    router = make(name, **options)
    router.use_leading(0.5)
    assert router.leading_share is not None
    router.leading_share.copy_(torch.arange(N) / 6)
    plain = by_torch(router)
    x = tokens(3, 11)
    bad = x.clone()
    bad[1, 4, 2] = float("nan")
    results: list[list[Any]] = []
    for r in (router, plain):
        r.train()
        routing = r(x.requires_grad_())
        ((routing.weights * torch.arange(N)).sum() + routing.aux_loss).backward()
        seen: list[Any] = [routing, *(p.grad.clone() for p in r.parameters() if p.grad is not None), x.grad]
        x.grad = None
        r(bad)
        seen += [r.counter.sums.clone(), r.prior_sums.clone(), r.counter.leading_sums.clone()]
        r.eval()(x.detach())
        seen += [r.counter.sums.clone(), r.prior_sums.clone(), r.counter.leading_sums.clone()]
        r.train().update_prior(0.1)
        results.append([*seen, r.log_prior, r.leading_share])
    assert calls.count("_forward") == 3
    assert_same_routing(results[0][0], results[1][0])
    for ours, expected in zip(results[0][1:], results[1][1:], strict=True):
        # As above; gradients of size ten, sums over a hundred tokens.
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4, equal_nan=True)
    assert router.read_metrics().nonfinite_tokens == 1
    assert router.read_metrics().tokens == 98


def test_uncounted_passes() -> None:
    router = make(selection=TopK(2))
    with router.uncounted():
        router(tokens(9))
    assert not router.counter.sums.any()
    assert not router.prior_sums.any()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (2, 3, 4)], ids=str)
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    router = make(selection=TopK(2))
    x = tokens(*shape)
    assert_same_routing(router(x), by_torch(router)(x))


@torch.no_grad()
def test_routing_follows_dial_and_prior(calls: list[str]) -> None:
    router = make(selection=Mass(0.8)).eval()
    x = tokens(20)
    for alpha, shift in ((0.0, 0.0), (1.7, 0.0), (1.7, 0.5)):
        router.alpha = alpha
        router.log_prior[2] += shift
        assert_same_routing(router(x), by_torch(router)(x))
    assert calls.count("pack") == 1  # neither is in the packed copy


# ------------------------------------------------------------------------------------------------ packed copy


def write_in_place(router: Router) -> None:
    with torch.no_grad():
        router.get_parameter("frames").copy_(make(seed=5).get_parameter("frames"))


def load(router: Router) -> None:
    router.load_state_dict(make(seed=5).state_dict())


def load_by_assignment(router: Router) -> None:
    router.load_state_dict(make(seed=5).state_dict(), assign=True)


def replace_parameter(router: Router) -> None:
    router.frames = torch.nn.Parameter(make(seed=5).get_parameter("frames").detach().clone())


def train_a_step(router: Router) -> None:
    router.train()
    with torch.enable_grad():
        router(tokens(9)).probs[:, 0].sum().backward()
    router.get_parameter("frames").sub_(router.get_parameter("frames").grad)
    router.eval()


def train_a_fused_step_in_eval_mode(router: Router) -> None:
    """PyTorch's fused optimisers leave no trace on the parameter."""
    frames = router.get_parameter("frames")
    optimizer, version = torch.optim.AdamW([frames], lr=0.1, fused=True), frames._version
    with torch.enable_grad():
        router(tokens(9)).probs[:, 0].sum().backward()
    router(tokens(9))  # between backward and step
    optimizer.step()
    assert frames._version == version
    optimizer.zero_grad()


def cast(router: Router) -> None:
    router.double().float()
    write_in_place(router)


CHANGES = [
    write_in_place,
    load,
    load_by_assignment,
    replace_parameter,
    train_a_step,
    train_a_fused_step_in_eval_mode,
    cast,
]


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_packed_copy_follows_the_frames(change: Any, calls: list[str]) -> None:
    router, x = make(selection=TopK(2)).eval(), tokens(9)
    before = router(x)
    router(x)
    assert calls.count("pack") == 1  # kept in eval mode
    change(router)
    after = router(x)
    assert not torch.allclose(before.logits, after.logits)
    assert_same_routing(after, by_torch(router)(x))


def test_packed_copy_is_not_kept_where_the_frames_get_a_gradient(calls: list[str]) -> None:
    router, x = make(selection=TopK(2)).eval(), tokens(9)
    router(x)
    router(x)
    assert calls.count("pack") == 2
    router.requires_grad_(False)
    router(x)
    router(x)
    assert calls.count("pack") == 3


def test_packed_copy_is_not_kept_in_training(calls: list[str]) -> None:
    router = make(selection=TopK(2))
    router(tokens(9))
    router(tokens(9))
    assert calls.count("pack") == 2
    assert router._packed._kept is None


@torch.no_grad()
def test_packed_copy_follows_the_dtype_of_the_tokens() -> None:
    router, x = make(selection=TopK(2)).eval(), tokens(9)
    wide = router(x)
    narrow = router(x.half())
    assert_same_routing(router(x), wide)
    # Tokens and frames rounded to fp16: 2^-11 each, energies of size ten.
    torch.testing.assert_close(narrow.logits, wide.logits, rtol=4e-3, atol=1e-2)
    assert not torch.equal(narrow.logits, wide.logits)


@torch.no_grad()
def test_copies_of_a_router_pack_for_themselves() -> None:
    router, x = make(selection=TopK(2)).eval(), tokens(9)
    router(x)
    other = copy.deepcopy(router)
    write_in_place(other)
    assert_same_routing(other(x), by_torch(other)(x))
    assert_same_routing(router(x), by_torch(router)(x))


def test_packed_copy_follows_frames_that_come_and_go() -> None:
    """functional_call with temporary frames: a new tensor may lie where the last one lay."""
    router, x = make(selection=TopK(2)).eval(), tokens(9)
    place = torch.empty(N, D, K)
    for seed in range(3):
        place = torch.empty(0).set_(place.untyped_storage(), 0, (N, D, K))  # same address, version as new
        place.untyped_storage().copy_(make(seed=seed).get_parameter("frames").detach().untyped_storage())
        frames = {"frames": place}
        with torch.no_grad():
            ours = functional_call(router, frames, (x,))
            plain = functional_call(by_torch(router), frames, (x,))
        assert_same_routing(ours, plain)


def test_training_signal_after_inference_mode() -> None:
    router, x = make(selection=TopK(2)).eval(), tokens(9)
    with torch.inference_mode():
        router(x)
    router(x.requires_grad_()).weights.square().sum().backward()
    assert x.grad is not None


# --------------------------------------------------------------------------------------- where there is no kernel


@dataclass(frozen=True)
class Odd:
    """A policy the kernel does not know."""

    renormalize: ClassVar[bool] = True
    dense: ClassVar[bool] = False

    def __call__(self, probs: Tensor) -> Tensor:
        return (torch.arange(probs.shape[-1]) % 2 == 1).expand(probs.shape)

    def max_experts(self, num_experts: int) -> int:
        return num_experts // 2


class OddTopK(TopK):
    """A subclass may choose otherwise than its parent."""

    def __call__(self, probs: Tensor) -> Tensor:
        return Odd()(probs)


class OwnSelect(SoftmaxRouter):
    def select(self, probs: Tensor) -> Tensor:
        return Odd()(probs)


WITHOUT: list[Any] = [
    ("grassmann", {"selection": Odd()}),
    ("softmax", {"noise": 0.1}),
    *[(name, {}) for name in ROUTERS if name not in ("grassmann", "softmax")],
    pytest.param(
        "grassmann",
        {"selection": OddTopK(2)},
    ),
]


@pytest.mark.parametrize(("name", "options"), WITHOUT, ids=str)
def test_other_routers_take_the_torch_path(name: str, options: dict[str, Any], calls: list[str]) -> None:
    router = make(name, **options)
    plain = by_torch(router)
    results = []
    for r in (router, plain):
        torch.manual_seed(3)  # the noise of a noisy gate
        results.append(r(tokens(2, 10)))
    assert calls == []
    assert torch.equal(results[0].selected, results[1].selected)
    assert torch.equal(results[0].logits, results[1].logits)
    torch.testing.assert_close(router.counter.sums, plain.counter.sums, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(router.prior_sums, plain.prior_sums, rtol=1e-6, atol=1e-5)


def test_noisy_gate_has_a_kernel_in_eval_mode(calls: list[str]) -> None:
    make("softmax", noise=0.1).eval()(tokens(9))
    assert calls.count("_forward") == 1


def test_a_class_with_its_own_select_takes_the_torch_path(calls: list[str]) -> None:
    torch.manual_seed(0)
    router = OwnSelect(D, N)
    router.backend = "triton"
    assert torch.equal(router(tokens(9)).selected, Odd()(torch.empty(9, N)))
    assert calls == []


class OwnGate(SoftmaxRouter):
    def gate(self, x: Tensor, token_ids: Tensor | None) -> Tensor:
        return -super().gate(x, token_ids)


def test_a_class_with_its_own_gate_takes_the_torch_path(calls: list[str]) -> None:
    """`gate_operands` of the class above describes another gate."""
    torch.manual_seed(0)
    router, x = OwnGate(D, N), tokens(9)
    router.backend = "triton"
    assert torch.equal(router(x).logits, router.gate(x, None))
    assert calls == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_unsupported_dtypes_take_the_torch_path(dtype: torch.dtype, calls: list[str]) -> None:
    router, x = make(selection=TopK(2)), tokens(9).to(dtype)
    assert torch.equal(router(x).logits, by_torch(router)(x).logits)
    assert calls == []


@pytest.mark.parametrize("training", [True, False])
def test_odd_widths_take_the_kernel(training: bool, calls: list[str]) -> None:
    router, x = GrassmannRouter(18, N, K).train(training), torch.randn(9, 18)  # 72 bytes: not whole 16
    plain = by_torch(router)
    router.backend = "triton"
    assert_same_routing(router(x), plain(x))
    assert calls.count("_forward") == 1


def test_auto_does_not_take_the_interpreter(calls: list[str]) -> None:
    router = make(selection=TopK(2))
    router.backend = "auto"
    router(tokens(9))
    assert calls == []


def test_more_experts_than_there_are_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="k must be at most the number of experts 5, got 7"):
        make(selection=TopK(7))(tokens(9))


def test_vmap_over_routers() -> None:
    """As the synthetic study runs its seeds."""
    routers = [make(seed=s, selection=TopK(2)).eval() for s in range(2)]
    x, params = tokens(9), torch.func.stack_module_state(routers)
    with uncounted(routers):
        stacked = torch.vmap(lambda p, b: functional_call(routers[0], (p, b), (x,)).probs)(*params)
    for i, router in enumerate(routers):
        torch.testing.assert_close(stacked[i], router(x).probs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"linear": True}], ids=["one kernel", "several kernels"])
def test_one_loss_of_passes_at_several_alphas(options: dict[str, Any]) -> None:
    router, x = make(**options), tokens(7).requires_grad_()
    router.budget.set_weight_alpha(2.0)
    grads = {}
    for backend in ("reference", "triton"):
        router.backend = backend  # type: ignore[assignment]
        router.budget.set_weight_alpha(2.0)
        first = router(x).probs
        router.budget.set_weight_alpha(3.0)
        loss = (first * router(x).probs).sum()
        router.alpha = 0.5
        router.budget.set_weight_alpha(7.0)
        (grads[backend],) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grads["triton"], grads["reference"], rtol=1e-4, atol=1e-5)
