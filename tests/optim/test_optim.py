"""GrassmannAdam: the manifold, the minimisers it finds, and that it is a torch optimiser like any other."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import geoopt
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grmoe.geometry import chordal_distance, haar_frames, orthonormality_error, orthonormalize
from grmoe.optim import GrassmannAdam, Manifold, split_parameters
from grmoe.optim.polar import inverse_sqrt_minus_one
from grmoe.optim.reference import reference_step
from grmoe.optim.stacks import existing_stack

MANIFOLDS: tuple[Manifold, ...] = ("grassmann", "stiefel")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frame_params(
    *shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[nn.Parameter]:
    g = rng(seed)
    return [nn.Parameter(haar_frames(s[-2], s[-1], s[:-2], generator=g, dtype=dtype)) for s in shapes]


def run(params: list[nn.Parameter], opt: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    """Steps with random gradients that depend on the seed and the parameter's place alone."""
    for t in range(steps):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=rng(1000 * seed + 100 * t + i), dtype=p.dtype)
        opt.step()


def covariance(dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A covariance with eigenvalues 1, 0.8, 0.64, … in random directions, and these, largest first."""
    V = haar_frames(dim, dim, generator=rng(seed), dtype=torch.float64)
    return (V * 0.8 ** torch.arange(dim, dtype=torch.float64)) @ V.mT, V


def minimise(opt: torch.optim.Optimizer, loss: Callable[[], Tensor], steps: int) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for _ in range(steps):
        opt.zero_grad()
        loss().backward()
        opt.step()
        schedule.step()


# ------------------------------------------------------------------------------------------- the manifold


@pytest.mark.parametrize("manifold", MANIFOLDS)
def test_matches_the_reference(manifold: Manifold) -> None:
    (p,) = frame_params((2, 3, 20, 4))
    options: dict[str, Any] = {"lr": 0.6, "betas": (0.8, 0.95), "max_step": 0.4, "manifold": manifold}
    opt = GrassmannAdam([p], **options)
    frames = [(U, torch.zeros_like(U), U.new_zeros(())) for U in p.detach().clone().flatten(0, 1)]
    capped = 0
    for t in range(1, 9):
        # Gradients of very different sizes, so that the cap is active for some steps and not for others.
        p.grad = torch.randn(p.shape, generator=rng(t), dtype=p.dtype) * 10.0 ** (t % 4 - 2)
        for e, (U, m, v) in enumerate(frames):
            frames[e] = reference_step(U, p.grad.flatten(0, 1)[e], m, v, t, **options)
        before = p.detach().clone()
        opt.step()
        capped += int(((p - before).norm(dim=(-2, -1)) > 0.36).sum())
        for got, want in zip(p.flatten(0, 1), frames, strict=True):
            torch.testing.assert_close(got, want[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(
            opt.state[p]["exp_avg"].flatten(0, 1)[2], frames[2][1], rtol=1e-11, atol=1e-13
        )
        torch.testing.assert_close(opt.state[p]["exp_avg_sq"].flatten()[2], frames[2][2], rtol=1e-11, atol=0)
    assert 0 < capped < 48


def gradient(kind: str, U: Tensor, t: int) -> Tensor:
    """A gradient at U. A vertical one, U·S, moves no subspace: only its rounding errors remain."""
    g = rng(t)
    if kind == "random":
        return torch.randn(U.shape, generator=g)
    if kind == "of many sizes":
        return torch.randn(U.shape, generator=g) * 10.0 ** (t % 9 - 4)
    A = torch.randn(*U.shape[:-2], U.shape[-1], U.shape[-1], generator=rng(0), dtype=torch.float64)
    G = U.double() @ (A @ A.mT)
    if kind == "almost vertical":
        G += 1e-3 * torch.randn(U.shape, generator=g, dtype=torch.float64)
    return G.float()


@pytest.mark.parametrize("manifold", MANIFOLDS)
@pytest.mark.parametrize("kind", ["random", "of many sizes", "vertical", "almost vertical"])
@pytest.mark.parametrize("shape", [(3, 16, 16), (768, 48), (2, 24, 20), (6, 1)])
def test_orthonormal_after_every_step(shape: tuple[int, ...], kind: str, manifold: Manifold) -> None:
    for lr in (0.02, 0.1, 100.0):
        (p,) = frame_params(shape, dtype=torch.float32)
        opt = GrassmannAdam([p], lr=lr, manifold=manifold)
        for t in range(36):
            p.grad = gradient(kind, p.detach(), t)
            opt.step()
            assert float(orthonormality_error(p.detach().double())) <= 1e-6, (lr, t)


@pytest.mark.parametrize("manifold", MANIFOLDS)
@pytest.mark.parametrize(
    ("dtype", "sizes"), [(torch.float32, (1e19, 1e25, 3e38)), (torch.float64, (1e155, 1e308))]
)
@pytest.mark.parametrize("shapes", [[(3, 20, 4)], [(20, 4), (2, 20, 4)]], ids=["one", "stacked"])
def test_gradients_whose_squares_overflow(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, sizes: tuple[float, ...], manifold: Manifold
) -> None:
    """They made frames and moments NaN. torch's Adam keeps its weights finite there."""
    for size in sizes:
        params = frame_params(*shapes, dtype=dtype)
        opt = GrassmannAdam(params, lr=0.1, manifold=manifold)
        frames = [
            (U, torch.zeros_like(U), U.new_zeros(()))
            for p in params
            for U in p.detach().clone().view(-1, 20, 4)
        ]
        for t, factor in enumerate((1.0, size, size, 1.0, 1e-3), start=1):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=rng(10 * t + i), dtype=dtype).clamp(-1, 1) * factor
            flat = [G for p in params for G in p.grad.view(-1, 20, 4)]
            frames = [
                reference_step(U, G, m, v, t, lr=0.1, manifold=manifold)
                for (U, m, v), G in zip(frames, flat, strict=True)
            ]
            before = [p.detach().clone() for p in params]
            opt.step()
            found = [U for p in params for U in p.detach().view(-1, 20, 4)]
            for U, (wanted, _, _) in zip(found, frames, strict=True):
                torch.testing.assert_close(U, wanted, rtol=0, atol=1e-5)
            assert all(float(orthonormality_error(p.detach())) <= 1e-6 for p in params)
            if factor == size:
                assert not any(map(torch.equal, before, params))
        for state in opt.state.values():
            assert all(bool(torch.isfinite(value).all()) for value in state.values())


