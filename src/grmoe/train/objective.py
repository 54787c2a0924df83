"""The training objective:

    L = CE + c·Σ_layers R + β·Σ_layers O

CE  cross-entropy of the next token, nats per token
R   a router's own losses (load balancing, z-loss), with their coefficients; c is the model's `router_aux_loss_coef`
O   Σ_{e≠e'} max(0, ‖U_eᵀU_e'‖²_F − ρ₀·k²/d), the overlap penalty (eq:subspace_reg): its hinge ρ₀ is a share of the
    overlap k²/d of random subspaces; β is `routing.overlap_weight`, ρ₀ is `routing.overlap_rho`

The model's forward pass computes CE + c·ΣR and returns both parts beside their sum (see `GrmoeCausalLMOutput`). The
overlap depends on the weights alone, so it is computed once per step and not once per micro-batch.

Legend: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grmoe.model import GrmoeForCausalLM
from grmoe.runs.config import RoutingConfig


class LossParts(NamedTuple):
    """What the log says about a step. 0-d tensors without gradients."""

    cross_entropy: Tensor
    router: Tensor
    """c·ΣR"""
    overlap: Tensor
    """ΣO, before its weight β"""


def overlap_term(model: GrmoeForCausalLM, config: RoutingConfig) -> Tensor:
    """ΣO. Pairs of experts are sampled from torch's default generator."""
    if not config.overlap_weight:
        return torch.zeros((), device=model.device)
    num_pairs = None if config.overlap_pairs == "all" else config.overlap_pairs
    return model.overlap_penalty(config.overlap_rho, relative=True, num_pairs=num_pairs)


def micro_batch_loss(
    output: Any, overlap: Tensor, config: RoutingConfig, number: int, count: int
) -> tuple[Tensor, LossParts]:
    """The part of micro-batch `number` of `count` in L, and in what is logged. Their sums over micro-batches are L.

    `output` is the model's. The overlap is in the first micro-batch.
    """
    loss = output.loss / count
    parts = LossParts(output.cross_entropy / count, output.router_loss / count, torch.zeros_like(overlap))
    if number == 0:
        parts = parts._replace(overlap=overlap.detach())
        if overlap.requires_grad:
            loss = loss + config.overlap_weight * overlap
    return loss, parts


def forward_loss(forward: Callable[..., Any], rows_BS: Tensor) -> Any:
    """The model's output for sequences (B, S + 1) on its device: the loss without the logits."""
    targets = rows_BS[:, 1:].contiguous()
    return forward(
        input_ids=rows_BS[:, :-1], labels=targets, shift_labels=targets, use_cache=False, skip_logits=True
    )
