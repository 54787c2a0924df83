"""What the models return, and where a sequence ends.

This file is copied beside every exported model.

Legend: B batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import (
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
    SequenceClassifierOutputWithPast,
)


@dataclass
class GrmoeModelOutput(MoeModelOutputWithPast):
    router_losses: tuple[Tensor, ...] | None = None
    """One per MoE layer, coefficients included."""


@dataclass
class GrmoeCausalLMOutput(MoeCausalLMOutputWithPast):
    """Where the routers' losses are part of it, `loss` = `cross_entropy` + `router_loss`.

    `router_loss` is config.router_aux_loss_coef · `aux_loss`. The two parts are for logs: they carry no gradient.
    """

    cross_entropy: Tensor | None = None
    router_loss: Tensor | None = None
    divergence: Tensor | None = None
    """From a teacher's predictions, nats per token; with gradient, and not part of `loss`."""
    last_hidden_state: Tensor | None = None
    """What a later pass takes as its teacher. Without gradient."""


@dataclass
class GrmoeSequenceClassifierOutput(SequenceClassifierOutputWithPast):
    """`logits` (B, labels). While training, `loss` includes config.router_aux_loss_coef · `aux_loss`."""

    aux_loss: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None


def last_tokens(
    hidden_BSH: Tensor, input_ids: Tensor | None, attention_mask: Any | None, pad_token_id: int | None
) -> Tensor:
    """Position of the last token of each sequence that is no padding, (B,). Padding may be on either side.

    transformers looks at `pad_token_id` alone. That is often the end-of-text token, which also ends sequences, so that
    a mask counts first.
    """
    B, S = hidden_BSH.shape[:2]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        real_BS = attention_mask[:, -S:] != 0  # with a cache, the mask has the tokens before too
    elif input_ids is not None and pad_token_id is not None:
        real_BS = input_ids != pad_token_id
    elif B == 1:
        real_BS = hidden_BSH.new_ones(B, S, dtype=torch.bool)
    else:
        raise ValueError(
            f"the end of {B} sequences is not known: give attention_mask, or input_ids and set config.pad_token_id"
        )
    positions_S = torch.arange(S, device=hidden_BSH.device)
    return (positions_S * real_BS.to(positions_S)).argmax(-1)
