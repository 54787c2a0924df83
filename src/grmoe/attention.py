"""Parts of attention that are slow in PyTorch: decoding, where nothing is compiled or positions are masked, and on
Hopper its default kernel for training and prompts.

Legend: B sequences, S new positions, H query heads, G key-value heads, L positions of the cache, W head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grmoe.kernels import runtime

# Whether causal attention of many positions is cuDNN's on Hopper. PyTorch takes FlashAttention 2, which was made for
# the GPUs before. Off until it is measured: `grmoe bench train-model --contender cuDNN`.
CUDNN = False
_CUDNN_WIDTHS = range(8, 129, 8)  # of a head


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


def can_attend_causally(q_BHSW: Tensor, k_BGSW: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend_causally` takes these: every position sees those before it and itself, on Hopper, in 16 bits."""
    plain = CUDNN and mask is None and q_BHSW.shape[2] == k_BGSW.shape[2] > 1
    if not plain or not q_BHSW.is_cuda or q_BHSW.shape[-1] not in _CUDNN_WIDTHS:
        return False
    dtype = runtime.autocast_dtype(q_BHSW)
    fits = dtype in (torch.float16, torch.bfloat16) and dtype == runtime.autocast_dtype(k_BGSW)
    return fits and runtime.is_hopper(q_BHSW.device)


def attend_causally(q_BHSW: Tensor, k_BGSW: Tensor, v_BGSW: Tensor, scale: float) -> Tensor:
    """softmax(scale·q kᵀ) v over the positions up to each query's own, (B, H, S, W), by cuDNN."""
    # Autocast casts for PyTorch's attention, but not for this operator. With fp32 weights, queries and keys behind
    # rotary positions are fp32.
    q_BHSW, k_BGSW, v_BGSW = (t.to(runtime.autocast_dtype(t)) for t in (q_BHSW, k_BGSW, v_BGSW))
    group = q_BHSW.shape[1] // k_BGSW.shape[1]
    if group > 1:
        k_BGSW, v_BGSW = (t.repeat_interleave(group, dim=1) for t in (k_BGSW, v_BGSW))
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    # With what a backward needs, in any case: activation checkpointing needs the same bits with and without gradients.
    out: Tensor = attend(q_BHSW, k_BGSW, v_BGSW, None, True, 0.0, True, scale=scale)[0]
    return out


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
