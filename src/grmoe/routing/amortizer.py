"""The amortiser: a network that scales the concentrations of each token (eq:amortized).

    "affinity", "input"   ℓ_e = h_e(x)·κ_e a_e             h = N·softmax(MLP)
    "matrix"              ℓ_e = Σ_j H_ej(x)·κ_j a_j        H = 2N·softmax(MLP) − 11ᵀ/N

Section "Amortized Posterior with Learned Uncertainty" of the paper defines h = softmax(MLP(x))·N. It also names "a full
N × N concentration matrix per token", which it tried and rejected, and gives no formula. Ours keeps what the paper asks
of h. All entries of H sum to N for every token, and H = I at the start. The softmax runs over all N² entries. H covers
every diagonal matrix diag(h), so it can do all that h can: softmax(MLP) = diag(h)/2N + 11ᵀ/2N² gives it. The constant
−1/N moves all logits of a token alike, so no gate feels it.

The paper's MLP reads the token ("input", "matrix"). That is 0.5 % of the router only at hidden width 1. "affinity"
reads the N energies instead.

Legend: N experts, D model width; `...` leading dimensions of the tokens.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from grmoe import checks

AmortizerKind = Literal["affinity", "input", "matrix"]
AMORTIZERS = ("affinity", "input", "matrix")


def amortizer_sizes(kind: str, dim: int, num_experts: int) -> tuple[int, int]:
    """(inputs, outputs) of the network."""
    inputs = num_experts if kind == "affinity" else dim
    return inputs, num_experts**2 if kind == "matrix" else num_experts


def build_amortizer(kind: AmortizerKind, dim: int, num_experts: int, hidden: int) -> nn.Sequential:
    """Two layers with GELU. The gate starts as the plain one: h = 1, H = I."""
    inputs, outputs = amortizer_sizes(kind, dim, num_experts)
    last = nn.Linear(checks.positive_int("amortizer_hidden", hidden), outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    if kind == "matrix":
        # softmax = (N+1)/2N² on the diagonal and 1/2N² elsewhere
        with torch.no_grad():
            last.bias.view(num_experts, num_experts).fill_diagonal_(math.log(num_experts + 1))
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), last)


def amortize(kind: AmortizerKind, network_out: Tensor, weighted: Tensor) -> Tensor:
    """h ⊙ κa or H·κa, (..., N), from the network's output and κa (..., N)."""
    N = weighted.shape[-1]
    share = torch.softmax(network_out, -1)
    if kind != "matrix":
        return (share * N).to(weighted.dtype) * weighted
    H_NN = (2 * N * share - 1 / N).unflatten(-1, (N, N)).to(weighted.dtype)
    return (H_NN @ weighted.unsqueeze(-1)).squeeze(-1)
