"""What a router returns.

Legend: N experts, T tokens of a sequence, P slots per expert; `...` any leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class SlotMixing:
    """Soft MoE's two maps between tokens and expert slots, each (..., T, N, P)."""

    to_slots: Tensor
    """Weights of a slot's mean over the tokens; they sum to one over tokens."""
    from_slots: Tensor
    """Weights of a token's mean over all slots; they sum to one over experts and slots."""


@dataclass(kw_only=True)
class Routing:
    """A router's decision for tokens (..., D): tensors (..., N) in fp32 (fp64 for fp64 tokens)."""

    logits: Tensor
    """Scaled logits ℓ, with the dial and the prior."""
    probs: Tensor
    """The gate g = softmax(ℓ)."""
    selected: Tensor
    """bool: the experts computed for each token."""
    weights: Tensor
    """Combine weights, zero where not selected."""
    aux_loss: Tensor
    """0-d: the router's own losses, already multiplied by their coefficients."""
    slots: SlotMixing | None = None
    """Soft MoE only: experts compute slots, not tokens."""
    identity_experts: int = 0
    """How many of the experts, the last ones, compute nothing."""

    @property
    def computed(self) -> Tensor:
        """bool: `selected` without the identity experts, (..., N − identity experts)."""
        return self.selected[..., : self.selected.shape[-1] - self.identity_experts]
