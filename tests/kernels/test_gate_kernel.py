"""The fused gate against the router's own torch path in fp64: outputs, selection and every gradient."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe.kernels import gate as gate_module
from grmoe.kernels.gate import gate
from grmoe.kernels.gate_tiles import ONE_PASS, WIDE, plan
from grmoe.routing import Dense, GrassmannRouter, Mass, Router, Selection, SoftmaxRouter, Threshold, TopK
from grmoe.routing.fused import fused_gate, pack_operands

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

OUTPUTS = ("logits", "probs", "weights")
SELECTIONS: list[Selection] = [
    Dense(),
    *[TopK(k, renormalize) for k in (1, 2, 3) for renormalize in (True, False)],
    Mass(0.6),
    Mass(0.6, renormalize=False),
    Mass(0.9, cap=2),
    Mass(1.0),
    Threshold(0.15),
    Threshold(0.3, renormalize=False),
]


def tokens(T: int = 75, D: int = 32, seed: int = 0) -> Tensor:
    """Not a multiple of the tile, lengths over a decade, one zero token (padding)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g) * torch.exp(torch.randn(T, 1, generator=g))
    if T:
        x[T // 3] = 0
    return x


def grassmann(D: int = 32, N: int = 5, K: int = 7, **options: Any) -> GrassmannRouter:
    torch.manual_seed(1)
    router = GrassmannRouter(D, N, K, **options)
    with torch.no_grad():
        router.log_kappa += 0.4 * torch.randn(router.log_kappa.shape)
        router.log_prior += 0.5 * torch.randn(N)
    return router


def softmax(D: int = 32, N: int = 5, **options: Any) -> SoftmaxRouter:
    torch.manual_seed(1)
    router = SoftmaxRouter(D, N, **options)
    with torch.no_grad():
        router.log_prior += 0.5 * torch.randn(N)
    return router


def twin(router: Router) -> Router:
    """The specification: the same router in fp64, by torch."""
    other = copy.deepcopy(router).double()
    other.backend = "reference"
    return other


Results = tuple[dict[str, Tensor], dict[str, Tensor]]


def run(router: Router, x: Tensor, upstream: dict[str, Tensor], fused: bool, pack: bool = False) -> Results:
    """(outputs, gradients) for the loss Σ ⟨upstream, output⟩; the prior counts as a parameter."""
    router.zero_grad()
    leaf, prior = x.clone().requires_grad_(), router.log_prior.clone().requires_grad_()
    if fused:
        operands = router.gate_operands()
        assert operands is not None
        operands = replace(operands, prior_N=prior)
        packed = pack_operands(operands, x.dtype) if pack else None
        routing = fused_gate(leaf, operands, router.alpha_value, router.budget, packed=packed)
    else:
        router.log_prior = prior
        routing = router.route(leaf.double(), None)
    out = {name: getattr(routing, name) for name in (*OUTPUTS, "selected")}
    loss = sum((out[name] * value.to(out[name].dtype)).sum() for name, value in upstream.items())
    if isinstance(loss, Tensor):
        loss.backward()
    grads = {"x": leaf.grad, "prior": prior.grad, **{n: p.grad for n, p in router.named_parameters()}}
    return {k: v.detach() for k, v in out.items()}, {k: v for k, v in grads.items() if v is not None}


def directions(x: Tensor, N: int, names: tuple[str, ...] = OUTPUTS) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    return {name: torch.randn(*x.shape[:-1], N, generator=g) for name in names}


def assert_close(ours: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float) -> None:
    """Relative to the largest entry: small entries are differences of large ones."""
    assert ours.keys() == exact.keys()
    for name, expected in exact.items():
        if name == "selected":
            assert torch.equal(ours[name], expected)
            continue
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        error = (ours[name].double() - expected.double()).abs()
        assert error.shape == expected.shape
        assert error.numel() == 0 or float(error.max()) <= tolerance * max(scale, 1e-3), name


def compare(router: Router, x: Tensor, names: tuple[str, ...] = OUTPUTS, pack: bool = False) -> Results:
    upstream = directions(x, router.num_experts, names)
    ours, grads = run(router, x, upstream, fused=True, pack=pack)
    exact, exact_grads = run(twin(router), x, upstream, fused=False)
    # fp32 sums of at most 64 terms: 64 ε = 8e-6 at worst, times logits of size ten for the probabilities. A
    # gradient's largest entries are near tokens of length 0.1, sums of a few hundred terms.
    assert_close(ours, exact, 2e-5)
    assert_close(grads, exact_grads, 1e-4)
    return ours, grads


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_every_selection(selection: Selection) -> None:
    router = grassmann(selection=selection)
    ours, _ = compare(router, tokens())
    count = ours["selected"].sum(-1)
    assert 1 <= int(count.min()) <= int(count.max()) <= selection.max_experts(5)
    if isinstance(selection, Mass | Threshold) and selection != Mass(1.0):
        assert len(count.unique()) > 1  # the number of experts follows the token


@pytest.mark.parametrize("concentration", ["scalar", "diagonal"])
@pytest.mark.parametrize("dial", ["posterior", "likelihood"])
@pytest.mark.parametrize("alpha", [0.0, 1.7])
def test_concentration_and_dial(concentration: Any, dial: Any, alpha: float) -> None:
    options: dict[str, Any] = {"concentration": concentration, "dial": dial, "alpha": alpha}
    # Not top-k: at α = 0 all may tie, and torch's topk breaks ties as it likes.
    router = grassmann(selection=Mass(0.7), **options)
    ours, _ = compare(router, tokens())
    if alpha == 0:
        flat = torch.zeros(5) if dial == "posterior" else router.log_prior
        assert torch.equal(ours["logits"], flat.expand(75, 5))


# (T, D, N, K): one token, one tile, a token more; experts beside a power of two; K·N below, at and above whole tiles
# of packed columns (64 in fp32); D below and above a tile of width; more experts than a tile's usual columns.
SHAPES = [(1, 4, 2, 1), (64, 32, 3, 4), (65, 36, 8, 8), (130, 64, 9, 13), (10, 12, 70, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int, int]) -> None:
    T, D, N, K = shape
    kind: Any = "diagonal" if T % 2 else "scalar"
    compare(grassmann(D, N, K, concentration=kind, selection=TopK(2)), tokens(T, D))


# Two tiles of 256 columns: one, two and 32 rounds of experts in half a tile; experts that fill a tile alone.
@pytest.mark.parametrize(
    "shape", [(65, 80, 4, 70), (130, 24, 64, 5), (65, 12, 128, 3), (33, 12, 130, 2)], ids=str
)
def test_wide_tiles(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward finishes a wide tile in halves."""
    T, D, N, K = shape
    kind: Any = "diagonal" if T % 2 else "scalar"

    def wide(*args: Any) -> Any:
        usual = plan(*args)
        tiles = WIDE._replace(tokens=64, width=32)
        return usual._replace(columns=512, forward=tiles, backward=tiles, input_gradient=tiles)

    monkeypatch.setattr(gate_module, "plan", wide)
    compare(grassmann(D, N, K, concentration=kind, selection=TopK(2)), tokens(T, D))


@pytest.mark.parametrize("shape", [*SHAPES, (0, 8, 3, 2)], ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_a_kept_projection(
    shape: tuple[int, int, int, int], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward reads x·U in place of computing it again."""
    T, D, N, K = shape
    kind: Any = "diagonal" if T % 2 else "scalar"
    router, x = grassmann(D, N, K, concentration=kind, selection=TopK(2)), tokens(T, D)
    if wide:  # three tiles at once, as at 8 experts of rank 48
        at_once = ONE_PASS._replace(tokens=64, width=32)

        def plan_of(*args: Any) -> Any:
            return plan(*args)._replace(columns=384, forward=at_once)

        monkeypatch.setattr(gate_module, "plan", plan_of)
    plain, _ = compare(router, x) if T else run(router, x, directions(x, N), fused=True)
    monkeypatch.setattr(gate_module, "KEPT_COLUMNS", 0)
    kept, _ = compare(router, x) if T else run(router, x, directions(x, N), fused=True)
    assert all(torch.equal(kept[name], plain[name]) for name in plain)


def test_a_projection_of_many_columns_is_kept_where_a_backward_follows() -> None:
    many = gate_module.KEPT_COLUMNS
    assert gate_module._keeps(True, True, many)
    assert not gate_module._keeps(True, True, many - 1)
    assert not gate_module._keeps(True, False, many)  # no backward
    assert not gate_module._keeps(False, True, many)  # a linear gate has its logits


def test_the_kept_projection_is_what_the_backward_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []
    forward = gate_module._forward

    def keep(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        results = forward(*args, **options)
        found.append(results[-1].clone())
        results[-1].zero_()
        return results

    monkeypatch.setattr(gate_module, "_forward", keep)
    router, x = grassmann(), tokens()
    _, grads = run(router, x, directions(x, 5), fused=True)
    assert len(found[0]) == 0
    assert float(grads["frames"].abs().max()) > 0
    monkeypatch.setattr(gate_module, "KEPT_COLUMNS", 0)
    _, grads = run(router, x, directions(x, 5), fused=True)
    packed = gate_module.pack(router.frames.detach(), x.dtype, True)
    assert torch.allclose(found[1], x @ packed.T, rtol=1e-5, atol=1e-4)
    assert float(grads["frames"].abs().max()) == 0
    with torch.no_grad():  # no backward follows
        run(router, x, {}, fused=True)
    assert len(found[2]) == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_shapes(shape: tuple[int, int, int, int]) -> None:
    T, D, N, _ = shape
    compare(softmax(D, N), tokens(T, D))


# Not Mass(1.0): some gates here are so sure that their mass rounds to one in fp32 and not in fp64.
@pytest.mark.parametrize("selection", [s for s in SELECTIONS if s != Mass(1.0)], ids=str)
def test_linear_gate(selection: Selection) -> None:
    compare(softmax(selection=selection, alpha=1.7), tokens(40))


def test_linear_gate_with_the_dial_at_zero() -> None:
    compare(softmax(selection=Mass(0.7), alpha=0.0), tokens(40))


@pytest.mark.parametrize(
    "make", [grassmann, lambda K, **options: softmax(**options)], ids=["square", "linear"]
)
@pytest.mark.parametrize("mask", range(8))
def test_gradient_may_arrive_on_any_output(make: Any, mask: int) -> None:
    names = tuple(name for i, name in enumerate(OUTPUTS) if mask >> i & 1)
    _, grads = compare(make(N=3, K=4, selection=Mass(0.8, cap=2)), tokens(40), names)
    assert bool(grads) == bool(names)


@pytest.mark.parametrize("make", [grassmann, softmax])
def test_packed_copy_changes_no_bit(make: Any) -> None:
    router, x = make(selection=TopK(2)), tokens()
    upstream = directions(x, 5)
    for ours, packed in zip(
        run(router, x, upstream, fused=True), run(router, x, upstream, fused=True, pack=True), strict=True
    ):
        assert all(torch.equal(ours[name], packed[name]) for name in ours)


def test_packed_padding_is_zero() -> None:
    router = grassmann(D=12, N=5, K=3)
    packed = pack_operands(router.gate_operands(), torch.float32)
    p = plan(torch.float32, 5, 3, True, True)
    assert packed.shape == (p.columns, 12)
    assert p.columns > 3 * p.experts > 15
    expected = torch.zeros(p.columns // p.experts, p.experts, 12)
    expected[:3, :5] = router.frames.detach().permute(2, 0, 1)
    assert torch.equal(packed, expected.reshape(p.columns, 12))


@pytest.mark.parametrize("make", [grassmann, softmax])
@pytest.mark.parametrize("selection", [Dense(), TopK(3), Mass(0.6), Threshold(0.3)], ids=str)
def test_nan_token_touches_its_row_alone(make: Any, selection: Selection) -> None:
    router, x = make(selection=selection), tokens()
    upstream = directions(x, 5)
    clean, clean_grads = run(router, x, upstream, fused=True)
    x[40, 3] = float("nan")
    ours, grads = run(router, x, upstream, fused=True)
    others = torch.arange(len(x)) != 40
    for name in (*OUTPUTS, "selected"):
        assert torch.equal(ours[name][others], clean[name][others])
    assert torch.equal(grads["x"][others], clean_grads["x"][others])
    assert ours["probs"][40].isnan().all()
    count = int(ours["selected"][40].sum())
    if isinstance(
        selection, Dense | TopK
    ):  # as many as every other token; a gate of NaN has no mass to go by
        assert count == selection.max_experts(5)
    assert 1 <= count <= selection.max_experts(5)


@pytest.mark.parametrize("low", [-95.0, -130.0])  # the gates e^low: denormal in fp32, and zero
@pytest.mark.parametrize("make", [grassmann, softmax])
def test_renormalised_weights_where_a_bias_picks_vanished_gates(make: Any, low: float) -> None:
    """They were 0/0. In fp64, that is in the specification, no gate vanishes."""
    router = make(selection=TopK(2, renormalize=True))
    with torch.no_grad():
        router.log_prior.copy_(torch.tensor([0.0, 0.3, low, 0.1, low - 0.7]))
    router.budget.biased = True
    router.budget.set_bias([0.0, 0.0, 500.0, 0.0, 500.0])
    x = tokens()
    x = x / x.norm(dim=-1, keepdim=True).clamp(min=1)  # logits of size one beside the prior
    ours, _ = compare(router, x)
    assert ours["probs"][:, [2, 4]].max() < 1e-35
    assert torch.equal(ours["selected"].nonzero()[:, 1], torch.tensor([2, 4]).repeat(len(x)))
    torch.testing.assert_close(ours["weights"].sum(-1), torch.ones(len(x)))


@pytest.mark.parametrize("make", [grassmann, softmax])
def test_no_tokens(make: Any) -> None:
    ours, grads = compare(make(selection=TopK(2)), tokens(0))
    assert ours["selected"].shape == (0, 5)
    assert all(not g.any() for g in grads.values())


def test_ties_go_to_the_lower_expert() -> None:
    """As torch's stable sort has it: with a uniform gate everything ties."""
    for selection in (TopK(3), Mass(0.5), Threshold(0.3)):
        router = grassmann(selection=selection, alpha=0.0)
        chosen = run(router, tokens(9), {}, fused=True)[0]["selected"]
        most = {TopK: 3, Mass: 3, Threshold: 1}[type(selection)]
        assert torch.equal(chosen, (torch.arange(5) < most).expand(9, 5))


@pytest.mark.parametrize("make", [grassmann, softmax])
def test_half_precision_tokens(make: Any) -> None:
    router, x = make(D=40, selection=Dense()), tokens(33, 40)
    x = (x / x.norm(dim=-1, keepdim=True).clamp(min=1) * 6).half()  # rms one: no overflow on the way back
    upstream = directions(x, 5)
    ours, grads = run(router, x, upstream, fused=True)
    exact, exact_grads = run(twin(router), x, upstream, fused=False)
    # Frames and p = 2wλq are rounded to fp16 (2^-11 each), everything else is fp32.
    assert_close(ours, exact, 4 * 2**-11)
    assert_close(grads, exact_grads, 16 * 2**-11)
    assert grads["x"].dtype == torch.float16


def test_strided_inputs() -> None:
    """Tokens and upstream gradients may be any view."""
    router = grassmann(selection=TopK(2))
    wide, upstream = tokens(75, 64), directions(tokens(), 5)
    plain = run(router, wide[:, ::2].contiguous(), upstream, fused=True)
    views = {name: value.T.contiguous().T for name, value in upstream.items()}
    leaf = wide.clone().requires_grad_()
    router.zero_grad()
    operands = router.gate_operands()
    routing = fused_gate(leaf[:, ::2], operands, router.alpha_value, router.budget)
    torch.autograd.backward([getattr(routing, name) for name in OUTPUTS], [views[name] for name in OUTPUTS])
    assert leaf.grad is not None
    assert torch.equal(leaf.grad[:, ::2], plain[1]["x"])
    assert torch.equal(router.frames.grad, plain[1]["frames"])


def test_tokens_off_alignment() -> None:
    """A view that starts one element into its storage: the copy engine wants addresses of whole 16 bytes."""
    router, x = grassmann(selection=TopK(2)), tokens()
    shifted = torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)
    assert shifted.data_ptr() % 16
    operands = router.gate_operands()
    ours, plain = (fused_gate(t, operands, router.alpha_value, router.budget) for t in (shifted, x))
    for name in (*OUTPUTS, "selected"):
        assert torch.equal(getattr(ours, name), getattr(plain, name))


def strided(p: Tensor) -> torch.nn.Parameter:
    """The same values with the first two dimensions swapped in memory."""
    return torch.nn.Parameter(p.detach().transpose(0, 1).contiguous().transpose(0, 1))


def test_strided_frames() -> None:
    router = grassmann(selection=TopK(2))
    router.frames = strided(router.frames)
    compare(router, tokens())


def test_strided_concentrations() -> None:
    router = grassmann(selection=TopK(2), concentration="diagonal")
    router.log_kappa = strided(router.log_kappa)
    compare(router, tokens())


def test_a_linear_gate_has_one_dial() -> None:
    weight = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="posterior must be True for a linear gate"):
        gate(
            tokens(9),
            weight,
            None,
            torch.zeros(5),
            torch.tensor(1.0),
            tau=torch.tensor(2.0),
            cap=torch.tensor(5, dtype=torch.int32),
            posterior=False,
            max_experts=5,
            renormalize=False,
        )


def test_second_derivative_is_refused_not_dropped() -> None:
    router, x = grassmann(), tokens(9).requires_grad_()
    probs = fused_gate(x, router.gate_operands(), router.alpha_value, router.budget).probs
    (first,) = torch.autograd.grad(probs.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|differentiat"):
        (first.sum() + x.sum()).backward()


@pytest.mark.parametrize("what", ["frames", "log_kappa", "log_prior", "alpha_value"])
def test_power_a_wrong_operand_is_seen(what: str) -> None:
    """The comparison fails for a parameter 0.1 % off."""
    router, x = grassmann(selection=Dense(), alpha=1.7), tokens()
    upstream = directions(x, 5)
    ours, grads = run(router, x, upstream, fused=True)
    wrong = twin(router)
    with torch.no_grad():
        getattr(wrong, what).mul_(1.001)
    exact, exact_grads = run(wrong, x, upstream, fused=False)
    with pytest.raises(AssertionError, match="logits"):
        assert_close(ours, exact, 2e-5)
    with pytest.raises(AssertionError):
        assert_close(grads, exact_grads, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_a_linear_gate_fit(dtype: torch.dtype) -> None:
    """A stage holds tokens and rows of the matrix; a multiprocessor of a Hopper has 227 KB."""
    for experts in range(2, 257):
        for tiles in plan(dtype, experts, 1, False, True)[2:4]:
            stage = (tiles.tokens + tiles.columns) * tiles.width * dtype.itemsize
            assert tiles.columns >= experts
            assert stage * tiles.stages <= 227 * 1024
