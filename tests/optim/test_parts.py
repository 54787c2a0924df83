"""The parts of `GrassmannAdam`, each on its own.

Legend: N frames, D model width, K subspace rank.
"""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grmoe.geometry import haar_frames
from grmoe.optim import GrassmannAdam, grassmann_adam, split_parameters, stacks
from grmoe.optim.grassmann_adam import (
    _gram_weight,
    _largest_scale,
    _needs_repair,
    _tangent_square,
    _vertical,
)
from grmoe.optim.polar import repair
from grmoe.optim.reference import reference_step

F64 = torch.float64
EPS = torch.finfo(F64).eps


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frames(N: int = 3, D: int = 20, K: int = 3) -> Tensor:
    return haar_frames(D, K, N, generator=rng(), dtype=F64)


# ---------------------------------------------------------------------------------------------------- the state


def test_a_loaded_counter_is_a_single_precision_number_on_the_cpu() -> None:
    p, q = (nn.Parameter(haar_frames(10, 3, 2, generator=rng())) for _ in range(2))
    source, target = GrassmannAdam([p]), GrassmannAdam([q])
    p.grad = torch.randn(p.shape, generator=rng(1))
    source.step()
    for counter in (torch.tensor(7.0, dtype=F64), torch.tensor(7), 7):
        saved = source.state_dict()
        saved["state"] = {0: saved["state"][0] | {"step": counter}}
        target.load_state_dict(saved)
        step = target.state[q]["step"]
        assert (step.dtype, step.device.type, float(step)) == (torch.float32, "cpu", 7.0)
    assert target._last_seen == {}
    # An entry of something else is left alone: it has no counter to move.
    saved = source.state_dict()
    saved["state"] = {0: {"note": 3}}
    target.load_state_dict(saved)
    assert target.state[q] == {"note": 3}


def test_the_first_state_of_a_parameter() -> None:
    p = nn.Parameter(torch.zeros(2, 5, 10, 3, dtype=F64))
    state = GrassmannAdam.initial_state(p)
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "step": (), "exp_avg": (2, 5, 10, 3), "exp_avg_sq": (2, 5, 1, 1), "inner": (2, 5, 3, 3),
    }  # fmt: skip
    assert not any(value.any() or value.requires_grad for value in state.values())
    assert state["step"].dtype == torch.float32
    assert state["exp_avg"].dtype == F64


def test_the_defaults_of_the_step_and_of_its_reference() -> None:
    want = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-8, "manifold": "grassmann", "max_step": 0.5}
    p = nn.Parameter(torch.eye(4, 2))
    assert GrassmannAdam([p]).defaults == want | {"maximize": False}
    parameters = inspect.signature(reference_step).parameters
    assert {name: parameters[name].default for name in want} == want
    U, G = frames(1)[0], torch.randn(20, 3, generator=rng(1), dtype=F64)
    zero = torch.zeros_like(U), torch.zeros((), dtype=F64)
    given = reference_step(U, G, *zero, 1, **want)  # type: ignore[arg-type]
    assert all(map(torch.equal, reference_step(U, G, *zero, 1), given))


