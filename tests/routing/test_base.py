"""What every router shares: shapes, precision, the dial, compilation, checkpoints and the learned prior."""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from grmoe.model.choices_grmoe import SLOT_ROUTERS
from grmoe.routing import (
    ROUTERS,
    Dense,
    GrassmannRouter,
    Mass,
    Router,
    Routing,
    SoftmaxRouter,
    SoftMoERouter,
    SwitchRouter,
    TopK,
    VMFRouter,
    build_router,
    routers,
    set_alpha,
    update_priors,
)
from grmoe.routing.linear import linear_weight
from grmoe.routing.prior import next_log_prior

D, N = 12, 4
NAMES = tuple(ROUTERS)
FIELDS = ("logits", "probs", "selected", "weights", "aux_loss")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(name: str, **options: Any) -> Router:
    own: dict[str, Any] = {"rank": 3} if name == "grassmann" else {}
    if name != "hash":
        own["generator"] = rng()
    return build_router(name, D, N, **{**own, **options})


def tokens(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, D, generator=rng(seed), dtype=torch.float64).to(dtype)


def assert_equal(a: Routing, b: Routing) -> None:
    for field in FIELDS:
        assert torch.equal(getattr(a, field), getattr(b, field)), field


# ------------------------------------------------------------------------------------------------ contract


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_shapes_and_dtypes(name: str, dtype: torch.dtype) -> None:
    router = make(name)
    assert isinstance(router, ROUTERS[name])
    routing = router(tokens(2, 5, dtype=dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for field in ("logits", "probs", "weights"):
        value = getattr(routing, field)
        assert value.shape == (2, 5, N), field
        assert value.dtype == wide, field
    assert routing.selected.shape == (2, 5, N)
    assert routing.selected.dtype == torch.bool
    assert routing.aux_loss.shape == ()
    torch.testing.assert_close(routing.probs, routing.logits.softmax(-1))
    torch.testing.assert_close(routing.probs.sum(-1), torch.ones(2, 5, dtype=wide))
    assert bool((routing.weights[~routing.selected] == 0).all())
    assert (routing.slots is not None) == (name in SLOT_ROUTERS)
    if dtype in (torch.bfloat16, torch.float16):  # only the token is rounded, not the arithmetic
        assert_equal(routing, router(tokens(2, 5, dtype=dtype).float()))


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("switch", "expert_choice", *SLOT_ROUTERS)])
def test_each_token_on_its_own(name: str) -> None:
    router = make(name)
    x = tokens(2, 5)
    routing = router(x)
    for i in range(2):
        for j in range(5):
            alone = router(x[i, j])
            assert alone.probs.shape == (N,)
            # Another batch size may order the sums of a product differently.
            torch.testing.assert_close(alone.probs, routing.probs[i, j], rtol=1e-5, atol=1e-6)
            assert torch.equal(alone.selected, routing.selected[i, j])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_no_tokens(name: str, training: bool) -> None:
    options: dict[str, Any] = {"z_loss": 1.0, "load_loss": 1.0} if name == "softmax" else {}
    router = make(name, **options).train(training)
    routing = router(tokens(2, 0))
    assert routing.probs.shape == (2, 0, N)
    assert routing.aux_loss.item() == 0.0  # an empty batch must not put NaN into the loss
    assert router.read_metrics().tokens == 0
    router.update_prior(0.1)
    assert torch.equal(router.log_prior, torch.zeros(N))


class NoHostReads(TorchDispatchMode):
    """Raises on every operation whose result the host has to wait for."""

    READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        assert not any(name.startswith(read) for read in self.READS), f"{name} reads a value on the host"
        return func(*args, **(kwargs or {}))


EVERY_OPTION: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    *((name, {"balance": ROUTERS[name].reads_prior}) for name in NAMES if name != "grassmann"),
    ("softmax", {"noise": 0.1, "z_loss": 0.1, "load_loss": 0.1, "selection": Mass(0.7, cap=3)}),
    ("grassmann", {"prior": "uniform"}),
    ("grassmann", {"prior": "uniform", "concentration": "diagonal", "linear": True, "selection": Mass(0.7)}),
    ("grassmann", {"prior": "paper", "amortizer": "affinity", "dial": "likelihood", "selection": TopK(2)}),
    ("grassmann", {"amortizer": "input", "scaling": "unit"}),
    ("grassmann", {"amortizer": "matrix", "scaling": "raw", "linear": True}),
]