def test_an_infinite_gradient_is_a_huge_one_and_nan_is_not_hidden() -> None:
    (p,) = frame_params((2, 20, 4), dtype=torch.float32)
    opt = GrassmannAdam([p])
    p.grad = torch.ones_like(p)
    p.grad[0, 3, 1] = float("inf")
    opt.step()
    assert float(orthonormality_error(p.detach())) <= 1e-6
    p.grad[0, 3, 1] = float("nan")
    opt.step()
    assert bool(p[0].isnan().any())
    assert float(orthonormality_error(p[1:].detach())) <= 1e-6  # frames of one stack are apart


def test_no_drift_over_ten_thousand_steps() -> None:
    (p,) = frame_params((4, 64, 8), dtype=torch.float32)
    opt = GrassmannAdam([p], lr=0.05)
    g, worst = rng(1), 0.0
    p.grad = torch.empty_like(p)
    for t in range(10_000):
        p.grad.normal_(generator=g)
        opt.step()
        if t % 10 == 9:
            worst = max(worst, float(orthonormality_error(p.detach().double())))
    assert worst <= 1e-6


@pytest.mark.parametrize("manifold", MANIFOLDS)
@pytest.mark.parametrize("lr", [0.0, 1e-6, (12 * torch.finfo(torch.float32).eps) ** 0.5, 0.02, 0.3])
def test_the_stored_inner_product_is_that_of_frame_and_momentum(lr: float, manifold: Manifold) -> None:
    """It follows from YᵀY − I, which has few correct digits in fp32 if steps are short."""
    (p,) = frame_params((2, 96, 12), dtype=torch.float32)
    opt = GrassmannAdam([p], lr=lr, manifold=manifold)
    for t in range(40):
        p.grad = gradient("random", p.detach(), t)
        opt.step()
        m = opt.state[p]["exp_avg"]
        error = (p.detach().mT @ m - opt.state[p]["inner"]).norm(dim=(-2, -1))
        assert (error <= 2e-3 * m.norm(dim=(-2, -1))).all()