def test_limits_of_the_options() -> None:
    p = nn.Parameter(torch.eye(4, 2))
    for good in (
        {"lr": 0.0},
        {"eps": 0.0},
        {"betas": (0.0, 0.0)},
        {"betas": (0.9999, 0.0)},
        {"max_step": 1.0},
    ):
        GrassmannAdam([p], **good)  # type: ignore[arg-type]
    for bad in ({"betas": (1.0, 0.9)}, {"betas": (-0.1, 0.9)}, {"betas": (0.9, 0.9, 0.9)}, {"eps": -1e-9}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            GrassmannAdam([p], **bad)  # type: ignore[arg-type]


def test_frames_are_looked_at_only_where_something_else_wrote_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looking waits for the device."""
    looks: list[int] = []

    def look(U: Tensor, m: Tensor, UtM: Tensor) -> bool:
        looks.append(len(U))
        return _needs_repair(U, m, UtM)

    monkeypatch.setattr(grassmann_adam, "_needs_repair", look)
    p, q = (nn.Parameter(haar_frames(8, 2, n, generator=rng())) for n in (2, 3))
    optimizer = GrassmannAdam([p, q])

    def step() -> list[int]:
        looks.clear()
        for one in (p, q):
            one.grad = torch.randn(one.shape, generator=rng(1))
        optimizer.step()
        return list(looks)

    assert [step() for _ in range(3)] == [[5], [], []]  # as one stack
    with torch.no_grad():
        q.copy_(q.clone())
    assert [step(), step()] == [[5], []]
    optimizer.load_state_dict(optimizer.state_dict())
    assert [step(), step()] == [[5], []]
    p.data = p.data.clone()  # other memory
    assert [step(), step()] == [[5], []]


def test_a_scratch_tensor_is_kept_for_each_kind_of_stack() -> None:
    p = nn.Parameter(haar_frames(8, 2, 2, generator=rng()))
    optimizer = GrassmannAdam([p])
    for _ in range(2):
        p.grad = torch.randn(p.shape, generator=rng(1))
        optimizer.step()
    assert [tuple(t.shape) for t in optimizer._workspaces.values()] == [(2, 8, 2)]
    first = optimizer._workspace(p)
    assert optimizer._workspace(p) is first
    assert optimizer._workspace(p.double()).dtype == F64


def test_steps_that_the_device_skipped_are_not_counted() -> None:
    p = nn.Parameter(haar_frames(8, 2, 2, generator=rng()))
    optimizer = GrassmannAdam([p])
    for _ in range(5):
        p.grad = torch.randn(p.shape, generator=rng(1))
        optimizer.step()
    assert float(optimizer.state[p]["step"]) == 5
    optimizer.uncount_steps(2)
    assert float(optimizer.state[p]["step"]) == 3


# --------------------------------------------------------------------------------------------------- the repair


def test_what_needs_a_repair() -> None:
    U, m = frames(), torch.randn(3, 20, 3, generator=rng(1), dtype=F64)
    inner = U.mT @ m
    assert not _needs_repair(U, m, inner)
    assert not _needs_repair(U, torch.zeros_like(m), torch.zeros_like(inner))
    # YᵀY − I of U·(1+δ) is 2δ: the limit is 100 eps.
    for delta, needs in ((40, False), (60, True)):
        spoilt = U.clone()
        spoilt[1] *= 1 + delta * EPS
        assert _needs_repair(spoilt, m, spoilt.mT @ m) is needs
    spoilt = U.clone()
    spoilt[2, 0, 0] = math.nan
    assert _needs_repair(spoilt, m, inner)
    # Uᵀm of other frames: wrong by more than a hundredth of ‖m‖ in any one frame.
    for share, needs in ((0.005, False), (0.02, True)):
        stale = inner.clone()
        stale[2, 0, 1] += share * m[2].norm()
        assert _needs_repair(U, m, stale) is needs


def test_small_damage_is_removed_by_the_nearest_frame_and_large_damage_by_qr() -> None:
    U = frames(4)
    damaged = U.clone()
    damaged[1] += 1e-3 * torch.randn(20, 3, generator=rng(2), dtype=F64)
    damaged[2] *= 3.0
    damaged[3, :, 0] += 0.5 * damaged[3, :, 1]
    left, _, right = torch.linalg.svd(damaged[1], full_matrices=False)
    fixed = damaged.clone()
    repair(fixed)
    error = (fixed.mT @ fixed - torch.eye(3, dtype=F64)).abs().amax()
    assert float(error) <= 1e-14
    torch.testing.assert_close(fixed[0], U[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(fixed[1], left @ right, rtol=0, atol=1e-12)
    torch.testing.assert_close(fixed[2], U[2], rtol=0, atol=1e-12)
    torch.testing.assert_close(
        fixed[3] @ fixed[3].mT, U[3] @ U[3].mT, rtol=0, atol=1e-12
    )  # the subspace stays
    alone = damaged[1:2].clone()
    repair(alone)
    torch.testing.assert_close(alone[0], fixed[1], rtol=0, atol=1e-14)


# -------------------------------------------------------------------------------------------------- the formulas


def test_the_tangent_part_of_a_gradient() -> None:
    U, G = frames(), torch.randn(3, 20, 3, generator=rng(3), dtype=F64)
    UtG = U.mT @ G
    assert _vertical(UtG, "grassmann") is UtG
    symmetric = _vertical(UtG, "stiefel")
    torch.testing.assert_close(symmetric, 0.5 * UtG + 0.5 * UtG.mT)
    H = G - U @ UtG
    torch.testing.assert_close(_tangent_square(G, UtG).flatten(), H.square().sum((1, 2)))
    vertical = U @ UtG
    floor = 8 * EPS * vertical.square().sum((1, 2))
    torch.testing.assert_close(_tangent_square(vertical, 2 * UtG).flatten(), floor)  # never negative or zero
    with_stiefel = G - U @ symmetric
    inner = U.mT @ with_stiefel
    torch.testing.assert_close(inner, -inner.mT, rtol=0, atol=1e-13)  # tangent to the Stiefel manifold


def test_the_longest_step() -> None:
    norm = torch.tensor([4.0, 0.0], dtype=F64).view(2, 1, 1)
    small = torch.zeros(2, 3, 3, dtype=F64)
    assert _largest_scale(norm, small, 0.5).flatten().tolist() == [0.125, math.inf]
    # A gradient that is almost vertical: rounding errors of 8·√k·eps·‖W‖ stay within 0.01.
    large = torch.zeros(2, 9, 9, dtype=F64)
    large[0, 0, 0] = large[0, 1, 1] = 1e16
    got = float(_largest_scale(norm, large, 0.5)[0])
    assert got == pytest.approx(0.01 / (8 * math.sqrt(9) * EPS * math.hypot(4.0, math.sqrt(2) * 1e16)))


def test_the_weight_of_the_measured_gram_matrix() -> None:
    U = torch.zeros(1, 9, 3, dtype=F64)
    noise = 3 * EPS

    def weight(norm: float, scale: float) -> float:
        one = torch.ones(1, 1, 1, dtype=F64)
        return float(_gram_weight(norm * one, scale * one, U))

    assert weight(2.0, 0.1) == pytest.approx(10.0)  # 1/scale for an ordinary step
    length = math.sqrt(noise)  # ‖ξ‖² as large as the noise: half of that
    assert weight(1.0, length) == pytest.approx(0.5 / length)
    assert weight(1.0, 1e-3 * length) < 1e-8 / length
    assert weight(0.0, 0.1) == 0.0


def test_a_step_of_the_reference_by_hand() -> None:
    """One direction in the plane: U = e₁, G = (g₁, g₂). The tangent part is (0, g₂)."""
    U, G, zero = (
        torch.tensor([[1.0], [0.0]], dtype=F64),
        torch.tensor([[5.0], [2.0]], dtype=F64),
        torch.zeros(2, 1),
    )
    m0, v0 = zero.double(), torch.zeros((), dtype=F64)
    U1, m, v = reference_step(U, G, m0, v0, 1, lr=0.1, betas=(0.8, 0.9), eps=0.0)
    torch.testing.assert_close(m, torch.tensor([[0.0], [0.4]], dtype=F64))  # (1 − β₁)·2
    assert float(v) == pytest.approx(0.4)  # (1 − β₂)·2²
    # Bias-corrected, the first step has length lr: U turns by arctan(0.1), against the gradient.
    assert math.atan2(float(U1[1]), float(U1[0])) == pytest.approx(-math.atan(0.1))
    # A second moment that is there already: v = 0.9·3 + 0.1·4 = 3.1, after two steps v̂ = 3.1/0.19.
    m1 = torch.tensor([[7.0], [1.0]], dtype=F64)  # its part along U is projected away
    U2, m, v = reference_step(U, G, m1, torch.tensor(3.0, dtype=F64), 2, lr=0.1, betas=(0.8, 0.9), eps=1.0)
    assert float(v) == pytest.approx(3.1)
    torch.testing.assert_close(m, torch.tensor([[0.0], [0.8 + 0.4]], dtype=F64))
    xi = -0.1 * (1.2 / 0.36) / (math.sqrt(3.1 / 0.19) + 1.0)
    assert math.atan2(float(U2[1]), float(U2[0])) == pytest.approx(math.atan(xi))
    U3, _, _ = reference_step(U, G, m0, v0, 1, lr=9.0, eps=0.0, max_step=0.5)
    assert math.atan2(float(U3[1]), float(U3[0])) == pytest.approx(-math.atan(0.5))


# ------------------------------------------------------------------------------------------------------ groups


def test_the_manifold_follows_the_shape_of_kappa() -> None:
    class Owner(nn.Module):
        def __init__(self, kappa: Any) -> None:
            super().__init__()
            self.frames = nn.Parameter(haar_frames(8, 2, 4))
            self.log_kappa = kappa

    scalar, diagonal = Owner(nn.Parameter(torch.zeros(4))), Owner(nn.Parameter(torch.zeros(4, 2)))
    without, number = Owner(None), Owner(0.5)
    owners = [scalar, diagonal, without, number]
    split = split_parameters(nn.ModuleList(owners))
    groups = {g["manifold"]: [id(p) for p in g["params"]] for g in split.frame_groups}
    assert groups == {
        "grassmann": [id(o.frames) for o in (scalar, without, number)],
        "stiefel": [id(diagonal.frames)],
    }
    assert [id(p) for p in split.kappa] == [id(scalar.log_kappa), id(diagonal.log_kappa)]
    assert split.rest == []
    assert [g["manifold"] for g in split_parameters(diagonal).frame_groups] == ["stiefel"]


def test_stacks_on_the_cpu_stay_within_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_CPU_STACK", 100)
    params = [torch.zeros(size, 5, 2) for size in (4, 6, 1, 20, 3, 3, 3, 1)]
    sizes = [[len(p) for p in chunk] for chunk in stacks.chunks(params)]
    # Ten elements per frame: at most ten frames, but a tensor is never cut.
    assert sizes == [[4, 6], [1], [20], [3, 3, 3, 1]]
    assert [p is q for p, q in zip((p for c in stacks.chunks(params) for p in c), params, strict=True)] == [
        True
    ] * 8


def test_the_size_of_a_stack() -> None:
    """1 MiB of fp32 on the CPU; on a GPU one stack for everything."""

    def sizes(device: str, *numels: int) -> list[list[int]]:
        params: list[Any] = [
            SimpleNamespace(device=torch.device(device), numel=lambda n=n: n) for n in numels
        ]
        return [[p.numel() for p in chunk] for chunk in stacks.chunks(params)]

    half = 2**17
    assert sizes("cpu", half, half, half) == [[half, half], [half]]
    assert sizes("cpu", half, half, 1) == [[half, half], [1]]
    assert sizes("cpu", 2**20, 1) == [[2**20], [1]]
    assert sizes("cuda", half, half, half, 2**30) == [[half, half, half, 2**30]]


def test_slices_of_a_stack_are_known_by_their_place() -> None:
    whole = torch.zeros(6, 5, 2)
    a, b, c = whole[:2], whole[2:3], whole[3:]
    assert stacks.existing_stack([a, b, c]) is whole
    for parts in ([a, b], [b, c], [a, c], [b, a, c], [a, b, torch.zeros(3, 5, 2)]):
        assert stacks.existing_stack(parts) is None
    assert stacks.existing_stack([whole]) is None  # not a view of anything
    single = torch.zeros(2, 3, 5, 2)
    assert stacks.stack([single]).data_ptr() == single.data_ptr()
    assert stacks.stack([single]).shape == (6, 5, 2)
    turned = torch.zeros(3, 2, 5).mT
    assert stacks.stack([turned]).is_contiguous()
    assert stacks.stack([single, turned]).shape == (9, 5, 2)
    assert [tuple(s.shape) for s in stacks.slices(torch.zeros(9, 1, 1), [single, turned])] == [
        (2, 3, 1, 1), (3, 1, 1),
    ]  # fmt: skip