@pytest.mark.parametrize(("name", "options"), EVERY_OPTION, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_read_on_the_host(name: str, options: dict[str, Any], training: bool) -> None:
    router = make(name, **options).train(training)
    x = tokens(3, 4).requires_grad_()
    with NoHostReads():
        routing = router(x)
        (routing.weights.square().sum() + routing.aux_loss).backward()
        router.alpha = 2.0
        router.update_prior(0.1)
    with NoHostReads(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        float(routing.aux_loss.detach())  # the guard itself works


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(NotImplementedError, match="Router must define gate"):
        Router(D, N)(tokens(2))

    class Constant(Router):
        def gate(self, x: Tensor, token_ids: Tensor | None) -> Tensor:
            return self.alpha_value * x[..., : self.num_experts]

    router = Constant(D, N, selection=TopK(2), alpha=0.5)
    x = tokens(3)
    routing = router(x)
    torch.testing.assert_close(routing.probs, (0.5 * x[:, :N]).softmax(-1))
    assert routing.selected.sum(-1).tolist() == [2, 2, 2]
    assert float(routing.aux_loss) == 0.0
    assert router.geometry_figures() == {}
    assert Constant(D, N).selection == Dense()


@pytest.mark.parametrize("name", NAMES)
def test_repr_names_the_options(name: str) -> None:
    text = repr(make(name))
    assert f"dim={D}, num_experts={N}, selection=" in text
    if name == "grassmann":
        assert "rank=3, concentration=scalar, scaling=rank, prior=balanced" in text


def test_linear_weight_gives_logits_of_order_one() -> None:
    weight = linear_weight(64, 400, rng())
    assert torch.equal(weight, linear_weight(64, 400, rng()))
    assert weight.requires_grad
    # 25600 entries: four standard errors of a standard deviation are 4/√(2·25600) = 0.018.
    assert float(weight.detach().std() * 20) == pytest.approx(1.0, abs=0.018)


# ----------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_nothing(name: str) -> None:
    router = make(name)
    x = tokens(3, 6)
    plain = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x.mT).dtype == torch.bfloat16  # it is on
        assert_equal(router(x), plain)


HALVES: list[Callable[[nn.Module], nn.Module]] = [
    lambda m: m.bfloat16(),
    lambda m: m.half(),
    lambda m: m.to(torch.bfloat16),
    lambda m: m.to("cpu", torch.float16),
    lambda m: nn.Sequential(m).bfloat16()[0],
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cast", HALVES)
def test_half_precision_leaves_a_router_alone(name: str, cast: Callable[[nn.Module], nn.Module]) -> None:
    options: dict[str, Any] = {"amortizer": "affinity", "linear": True} if name == "grassmann" else {}
    router = make(name, alpha=0.3, **options)
    router.log_prior.copy_(torch.randn(N, generator=rng(5)))
    before = {key: value.clone() for key, value in router.state_dict().items()}
    routing = router(tokens(4))
    cast(router)
    for key, value in router.state_dict().items():
        assert value.dtype == before[key].dtype == torch.float32, key
        assert torch.equal(value, before[key]), key
    assert_equal(router(tokens(4)), routing)


def test_a_model_around_a_router_is_cast() -> None:
    model = nn.Sequential(nn.Linear(D, D), make("grassmann"), nn.Linear(D, D)).bfloat16()
    assert [m.weight.dtype for m in (model[0], model[2])] == [torch.bfloat16] * 2
    assert model[1].frames.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_double(name: str) -> None:
    options: dict[str, Any] = {"amortizer": "input", "linear": True} if name == "grassmann" else {}
    router = make(name, **options)
    single = router(tokens(5))
    router.double()
    assert all(p.dtype == torch.float64 for p in router.parameters())
    for dtype in (torch.float64, torch.float32):
        routing = router(tokens(5, dtype=dtype))
        assert routing.logits.dtype == routing.weights.dtype == dtype
        torch.testing.assert_close(routing.probs.float(), single.probs, rtol=0, atol=1e-5)
    router.update_prior(0.1)


# ------------------------------------------------------------------------------------------------- the dial

SCALED = [name for name in NAMES if name != "hash"]


@pytest.mark.parametrize("name", SCALED)
def test_dial_limits(name: str) -> None:
    router = make(name).double()
    x = tokens(4, 8, dtype=torch.float64)
    at_one = router(x)
    router.alpha = 0.0
    assert torch.equal(router(x).probs, torch.full((4, 8, N), 1 / N, dtype=torch.float64))
    router.alpha = 1e4
    hard = router(x).probs.detach()
    # Logits of order one that differ by more than 1e-3 everywhere in this batch: e^(−10) at most elsewhere.
    assert float(hard.amax(-1).min()) > 1 - 1e-3
    assert torch.equal(hard.argmax(-1), at_one.logits.argmax(-1))


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in NAMES), ("grassmann", {"prior": "uniform", "linear": True})],
    ids=str,
)
def test_dial_without_recompilation(name: str, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    router = make(name, **options).eval()
    counter = CompileCounter()
    compiled = torch.compile(router, backend=counter, fullgraph=True)
    x = tokens(2, 5)
    seen = []
    for alpha in (1.0, 0.25, 3.0, 0.0):
        router.alpha = alpha
        assert router.alpha == alpha
        routing = compiled(x)
        torch.testing.assert_close(routing.probs, router(x).probs, rtol=1e-6, atol=1e-7)
        seen.append(routing.probs)
    assert counter.frame_count == 1
    for before, after in itertools.pairwise(seen):
        assert torch.equal(before, after) == (name == "hash")


@pytest.mark.parametrize("weight_alpha", [None, 2.0])
@pytest.mark.parametrize("name", SCALED)
def test_one_loss_of_passes_at_several_alphas(name: str, weight_alpha: float | None) -> None:
    """The backward of each pass is at the numbers of that pass."""
    router = make(name).double()
    x = tokens(2, 5, dtype=torch.float64).requires_grad_()
    parts = []
    router.budget.set_weight_alpha(weight_alpha)
    for alpha in (1.0, 3.0):
        router.alpha = alpha
        parts.append(torch.autograd.grad(router(x).probs.square().sum(), x)[0])
    losses = []
    for alpha in (1.0, 3.0):
        router.alpha = alpha
        losses.append(router(x).probs.square().sum())
    router.alpha = 0.5
    router.budget.set_weight_alpha(None if weight_alpha is None else 7.0)
    (together,) = torch.autograd.grad(losses[0] + losses[1], x)
    torch.testing.assert_close(together, parts[0] + parts[1])


@pytest.mark.parametrize("name", ["grassmann", "softmax", "vmf"])
def test_threads_share_a_router_whose_weights_have_their_own_alpha(name: str) -> None:
    """A thread reads α while another one computes its weights at their α."""
    router = make(name, selection=TopK(2), alpha=50.0).eval()
    router.budget.set_weight_alpha(1.0)
    inside, done = threading.Event(), threading.Event()
    gate = type(router).gate

    def slow(self: Router, x: Tensor, ids: Tensor | None) -> Tensor:
        logits = gate(self, x, ids)
        if float(self.alpha_value) == 1.0 and not inside.is_set():
            inside.set()
            done.wait(10)
        return logits

    x = tokens(2, 5)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        want = router(x)
        patch.setattr(type(router), "gate", slow)
        other = threading.Thread(target=lambda: router(x))
        other.start()
        assert inside.wait(10)
        assert router.alpha == 50.0
        assert_equal(router(x), want)
        done.set()
        other.join()
    assert router.alpha == 50.0


def test_alpha_reads_what_was_set() -> None:
    router = make("softmax", alpha=0.5)
    assert router.alpha == 0.5
    router.alpha = 3
    assert router.alpha == 3.0
    assert "alpha_value" in router.state_dict()


def test_routers_and_set_alpha() -> None:
    class Block(nn.Module):
        def __init__(self, router: Router) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)
            self.router = router

    parts = [make("grassmann"), make("softmax"), make("vmf")]
    model = nn.ModuleList([Block(part) for part in parts])
    assert routers(model) == parts
    assert routers(parts[0]) == [parts[0]]
    assert routers(nn.Linear(2, 2)) == []
    set_alpha(model, 2)
    assert [r.alpha for r in parts] == [2.0, 2.0, 2.0]
    set_alpha(model, [0.5, 1.0, 4.0])
    assert [r.alpha for r in parts] == [0.5, 1.0, 4.0]
    set_alpha(model, (a for a in (1.0, 2.0, 3.0)))
    assert [r.alpha for r in parts] == [1.0, 2.0, 3.0]


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(name: str) -> None:
    options: dict[str, Any] = {"amortizer": "affinity", "linear": True} if name == "grassmann" else {}
    router = make(name, alpha=0.7, **options)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng(3)))
    router.log_prior.copy_(torch.randn(N, generator=rng(4)))
    x = tokens(3, 4)
    routing = router(x)
    other = make(name, **({} if name == "hash" else {"generator": rng(99)}), **options)
    other.load_state_dict(router.state_dict())
    assert other.alpha == pytest.approx(0.7, rel=1e-7)  # fp32
    assert torch.equal(other.log_prior, router.log_prior)
    assert_equal(other(x), routing)
    assert_equal(copy.deepcopy(router)(x), routing)
    assert other.read_metrics().tokens == 12  # metrics and pending load are not part of a model
    assert not any(key.endswith("sums") for key in router.state_dict())