def test_a_vertical_gradient_moves_no_subspace() -> None:
    (p,) = frame_params((3, 64, 8), dtype=torch.float32)
    before = p.detach().clone()
    opt = GrassmannAdam([p], lr=0.1)
    for t in range(40):
        p.grad = gradient("vertical", p.detach(), t)
        opt.step()
    assert (
        chordal_distance(p.detach().double(), before.double()).max() < 0.01
    )  # 40 steps of length 0.1 would be 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_step", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("length", [1.0, 1e-3])
def test_newton_schulz_up_to_the_cap(dtype: torch.dtype, max_step: float, length: float) -> None:
    X = torch.randn(5, 40, 6, generator=rng(1), dtype=torch.float64)
    X[0, :, 1:] = 0.0  # all of the cap in one direction: the largest singular value it allows
    X = length * max_step * X / X.norm(dim=(-2, -1), keepdim=True)
    E = (X.mT @ X).to(dtype)
    values, vectors = torch.linalg.eigh(E.double())
    exact = (vectors * torch.expm1(-0.5 * torch.log1p(values)).unsqueeze(-2)) @ vectors.mT
    got = inverse_sqrt_minus_one(E, 0.0, max_step**2).double()
    # A few roundings of Z itself, never of the one it stands next to; the last residual is under eps/4.
    eps = torch.finfo(dtype).eps
    assert (got - exact).abs().max() <= 8 * eps * float(exact.abs().max()) + eps / 4 * 0.75


def test_steps_keep_to_the_cap() -> None:
    (p,) = frame_params((3, 30, 5))
    before = p.detach().clone()
    opt = GrassmannAdam([p], lr=100.0, max_step=0.25)
    run([p], opt, 1)
    # On the tangent the step is 0.25 long; the chord of its retraction is a little shorter.
    length = (p - before).norm(dim=(-2, -1))
    assert ((length > 0.23) & (length <= 0.25)).all()


def test_invariant_under_rotations_of_the_frame() -> None:
    (p,) = frame_params((3, 24, 4))
    O = haar_frames(4, 4, 3, generator=rng(5), dtype=torch.float64)
    q = nn.Parameter(p.detach() @ O)
    a, b = GrassmannAdam([p], lr=0.1), GrassmannAdam([q], lr=0.1)
    for t in range(20):
        p.grad = torch.randn(p.shape, generator=rng(50 + t), dtype=p.dtype)
        q.grad = p.grad @ O
        a.step()
        b.step()
    torch.testing.assert_close(q.detach(), p.detach() @ O, rtol=0, atol=1e-12)
    assert chordal_distance(p.detach(), q.detach()).max() <= 1e-12


@pytest.mark.parametrize("manifold", MANIFOLDS)
def test_agrees_with_geoopt_to_second_order(manifold: Manifold) -> None:
    (p,) = frame_params((2, 16, 3))
    oracle = geoopt.EuclideanStiefel()
    U, G = p.detach().clone(), torch.randn(p.shape, generator=rng(3), dtype=p.dtype)
    if manifold == "grassmann":  # a gradient without a skew part, as every function of the subspace has it
        A = U.mT @ G
        G = G - U @ (A - A.mT) / 2
    direction = oracle.proju(U, G)
    direction = direction / direction.norm(dim=(-2, -1), keepdim=True)
    errors = []
    for lr in (1e-2, 1e-3):
        p.data.copy_(U)
        p.grad = G.clone()
        GrassmannAdam([p], lr=lr, manifold=manifold, eps=0.0).step()  # the first step has length lr
        torch.testing.assert_close((p.detach() - U) / lr, -direction, rtol=0, atol=2 * lr)
        errors.append(float((p.detach() - oracle.retr(U, -lr * direction)).norm()))
    assert 1e-8 < errors[1] < 1e-6
    assert 80 < errors[0] / errors[1] < 120  # ten times shorter, a hundred times closer


