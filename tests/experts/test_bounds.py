"""Bounds on an expert's output from its weights: never below the truth, and close to it where it can be reached."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grmoe.experts.bounds import POWER, output_gains, spectral_norm_bound
from grmoe.experts.weights import Activation, ExpertWeights

SEEDS = st.integers(0, 2**32 - 1)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def output(weights: ExpertWeights, e: int, x: Tensor) -> Tensor:
    return weights.activate(x @ weights.up[e].T) @ weights.down_proj[e].T


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.floats(-150, 150), SEEDS)
def test_spectral_bound_lies_between_the_norm_and_its_root(
    rows: int, columns: int, rank: int, decade: float, seed: int
) -> None:
    W = randn(rows, rank, seed=seed) @ randn(rank, columns, seed=seed + 1) * 10.0**decade
    norm = float(torch.linalg.matrix_norm(W, 2))
    bound = float(spectral_norm_bound(W))
    assert norm * (1 - 1e-10) <= bound  # fp64, on both sides of the comparison
    assert bound <= norm * min(rows, columns, rank) ** (1 / 128) * (1 + 1e-10)


def test_spectral_bound_at_the_edges() -> None:
    assert float(spectral_norm_bound(torch.zeros(3, 5))) == 0.0
    # Equal singular values are the worst case, n^(1/128); rank one is exact.
    assert float(spectral_norm_bound(torch.eye(300))) == pytest.approx(300 ** (1 / 128))
    assert float(spectral_norm_bound(torch.eye(1024))) < 1.06
    rank_one = torch.outer(randn(7, seed=0), randn(9, seed=1))
    assert float(spectral_norm_bound(rank_one)) == pytest.approx(float(rank_one.norm()))
    assert spectral_norm_bound(torch.full((2, 2), torch.nan)).isnan()
    assert spectral_norm_bound(torch.eye(4).bfloat16()).dtype == torch.float64


@given(
    st.sampled_from(["swiglu", "gelu"]),
    st.integers(1, 12),
    st.integers(1, 24),
    st.floats(-3, 3),
    st.floats(-3, 3),
    SEEDS,
)
def test_no_output_exceeds_the_gain(
    activation: Activation, dim: int, hidden: int, decade_W: float, decade_x: float, seed: int
) -> None:
    weights = ExpertWeights(dim, hidden, 3, activation).double().requires_grad_(False)
    weights.up.copy_(randn(*weights.up.shape, seed=seed) * 10.0**decade_W)
    weights.down_proj.copy_(randn(*weights.down_proj.shape, seed=seed + 1))
    gain_N = output_gains(weights)
    assert gain_N.shape == (3,)
    for e in range(3):
        # Random directions and the ones that the projections stretch most.
        top = torch.linalg.svd(weights.up[e])[2][:3]
        x_TD = torch.cat([randn(50, dim, seed=seed + 2), top, -top]) * 10.0**decade_x
        limit_T = gain_N[e] * x_TD.norm(dim=-1) ** POWER[activation]
        assert bool((output(weights, e, x_TD).norm(dim=-1) <= limit_T).all())


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_gain_is_reached_by_a_rank_one_expert(activation: Activation) -> None:
    weights = ExpertWeights(6, 5, 1, activation).double().requires_grad_(False)
    v, w = randn(6, seed=0), randn(6, seed=1)
    weights.up.zero_()
    weights.down_proj.zero_()
    weights.up[0, ::5] = v  # hidden unit 0, of the gate and of the linear part
    weights.down_proj[0, :, 0] = w
    x = 30 * v / v.norm()  # silu(a) and gelu(a) are a to 1e-12 from a = 30 on
    length = float(output(weights, 0, x).norm())
    gain = float(output_gains(weights))
    assert length == pytest.approx(gain * 30 ** POWER[activation], rel=2e-5)  # the slack
    assert length > 0.99 * gain * 30 ** POWER[activation]


def test_swiglu_gain_beats_the_product_of_norms() -> None:
    weights = ExpertWeights(32, 64, 4).double().requires_grad_(False)
    weights.up.copy_(randn(*weights.up.shape, seed=0))
    for e, gain in enumerate(output_gains(weights)):
        gate, up = weights.up[e].chunk(2)
        down = torch.linalg.matrix_norm(weights.down_proj[e], 2)
        one = gate.norm(dim=1).max() * torch.linalg.matrix_norm(up, 2)
        other = up.norm(dim=1).max() * torch.linalg.matrix_norm(gate, 2)
        assert float(gain) < 0.6 * float(down * torch.minimum(one, other))