# ------------------------------------------------------------------------------------------- balanced prior


def cv(load: list[float]) -> float:
    mean = sum(load) / len(load)
    return math.sqrt(sum((v - mean) ** 2 for v in load) / len(load)) / mean


def test_next_log_prior() -> None:
    prior = torch.tensor([0.3, -0.1, -0.2])
    sums = torch.tensor([6.0, 3.0, 1.0, 10.0])
    step = [p + 0.5 * (1 - 3 * load) for p, load in zip([0.3, -0.1, -0.2], [0.6, 0.3, 0.1], strict=True)]
    want = torch.tensor(step) - sum(step) / 3
    torch.testing.assert_close(next_log_prior(prior, sums, 0.5), want)
    assert torch.equal(next_log_prior(prior + 1, torch.zeros(4), 0.5), prior + 1)  # no tokens, no move
    both = next_log_prior(torch.stack([prior, prior]), torch.stack([sums, torch.zeros(4)]), 0.5)
    torch.testing.assert_close(both, torch.stack([want, prior]))


SKEWED: list[Callable[[], Router]] = [
    lambda: make("grassmann"),
    lambda: make("grassmann", selection=TopK(1)),
    lambda: make("grassmann", selection=Mass(0.7), dial="likelihood"),
    lambda: make("softmax", balance=True),
    lambda: make("vmf", balance=True, kappa=4.0),
    lambda: make("switch", balance=True, capacity_factor=4.0),
]