def test_maximize_is_minimising_the_negative() -> None:
    (p,), (q,) = frame_params((2, 12, 3)), frame_params((2, 12, 3))
    up, down = GrassmannAdam([p], maximize=True), GrassmannAdam([q])
    for t in range(5):
        p.grad = torch.randn(p.shape, generator=rng(t), dtype=p.dtype)
        q.grad = -p.grad
        up.step()
        down.step()
    torch.testing.assert_close(p, q, rtol=0, atol=1e-14)


# --------------------------------------------------------------------------------------------- minimisers


def test_finds_the_top_eigenspace() -> None:
    C, V = covariance(32)
    (p,) = frame_params((3, 32, 4), seed=1)
    opt = GrassmannAdam([p], lr=0.1, maximize=True)
    minimise(opt, lambda: (p * (C @ p)).sum(), 400)
    energy = (p * (C @ p)).sum((-2, -1)).detach()
    best = (V[:, :4] * (C @ V[:, :4])).sum()
    assert (energy / best >= 1 - 1e-6).all()
    assert chordal_distance(p.detach(), V[:, :4].expand(3, 32, 4)).max() <= 1e-2


@pytest.mark.parametrize("manifold", MANIFOLDS)
def test_only_stiefel_tells_columns_apart(manifold: Manifold) -> None:
    """max tr(UᵀCUΛ) with distinct λ is attained at the eigenvectors, in the order of λ (Brockett)."""
    C, V = covariance(16)
    (p,) = frame_params((2, 16, 3), seed=1)
    weights = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    opt = GrassmannAdam([p], lr=0.1, maximize=True, manifold=manifold)
    minimise(opt, lambda: (p * (C @ p) * weights).sum(), 600)
    cosines = (p.detach() * V[:, :3]).sum(-2).abs()
    if manifold == "stiefel":
        assert (cosines >= 1 - 1e-6).all()
    else:
        assert cosines.min() < 0.99


# ------------------------------------------------------------------------------------------ torch's contract


