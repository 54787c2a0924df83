"""Rotary positions by one kernel against the ten operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe.attention import rotate_reference
from grmoe.kernels import rotary


def make(B: int, S: int, H: int, G: int, W: int, shared: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys as projections leave them, and angles of their own or shared by all sequences."""
    g = torch.Generator().manual_seed(W)
    q, k = (torch.randn(B, S, heads, W, generator=g).transpose(1, 2) for heads in (H, G))
    angles = torch.randn(1 if shared else B, S, W, generator=g)
    return q, k, angles.cos(), angles.sin()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("B", "S", "H", "G", "W"), [(1, 1, 1, 1, 4), (3, 1, 6, 2, 8), (2, 5, 20, 5, 24), (2, 3, 2, 17, 64)]
)
def test_it_turns_queries_and_keys(B: int, S: int, H: int, G: int, W: int, shared: bool) -> None:
    """More heads than a tile, widths whose half is no power of two."""
    tensors = make(B, S, H, G, W, shared)
    assert rotary.covers(*tensors)
    for ours, plain in zip(rotary.rotate(*tensors), rotate_reference(*tensors), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("B", "S"), [(2, 3), (2, 1), (1, 3), (1, 1)])
def test_tokens_may_lie_apart(B: int, S: int) -> None:
    """Queries and keys as parts of one projection. PyTorch gives a single position the stride of a packed one."""
    both = torch.randn(B, S, 6 * 8)
    q, k = (t.view(B, S, -1, 8).transpose(1, 2) for t in both.split([32, 16], dim=-1))
    angles = torch.randn(B, S, 8)
    tensors = (q, k, angles.cos(), angles.sin())
    assert rotary.covers(*tensors)
    for ours, plain in zip(rotary.rotate(*tensors), rotate_reference(*tensors), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


def test_layouts_it_does_not_take() -> None:
    q, k, cos, sin = make(2, 3, 4, 2, 8, True)
    assert not rotary.covers(q.contiguous(), k, cos, sin)  # heads before positions
    assert not rotary.covers(q[:, :, ::2], k[:, :, ::2], cos, sin)  # other positions than the angles
    assert not rotary.covers(q, k, cos.double(), sin.double())
    assert not rotary.covers(q, k, cos.transpose(1, 2).contiguous().transpose(1, 2), sin)
