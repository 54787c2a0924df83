"""Attention that chooses its heads: the gate of the experts, over heads (`attention_heads_per_token`).

    y_t = Σ_{h chosen} H·g_h(x_t)·W_h o_h(t),        g = the Grassmann gate of the block's normalised input x_t

H heads, o_h the output of head h, W_h its part of the output projection. The factor H makes the uniform gate over all
heads plain attention. Every head is computed and the others are then multiplied by zero: this is for studying which
heads a token needs, and it saves no time. Keys and values of all heads stay in the cache, because later tokens may
choose other heads.

This file is copied beside every exported model.

Legend: B batch, S sequence, H heads, D model width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .configuration_grmoe import GrmoeConfig
from .parts_grmoe import HeadRouter, TopK


class GrmoeAttention(LlamaAttention):
    """`LlamaAttention` with the heads that a router chooses for each token, weighted."""

    def __init__(self, config: GrmoeConfig, layer_idx: int) -> None:
        super().__init__(config=config, layer_idx=layer_idx)  # type: ignore[arg-type]
        self.router = head_router(config)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As in transformers, with weighted heads."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q_BHSD, k_BHSD, v_BHSD = (p(hidden_states).view(shape).transpose(1, 2) for p in projections)
        q_BHSD, k_BHSD = apply_rotary_pos_emb(q_BHSD, k_BHSD, *position_embeddings)
        if past_key_values is not None:
            k_BHSD, v_BHSD = past_key_values.update(k_BHSD, v_BHSD, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        heads_BSHD, seen = attend(
            self, q_BHSD, k_BHSD, v_BHSD, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        weights_BSH = self.router.num_experts * self.router(hidden_states).weights
        heads_BSHD = heads_BSHD * weights_BSH.unsqueeze(-1).to(heads_BSHD.dtype)
        return self.o_proj(heads_BSHD.flatten(-2)), seen


def head_router(config: GrmoeConfig) -> HeadRouter:
    """The router of a block's heads."""
    assert config.attention_heads_per_token is not None
    assert config.router_rank is not None
    router = HeadRouter(
        config.hidden_size,
        config.num_attention_heads,
        config.router_rank,
        selection=TopK(config.attention_heads_per_token),
    )
    router.register_buffer("alpha_value", router.alpha_value, persistent=False)
    for module in router.modules():
        module._is_hf_initialized = not router.log_prior.is_meta  # type: ignore[assignment]
    return router