def test_state_dict_round_trip_is_bit_for_bit() -> None:
    shapes = ((4, 16, 3), (4, 16, 3), (12, 2))
    whole = frame_params(*shapes, dtype=torch.float32)
    opt = GrassmannAdam(whole, lr=0.1)
    run(whole, opt, 5)
    buffer = io.BytesIO()
    torch.save({"params": whole, "opt": opt.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    resumed = [nn.Parameter(p.detach().clone()) for p in saved["params"]]
    other = GrassmannAdam(resumed, lr=0.7)
    other.load_state_dict(saved["opt"])
    assert other.param_groups[0]["lr"] == 0.1
    run(whole, opt, 5, seed=2)
    run(resumed, other, 5, seed=2)
    for a, b in zip(whole, resumed, strict=True):
        assert torch.equal(a, b)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(opt.state[a][key], other.state[b][key])


def test_loaded_state_is_not_shared() -> None:
    (p,), (q,) = frame_params((2, 10, 3)), frame_params((2, 10, 3))
    a, b = GrassmannAdam([p]), GrassmannAdam([q])
    run([p], a, 2)
    b.load_state_dict(a.state_dict())
    momentum = a.state[p]["exp_avg"].clone()
    run([q], b, 2)
    assert torch.equal(a.state[p]["exp_avg"], momentum)
    assert float(a.state[p]["step"]) == 2


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_continue_alike(clone: Callable[[Any], Any]) -> None:
    params = frame_params((4, 16, 3), (2, 16, 3))
    opt = GrassmannAdam(params, lr=0.1)
    run(params, opt, 3)
    twin = clone(opt)
    twins = twin.param_groups[0]["params"]
    run(params, opt, 3, seed=2)
    run(twins, twin, 3, seed=2)
    for a, b in zip(params, twins, strict=True):
        assert a is not b
        assert torch.equal(a, b)


def test_buckets_equal_separate_optimisers() -> None:
    shapes = ((3, 20, 4), (3, 20, 4), (2, 2, 20, 4), (20, 4), (5, 12, 4), (1, 20, 1))
    together, apart = frame_params(*shapes), frame_params(*shapes)
    opt = GrassmannAdam(together, lr=0.1)
    run(together, opt, 4)
    for i, p in enumerate(apart):
        single = GrassmannAdam([p], lr=0.1)
        for t in range(4):
            p.grad = torch.randn(p.shape, generator=rng(1000 + 100 * t + i), dtype=p.dtype)
            single.step()
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_a_stack_is_recognised_by_its_slices() -> None:
    one, other = torch.zeros(4, 3, 2), torch.zeros(4, 3, 2)
    assert existing_stack([one[:1], one[1:]]) is one
    assert existing_stack([one[:1], other[1:]]) is None  # a slice of another stack
    assert existing_stack([one[:1], one[2:]]) is None  # a gap
    assert existing_stack([one[:1], one[1:3]]) is None  # not all of it
    assert existing_stack([one, other]) is None  # no slices


def test_parameters_without_gradient_are_skipped_and_may_join_later() -> None:
    a, b = frame_params((2, 16, 3), (2, 16, 3))
    opt = GrassmannAdam([a, b], lr=0.1)
    before = b.detach().clone()
    run([a], opt, 3)
    assert torch.equal(b, before)
    assert b not in opt.state
    run([a, b], opt, 3, seed=2)
    (c,) = frame_params((2, 16, 3), seed=0)
    alone = GrassmannAdam([c], lr=0.1)
    run([c], alone, 3)
    run([c], alone, 3, seed=2)
    torch.testing.assert_close(a, c, rtol=0, atol=1e-13)
    assert [float(opt.state[p]["step"]) for p in (a, b)] == [6, 3]


def test_non_contiguous_parameters() -> None:
    (p,) = frame_params((3, 16, 4))
    q = nn.Parameter(p.detach().mT.contiguous().mT)
    assert not q.is_contiguous()
    run([p], GrassmannAdam([p], lr=0.1), 3)
    run([q], GrassmannAdam([q], lr=0.1), 3)
    torch.testing.assert_close(p, q, rtol=0, atol=1e-13)


def test_groups_schedulers_closure_and_hooks() -> None:
    a, b, c = frame_params((2, 12, 3), (2, 12, 3), (12, 3))
    groups = [{"params": [a], "lr": 0.01}, {"params": [b], "manifold": "stiefel"}]
    opt = GrassmannAdam(groups, lr=0.1)
    opt.add_param_group({"params": [c], "lr": 0.0})
    assert [g["lr"] for g in opt.param_groups] == [0.01, 0.1, 0.0]
    assert [g["manifold"] for g in opt.param_groups] == ["grassmann", "stiefel", "grassmann"]
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.1)
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    before = [p.detach().clone() for p in (a, b, c)]

    def closure() -> Tensor:
        calls.append("closure")
        opt.zero_grad()
        loss = sum(p[..., 0].sum() for p in (a, b, c))
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss

    first = opt.step(closure)  # type: ignore[arg-type]
    assert isinstance(first, Tensor)
    assert calls == ["pre", "closure", "post"]
    moved = [
        float((p - old).detach().flatten(0, -3).norm(dim=(-2, -1)).max())
        for p, old in zip((a, b), before, strict=False)
    ]
    assert moved == pytest.approx([0.01, 0.1], rel=0.01)
    torch.testing.assert_close(c.detach(), before[2], rtol=0, atol=1e-14)  # lr = 0 moves nothing
    schedule.step()
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.001, 0.01, 0.0])
    before = [a.detach().clone()]
    opt.step(closure)  # type: ignore[arg-type]
    assert float((a - before[0]).detach().norm(dim=(-2, -1)).max()) < 0.0015


