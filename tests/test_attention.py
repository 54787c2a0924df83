"""Rotary positions and attention of one token: the references, and when kernels stand in for them."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from grmoe.attention import attend_one_reference, can_attend_one, rotate, rotate_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_positions_are_those_of_transformers_to_the_bit(dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 6, 5, 8, dtype=dtype), torch.randn(2, 3, 5, 8, dtype=dtype)
    angles = torch.randn(1, 5, 8, dtype=dtype)
    want = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    for turn in (rotate, rotate_reference):
        found = turn(q, k, angles.cos(), angles.sin())
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_one_token_attends_as_the_formula_says() -> None:
    q, k, v = torch.randn(2, 6, 1, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    mask = torch.rand(2, 1, 1, 7) < 0.7
    mask[..., 0] = True
    found = attend_one_reference(q, k, v, mask, 0.4)
    for b in range(2):
        for h in range(6):
            scores = 0.4 * (k[b, h // 2] @ q[b, h, 0])
            share = torch.where(mask[b, 0, 0], scores, -torch.inf).softmax(0)
            torch.testing.assert_close(found[b, h, 0], share @ v[b, h // 2], rtol=1e-5, atol=1e-5)
    assert not can_attend_one(q, k, v, mask)  # no kernel on a CPU
