"""Parts of attention that are slow in PyTorch where nothing is compiled or positions are masked: decoding.

Legend: B sequences, S new positions, H query heads, G key-value heads, L positions of the cache, W head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grmoe.kernels import runtime


def rotate(q_BHSW: Tensor, k_BGSW: Tensor, cos_BSW: Tensor, sin_BSW: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions of queries and keys, x·cos + (−x₂, x₁)·sin with the halves x₁, x₂ of a head.

    By one kernel where PyTorch would run ten: on a GPU, without a gradient, not compiled.
    """
    tensors = (q_BHSW, k_BGSW, cos_BSW, sin_BSW)
    learns = torch.is_grad_enabled() and (q_BHSW.requires_grad or k_BGSW.requires_grad)
    if learns or torch.compiler.is_compiling() or runtime.INTERPRETED or not runtime.available(q_BHSW):
        return rotate_reference(*tensors)
    from grmoe.kernels import rotary

    if not rotary.covers(*tensors):
        return rotate_reference(*tensors)
    return runtime.attempt("rotary", lambda: rotary.rotate(*tensors), lambda: rotate_reference(*tensors))


def rotate_reference(
    q_BHSW: Tensor, k_BGSW: Tensor, cos_BSW: Tensor, sin_BSW: Tensor
) -> tuple[Tensor, Tensor]:
    """The specification, operation by operation as in transformers."""
    cos, sin = cos_BSW.unsqueeze(1), sin_BSW.unsqueeze(1)
    return q_BHSW * cos + _turned(q_BHSW) * sin, k_BGSW * cos + _turned(k_BGSW) * sin


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def can_attend_one(q_BHSW: Tensor, k_BGLW: Tensor, v_BGLW: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend_one` takes these: one new position per sequence under a mask, on a GPU, without a gradient."""
    if mask is None or q_BHSW.shape[2] != 1 or runtime.INTERPRETED or not runtime.available(q_BHSW):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q_BHSW, k_BGLW, v_BGLW)):
        return False
    from grmoe.kernels import decode_attention

    return decode_attention.covers(q_BHSW, k_BGLW, v_BGLW, mask)


def attend_one(q_BH1W: Tensor, k_BGLW: Tensor, v_BGLW: Tensor, mask_B11L: Tensor, scale: float) -> Tensor:
    """softmax(scale·q kᵀ) v over the positions that the mask allows, (B, H, 1, W), where `can_attend_one` says so."""
    from grmoe.kernels import decode_attention

    tensors = (q_BH1W, k_BGLW, v_BGLW, mask_B11L)
    return runtime.attempt(
        "decode attention",
        lambda: decode_attention.attend(*tensors, scale),
        lambda: attend_one_reference(*tensors, scale),
    )


def attend_one_reference(
    q_BH1W: Tensor, k_BGLW: Tensor, v_BGLW: Tensor, mask_B11L: Tensor, scale: float
) -> Tensor:
    """The specification: PyTorch's attention, with keys and values repeated for each query head."""
    k_BHLW, v_BHLW = (t.repeat_interleave(q_BH1W.shape[1] // t.shape[1], dim=1) for t in (k_BGLW, v_BGLW))
    return scaled_dot_product_attention(q_BH1W, k_BHLW, v_BHLW, attn_mask=mask_B11L, scale=scale)