def test_zero_gradients_move_nothing() -> None:
    (p,) = frame_params((2, 12, 3), dtype=torch.float32)
    before = p.detach().clone()
    opt = GrassmannAdam([p])
    p.grad = torch.zeros_like(p)
    opt.step()
    torch.testing.assert_close(p.detach(), before, rtol=0, atol=1e-6)
    opt.zero_grad()
    assert opt.step() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"eps": -1.0}, "eps"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"betas": "ab"}, "betas must be two numbers"),
        ({"betas": None}, "betas must be two numbers"),
        ({"betas": (0.9, "x")}, "betas must be a finite number"),
        ({"manifold": "sphere"}, "manifold"),
        ({"max_step": 0.0}, "max_step"),
        ({"max_step": 1.5}, "max_step"),
    ],
)
def test_bad_options(change: dict[str, Any], message: str) -> None:
    params = frame_params((2, 12, 3), (2, 12, 3))
    with pytest.raises(ValueError, match=message):
        GrassmannAdam(params, **change)
    opt = GrassmannAdam(params[:1])
    with pytest.raises(ValueError, match=message):
        opt.add_param_group({"params": params[1:], **change})
    assert len(opt.param_groups) == 1


def test_bad_parameters_and_gradients() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match=rf"{dtype}.*stall"):
            GrassmannAdam([nn.Parameter(torch.eye(4, 2, dtype=dtype))])
    with pytest.raises(ValueError, match="k <= d"):
        GrassmannAdam([nn.Parameter(torch.eye(2, 4))])
    with pytest.raises(ValueError, match="k <= d"):
        GrassmannAdam([nn.Parameter(torch.zeros(4))])
    with pytest.raises(ValueError, match="floating"):
        GrassmannAdam([nn.Parameter(torch.eye(4, 2, dtype=torch.complex64))])
    for empty in (
        (0, 4, 2),
        (2, 0, 4, 2),
        (4, 0),
        (0, 0),
    ):  # the first step once failed, with a message of LAPACK
        with pytest.raises(ValueError, match="params must"):
            GrassmannAdam([nn.Parameter(torch.zeros(empty))])
    p = nn.Parameter(torch.eye(4, 2))
    opt = GrassmannAdam([p])
    p.grad = torch.eye(4, 2).to_sparse()
    with pytest.raises(ValueError, match="dense"):
        opt.step()
    assert not opt.state


# -------------------------------------------------------------------------------------------- damaged frames


@pytest.mark.parametrize("when", ["first", "later", "reload"])
def test_damaged_frames_are_repaired(when: str) -> None:
    p, q = frame_params((4, 20, 3), (2, 20, 3), dtype=torch.float32)
    opt = GrassmannAdam([p, q], lr=0.01)
    if when != "first":
        run([p, q], opt, 3)
    healthy = p.detach().clone()
    mixing = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.3, 0.0], [0.0, 0.0, 5.0]])
    damaged = torch.cat([healthy[:1] @ mixing, healthy[1:]])
    with torch.no_grad():
        p.copy_(damaged)
    if when == "reload":
        opt.load_state_dict(opt.state_dict())
    run([p, q], opt, 1, seed=2)
    assert orthonormality_error(p.detach().double()) <= 1e-6
    # The repair keeps the subspace; the step moves it by a small multiple of lr.
    assert float(chordal_distance(p.detach()[0], orthonormalize(healthy[0]))) < 0.03
    assert chordal_distance(p.detach()[1:], healthy[1:]).max() < 0.03


def test_healthy_frames_are_left_alone() -> None:
    """Looking at the frames again (a reload, a write of the same values) changes no bit of the next step."""
    (p,), (q,) = frame_params((3, 20, 4), dtype=torch.float32), frame_params((3, 20, 4), dtype=torch.float32)
    a, b = GrassmannAdam([p]), GrassmannAdam([q])
    for t in range(3):
        run([p], a, 1, seed=t)
        with torch.no_grad():
            q.copy_(q.clone())
        run([q], b, 1, seed=t)
    assert torch.equal(p, q)


# ----------------------------------------------------------------------------------------------- no loops


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def ops(layers: int, experts: int) -> Counter[str]:
    params = frame_params(*[(experts, 16, 3)] * layers)
    opt = GrassmannAdam(params)
    run(params, opt, 2)
    with Ops() as mode:
        opt.step()
    return mode.count


