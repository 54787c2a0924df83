"""Attention of one new token per sequence, by kernels, against PyTorch's with repeated keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe.attention import attend_one_reference
from grmoe.kernels import decode_attention

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def make(B: int, H: int, G: int, L: int, W: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: those a part of longer buffers, as a cache has them."""
    g = torch.Generator().manual_seed(B + H + L)
    q = torch.randn(B, H, 1, W, generator=g)
    k, v = torch.randn(2, B + 1, G, L + 5, W, generator=g)[:, :B, :, :L]
    return q, k, v


def lengths(B: int, L: int) -> Tensor:
    """A mask of shape (B, 1, 1, L) with the first positions of each sequence, at least one."""
    ends = 1 + (torch.arange(B) * 37 + L - 1) % L
    return torch.arange(L) < ends.view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("B", "H", "G", "L", "W"),
    [(1, 1, 1, 1, 4), (3, 4, 2, 65, 16), (2, 12, 4, 200, 32), (5, 3, 3, 130, 24), (1, 16, 1, 700, 64)],
)
def test_it_is_attention(B: int, H: int, G: int, L: int, W: int) -> None:
    """One part and several, a width that is no power of two, sequences of different lengths."""
    q, k, v = make(B, H, G, L, W)
    mask = lengths(B, L)
    assert decode_attention.covers(q, k, v, mask)
    ours = decode_attention.attend(q, k, v, mask, 0.3)
    exact = attend_one_reference(*(t.double() for t in (q, k, v)), mask, 0.3)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_any_mask_and_one_for_all_sequences() -> None:
    q, k, v = make(4, 4, 2, 300, 16)
    mask = torch.zeros(1, 1, 1, 300, dtype=torch.bool)
    mask[..., [70, 71, 135, 299]] = True  # the first step has nothing, and so has one between
    ours = decode_attention.attend(q, k, v, mask, 0.25)
    torch.testing.assert_close(ours, attend_one_reference(q, k, v, mask, 0.25), rtol=1e-5, atol=1e-5)


def test_masked_positions_are_never_read() -> None:
    """They may hold anything: an earlier sequence's keys, or NaN."""
    q, k, v = make(3, 4, 2, 150, 16)
    mask = lengths(3, 150)
    clean = decode_attention.attend(q, k, v, mask, 0.25)
    unseen = ~mask.squeeze(1).unsqueeze(-1).expand(3, 2, 150, 16)
    dirty = (torch.where(unseen, torch.nan, t) for t in (k, v))
    assert torch.equal(clean, decode_attention.attend(q, *dirty, mask, 0.25))


def test_a_sequence_is_the_same_whatever_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch of the same size: its own keys alone decide. Without any position the output is zero."""
    q, k, v = make(3, 4, 2, 150, 16)
    mask = lengths(3, 150)
    first = decode_attention.attend(q, k, v, mask, 0.25)
    q[1:], k[1:], v[1:] = 5.0, -3.0, 2.0
    mask[1] = False
    again = decode_attention.attend(q, k, v, mask, 0.25)
    assert torch.equal(first[0], again[0])
    assert torch.equal(again[1], torch.zeros_like(again[1]))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_make_the_whole(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make(2, 4, 2, 190, 16)
    mask = lengths(2, 190)
    monkeypatch.setattr(decode_attention, "PARTS", parts)
    monkeypatch.setattr(decode_attention, "BUSY", 1000)
    ours = decode_attention.attend(q, k, v, mask, 0.25)
    torch.testing.assert_close(ours, attend_one_reference(q, k, v, mask, 0.25), rtol=1e-5, atol=1e-5)


def test_heads_may_lie_billions_of_numbers_apart(tmp_path: Path) -> None:
    """As in long caches of many heads. A product of 32 bits would end at the first head again."""
    apart, (G, L, W) = 2**32, (2, 3, 16)
    # A file with a hole: nothing of it takes memory but its ends.
    buffer = torch.from_file(
        str(tmp_path / "cache"), shared=True, size=apart + 2 * L * W, dtype=torch.float16
    )
    k, v = (buffer.as_strided((1, G, L, W), (apart, apart, W, 1), start).normal_() for start in (0, L * W))
    q, mask = torch.randn(1, 4, 1, W, dtype=torch.float16), torch.ones(1, 1, 1, L, dtype=torch.bool)
    assert decode_attention.covers(q, k, v, mask)
    ours = decode_attention.attend(q, k, v, mask, 0.25)
    exact = attend_one_reference(*(t.double() for t in (q, k, v)), mask, 0.25)
    torch.testing.assert_close(ours.double(), exact, rtol=2e-3, atol=2e-3)  # fp16


def test_layouts_it_does_not_take() -> None:
    q, k, v = make(2, 4, 2, 64, 16)
    mask = lengths(2, 64)
    assert decode_attention.covers(q, k, v, mask)
    assert not decode_attention.covers(q, k, v, mask.float())  # biases
    assert not decode_attention.covers(q, k, v, mask.expand(2, 4, 1, 64))  # a mask for each head
    assert not decode_attention.covers(q, k.half(), v, mask)
    assert not decode_attention.covers(q, k.transpose(2, 3).contiguous().transpose(2, 3), v, mask)
    odd = (t[..., :10] for t in (q, k, v))  # rows of 40 bytes
    assert not decode_attention.covers(*odd, mask)