@pytest.mark.parametrize("build", SKEWED)
def test_prior_balances_a_skewed_router(build: Callable[[], Router]) -> None:
    router = build()
    if isinstance(router, GrassmannRouter):
        with torch.no_grad():
            router.log_kappa.copy_(torch.tensor([0.4, 1.0, 2.0, 4.0]).log())  # high κ attracts more
        x = tokens(2000)
    else:
        x = tokens(2000) + 0.6  # a common direction, which some experts like better

    def load() -> list[float]:
        router.eval()
        routing = router(x)
        router.train()
        share = routing.probs if router.selection.dense else routing.selected.float()
        return (share / share.sum(-1, keepdim=True)).mean(0).tolist()

    start = cv(load())
    assert start > 0.25
    for step in range(150):
        router(x[(step % 4) :: 4])
        router.update_prior(0.3 / (1 + step / 30))
    assert cv(load()) < 0.1
    assert float(router.log_prior.mean()) == pytest.approx(0.0, abs=1e-6)
    assert not torch.equal(router.log_prior, torch.zeros(N))


def test_prior_counts_what_is_computed() -> None:
    x = tokens(40)
    dense = make("grassmann")
    leading = torch.bincount(dense(x).probs.argmax(-1), minlength=N).float()
    torch.testing.assert_close(dense.prior_sums, torch.cat([leading, torch.tensor([40.0])]))
    sparse = make("grassmann", selection=Mass(0.6))
    selected = sparse(x).selected.float()
    share = (selected / selected.sum(-1, keepdim=True)).sum(0)
    torch.testing.assert_close(sparse.prior_sums, torch.cat([share, torch.tensor([40.0])]))
    sparse(x)  # sums run on until the update takes them
    assert float(sparse.prior_sums[-1]) == 80.0
    want = next_log_prior(sparse.log_prior, sparse.prior_sums, 0.1)
    sparse.update_prior(0.1)
    assert torch.equal(sparse.log_prior, want)
    assert torch.equal(sparse.prior_sums, torch.zeros(N + 1))
    sparse.update_prior(0.1)  # no tokens since: nothing moves
    assert torch.equal(sparse.log_prior, want)