def test_the_number_of_operations_depends_on_neither_experts_nor_layers() -> None:
    base = ops(2, 2)
    assert base["bmm"] + base["baddbmm_"] > 0
    assert ops(2, 64) == base
    # Per layer: views of its parameter, gradient and slice, and one read of its counter. No arithmetic.
    bookkeeping = {"view", "reshape", "_unsafe_view", "_local_scalar_dense", "item", "detach"}
    more = ops(9, 2)
    assert {name for name in more if more[name] != base[name]} <= bookkeeping


# ------------------------------------------------------------------------------------------ split_parameters


class Router(nn.Module):
    def __init__(self, diagonal: bool) -> None:
        super().__init__()
        self.frames = nn.Parameter(haar_frames(8, 2, 4))
        self.log_kappa = nn.Parameter(torch.zeros((4, 2) if diagonal else (4,)))
        self.bias = nn.Parameter(torch.zeros(4))


def test_split_parameters() -> None:
    model = nn.ModuleDict({"scalar": Router(False), "diagonal": Router(True), "out": nn.Linear(3, 3)})
    scalar, diagonal, out = model["scalar"], model["diagonal"], model["out"]
    model["tied"] = Router(True)
    model["tied"].frames = scalar.frames  # used with a scalar and with a diagonal Λ: the columns matter
    model["frozen"] = Router(False).requires_grad_(False)
    model["bare"] = nn.Module()
    model["bare"].frames = nn.Parameter(haar_frames(8, 2))
    out.bias = scalar.bias
    split = split_parameters(model)
    groups = {g["manifold"]: g["params"] for g in split.frame_groups}
    assert [id(p) for p in groups["grassmann"]] == [id(model["bare"].frames)]
    assert [id(p) for p in groups["stiefel"]] == [id(scalar.frames), id(diagonal.frames)]
    assert [id(p) for p in split.kappa] == [id(r.log_kappa) for r in (scalar, diagonal, model["tied"])]
    found = [p for group in split.frame_groups for p in group["params"]] + split.kappa + split.rest
    assert Counter(map(id, found)) == Counter(id(p) for p in model.parameters() if p.requires_grad)
    opt = GrassmannAdam(split.frame_groups, lr=0.01)
    assert [g["manifold"] for g in opt.param_groups] == ["grassmann", "stiefel"]


def test_split_of_a_model_without_frames() -> None:
    split = split_parameters(nn.Linear(2, 2))
    assert split.frame_groups == []
    assert split.kappa == []
    assert len(split.rest) == 2


@pytest.mark.parametrize("stacks", [1, 3])
def test_a_flagged_step_changes_nothing(stacks: int) -> None:
    torch.manual_seed(0)
    frames = [nn.Parameter(haar_frames(16, 3, (4,))) for _ in range(stacks)]
    optimizer = GrassmannAdam(frames, lr=0.05)

    def move(value: float = 0.0) -> None:
        for p in frames:
            p.grad = torch.randn_like(p) + value
        optimizer.step()

    move()
    before = [p.detach().clone() for p in frames]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.found_inf = torch.ones(())
    move(float("nan"))
    move()
    optimizer.uncount_steps(2)
    assert all(map(torch.equal, before, frames))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(state[i][name], after[i][name]) for i in state for name in state[i])
    optimizer.found_inf = torch.zeros(())
    move()
    assert not any(map(torch.equal, before, frames))


def test_a_skipped_step_does_not_undo_a_repair() -> None:
    stretched = haar_frames(32, 4, 3) @ torch.diag(torch.tensor([3.0, 1.0, 1.0, 1.0]))
    frames = nn.Parameter(stretched)
    optimizer = GrassmannAdam([frames])
    for skipped in (1.0, 0.0, 0.0):
        frames.grad = torch.randn_like(frames)
        optimizer.found_inf = torch.tensor(skipped)
        optimizer.step()
        assert float(orthonormality_error(frames.detach())) < 1e-5
