"""Elastic training: random budgets, so that one model learns to work with any number of experts per token.

A budget is drawn for each token, sequence, layer or step as a function of (key, layer, index) alone. The key stands for
the seed and the step. A resumed run, a run on more processes and a recomputed forward pass draw the same budgets.

    "mass"    τ' = min(τ, u):            a token keeps adding experts while those before hold less than u
    "count"   cap' = 1 + ⌊u·cap⌋:        between one expert and all of them

with u uniform in [0, 1). The numbers are 32-bit hashes, the same in PyTorch (here) and in the fused gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grmoe import checks

Unit = Literal["token", "sequence", "layer", "step"]
Rule = Literal["mass", "count"]

FULL = -1  # a key that asks for the full budget
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Elastic:
    """How budgets are drawn while a router trains."""

    unit: Unit = "token"
    """What gets a budget of its own. "layer": every layer in every step. "step": all layers the same."""
    rule: Rule = "mass"
    """Which number is random: "mass" τ, "count" the cap."""

    def __post_init__(self) -> None:
        checks.one_of("unit", self.unit, ("token", "sequence", "layer", "step"))
        checks.one_of("rule", self.rule, ("mass", "count"))


def mix(word: Tensor) -> Tensor:
    """A 32-bit hash (lowbias32 by C. Wellons) of numbers in [0, 2³²), in int64."""
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)


def draw(key: Tensor, layer: int, index: Tensor) -> Tensor:
    """u in [0, 1), fp32, for each index. key: 0-d int64 in [0, 2³¹)."""
    word = mix((index + mix((layer + mix(key)) & _WORD)) & _WORD)
    return (word >> 8).float() * 2.0**-24


def step_key(seed: int, step: int, full_share: float = 0.0) -> int:
    """The key of a training step. A share of the steps, drawn as well, gets the full budget."""
    words = torch.tensor([seed & _WORD, seed >> 32 & _WORD, step & _WORD], dtype=torch.int64)
    word = torch.zeros((), dtype=torch.int64)
    for value in words:
        word = mix((word + value) & _WORD)
    if float(draw(word, 0, torch.tensor(1))) < full_share:
        return FULL
    return int(mix(word ^ 1) >> 1)


def elastic_numbers(
    elastic: Elastic, key: Tensor, first_row: Tensor, layer: int, shape: torch.Size, tau: Tensor, cap: Tensor
) -> tuple[Tensor, Tensor]:
    """(τ, cap) for gates of this shape (..., N), drawn from the full (τ, cap).

    first_row: index of the first sequence within the step, over all processes and micro-batches. Gates (rows, tokens,
    N) are sequences of tokens; gates (tokens, N) count as one sequence.
    """
    tokens = shape[:-1].numel()
    length = shape[-2] if len(shape) > 2 else tokens
    index = torch.arange(tokens, device=key.device) + first_row * length
    if elastic.unit == "sequence":
        index = torch.div(index, max(1, length), rounding_mode="floor")
    elif elastic.unit != "token":
        index = torch.zeros_like(index)
    u = draw(key, 0 if elastic.unit == "step" else 1 + layer, index).view(*shape[:-1], 1)
    full = key < 0
    if elastic.rule == "mass":
        return torch.where(full, tau, torch.minimum(tau, u.to(tau.dtype))), cap
    fewer = 1 + torch.floor(u * cap).to(cap.dtype)
    return tau, torch.where(full, cap, torch.minimum(cap, fewer))