def test_prior_moves_only_when_asked() -> None:
    for router in (make("softmax"), make("grassmann", prior="paper"), make("grassmann", prior="uniform")):
        router(tokens(20))
        router.update_prior(1.0)
        assert torch.equal(router.log_prior, torch.zeros(N))
        assert torch.equal(router.prior_sums, torch.zeros(N + 1))
    router = make("grassmann").eval()
    router(tokens(20))
    router.update_prior(1.0)
    assert torch.equal(router.log_prior, torch.zeros(N))  # evaluation leaves no trace
    router.train()(tokens(20))
    router.update_prior(0.0)
    assert torch.equal(router.log_prior, torch.zeros(N))


def test_dropped_tokens_count_for_nobody() -> None:
    router = SwitchRouter(D, N, capacity_factor=0.25, balance=True, generator=rng())
    selected = router(tokens(64)).selected
    assert torch.equal(router.prior_sums[:-1], selected.sum(0).float())


@pytest.mark.parametrize("name", NAMES)
def test_prior_enters_the_logits(name: str) -> None:
    router = make(name, alpha=2.0)
    x = tokens(5)
    before = router(x).logits
    b = torch.tensor([0.5, -1.0, 0.25, 0.25])
    router.log_prior.copy_(b)
    # Hash routing has nothing to weigh, Soft MoE is balanced by construction.
    expected = before if name in ("hash", *SLOT_ROUTERS) else before + 2.0 * b
    torch.testing.assert_close(router(x).logits, expected, rtol=0, atol=1e-5)


def test_build_router() -> None:
    assert isinstance(build_router("grassmann", 8, 4, rank=2), GrassmannRouter)
    assert isinstance(build_router("softmax", 8, 4, top_k=1), SoftmaxRouter)
    assert build_router("soft_moe", 8, 4, slots=3).slots == 3  # type: ignore[attr-defined]
    assert isinstance(build_router("soft_moe", 8, 4), SoftMoERouter)
    assert build_router("vmf", 8, 4, alpha=0.5).alpha == 0.5
    assert isinstance(build_router("vmf", 8, 4), VMFRouter)


def test_many_priors_at_once_are_each_one() -> None:
    """Of two sizes, one without a prior, one without tokens: as one by one, to the bit."""
    torch.manual_seed(0)
    together = [
        build_router("grassmann", 16, 4, rank=4),
        build_router("softmax", 16, 4, balance=True),
        build_router("softmax", 16, 6, balance=True),
        build_router("softmax", 16, 4),
        build_router("grassmann", 16, 4, rank=4),
    ]
    for router in together[:-1]:
        router(torch.randn(50, 16))
    alone, model = copy.deepcopy(together), nn.ModuleList(copy.deepcopy(together))
    update_priors(together, 0.3)
    update_priors(model, 0.3)
    for router, other, inside in zip(together, alone, model, strict=True):
        other.update_prior(0.3)
        assert torch.equal(router.log_prior, other.log_prior)
        assert torch.equal(inside.log_prior, other.log_prior)
        if router.balance:
            assert not router.prior_sums.any()
    assert together[0].log_prior.any()
    assert not together[-1].log_prior.any()


def test_the_prior_of_a_frozen_router_stays() -> None:
    """Below an adapter: what the adapter was trained on is what a model without it computes."""
    routers = [build_router("grassmann", 16, 4, rank=4) for _ in range(3)]
    routers[0].requires_grad_(False)
    routers[1].get_parameter("frames").requires_grad_(False)  # its concentrations are trained
    for update in (lambda: update_priors(routers, 0.3), lambda: [r.update_prior(0.3) for r in routers]):
        for router in routers:
            router(torch.randn(50, 16))
        update()
        assert not routers[0].log_prior.any()
        assert not any(router.prior_sums.any() for router in routers)
    assert routers[1].log_prior.any()
    assert routers[2].log_prior.any()
    frozen = build_router("hash", 16, 4)
    assert not frozen.frozen  # nothing to train


@pytest.mark.parametrize(
    ("name", "tensor"), [("grassmann", "frames"), ("softmax", "weight"), ("vmf", "weight")]
)
def test_a_parametrized_router_can_have_weights_at_their_own_alpha(name: str, tensor: str) -> None:
    """PyTorch gives such a module a class that refuses copies."""
    router = make(name, selection=TopK(2), alpha=50.0)
    router.budget.set_weight_alpha(1.0)
    x = tokens(2, 5)
    want = router(x)
    nn.utils.parametrize.register_parametrization(router, tensor, nn.Identity())
    assert_equal(router(x), want)
    router(x).weights.square().sum().backward()
    assert bool(router.parametrizations[tensor].original.grad.any())
