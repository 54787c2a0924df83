"""A bound on an expert's output from its weights alone: ‖f_e(x)‖ ≤ gain_e·‖x‖^power.

Legend: N experts, D model width, I expert width; A any, B the smaller side of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grmoe.experts.weights import Activation, ExpertWeights
from grmoe.geometry import largest_eigenvalue

# SwiGLU multiplies two projections of x, GELU has one.
POWER: dict[Activation, int] = {"swiglu": 2, "gelu": 1}

# Covers rounding: below 1e-8 in the fp64 arithmetic here, 1e-5 in a caller's fp32 sum of a hundred experts.
SLACK = 1 + 1e-5
_SQUARINGS = 6  # p = 64: the excess over the spectral norm is at most B^(1/128), 7 % at B = 4096


@torch.no_grad()
def output_gains(weights: ExpertWeights) -> Tensor:
    """gain_e with ‖f_e(x)‖ ≤ gain_e·‖x‖^POWER[activation] for every x; (N,) fp64.

    Both activations are a ↦ s(a)·a with 0 ≤ s ≤ 1 up to sign, |silu(a)| ≤ |a| and |gelu(a)| ≤ |a|. So
    GELU:    ‖f(x)‖ ≤ ‖W_d‖₂ ‖W_u x‖         ≤ ‖W_d‖₂ ‖W_u‖₂ ‖x‖.
    SwiGLU:  ‖f(x)‖ ≤ ‖W_d‖₂ ‖(Gx) ⊙ (Ux)‖  ≤ ‖W_d‖₂ √λ_max(GGᵀ ⊙ UUᵀ) ‖x‖²,
    because (Gx) ⊙ (Ux) is linear in x⊗x, with the Gram matrix GGᵀ ⊙ UUᵀ. By Schur's product theorem this is never
    above max_i‖G_i‖·‖U‖₂ or max_i‖U_i‖·‖G‖₂.

    Costs a few matrix products per expert, the largest I×I×I (SwiGLU). Compute it once per set of weights, not per
    batch. One expert at a time saves memory. Reads nothing on the host.
    """
    gains = []
    for up, down in zip(weights.up, weights.down_proj, strict=True):
        if weights.activation == "swiglu":
            gate_ID, up_ID = up.double().chunk(2)
            inner = largest_eigenvalue((gate_ID @ gate_ID.T) * (up_ID @ up_ID.T), _SQUARINGS).sqrt()
        else:
            inner = spectral_norm_bound(up)
        gains.append(spectral_norm_bound(down) * inner)
    return torch.stack(gains) * SLACK


def spectral_norm_bound(weight: Tensor) -> Tensor:
    """‖W‖₂ ≤ (tr (WᵀW)^p)^(1/2p), the Schatten norm of order 2p = 128; 0-d fp64.

    Too large by at most a factor B^(1/2p), and exact for rank one. Power iteration would give a value below the norm.
    """
    W = weight.double()
    # Scaled, so that squares of very small or large weights neither vanish nor overflow.
    scale = W.abs().amax().clamp(min=torch.finfo(W.dtype).tiny)
    W_AB = W / scale if W.shape[0] >= W.shape[1] else W.T / scale
    return scale * largest_eigenvalue(W_AB.T @ W_AB, _SQUARINGS).sqrt()
