"""Attention and norms: transformers' own, by kernels of grmoe where a model decodes, and with chosen heads on request.

With `attention_heads_per_token`, the gate of the experts chooses heads:

    y_t = Σ_{h chosen} H·g_h(x_t)·W_h o_h(t),        g = the Grassmann gate of the block's normalised input x_t

H heads, o_h the output of head h, W_h its part of the output projection. The factor H makes the uniform gate over all
heads plain attention. Every head is computed and the others are then multiplied by zero: this is for studying which
heads a token needs, and it saves no time. Keys and values of all heads stay in the cache, because later tokens may
choose other heads.

This file is copied beside every exported model.

Legend: B batch, S sequence, H heads, G key-value heads, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    eager_attention_forward,
)

from .configuration_grmoe import GrmoeConfig
from .parts_grmoe import (
    HeadRouter,
    TopK,
    add_product,
    attend_causally,
    attend_one,
    can_attend_causally,
    can_attend_one,
    project_few,
    rotate,
    rotate_reference,
    takes_few,
)


class GrmoeRMSNorm(LlamaRMSNorm):
    """`LlamaRMSNorm`, by PyTorch's one kernel in place of eight where nothing is trained or compiled on a GPU.

    Not in training: activation checkpointing runs a block with and without gradients, and both must give the same bits.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        plain = self.training or torch.is_grad_enabled() or torch.compiler.is_compiling()
        # Autocast would run PyTorch's norm in fp32.
        plain = plain or torch.is_autocast_enabled(hidden_states.device.type)
        if plain or not hidden_states.is_cuda or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class GrmoeAttention(LlamaAttention):
    """`LlamaAttention`. With `attention_heads_per_token`, a router chooses heads for each token and weighs them."""

    def __init__(self, config: GrmoeConfig, layer_idx: int) -> None:
        super().__init__(config=config, layer_idx=layer_idx)  # type: ignore[arg-type]
        self.router = None if config.attention_heads_per_token is None else head_router(config)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As in transformers, with weighted heads.

        vLLM reads the text of this method. It looks for one call of each projection, and for one lookup and one call of
        the implementation.
        """
        projected = [self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)]
        q_BHSD, k_BGSD, v_BGSD = self._placed(projected, position_embeddings, past_key_values)
        heads, seen = self._attend_by_kernel(q_BHSD, k_BGSD, v_BGSD, attention_mask), None
        if heads is None:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
            dropout = self.attention_dropout if self.training else 0.0
            heads, seen = attend(
                self, q_BHSD, k_BGSD, v_BGSD, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        # vLLM's gives a row per token, with all heads side by side.
        heads_BSHD = heads.reshape(*hidden_states.shape[:-1], -1, self.head_dim)
        if self.router is not None:
            weights_BSH = self.router.num_experts * self.router(hidden_states).weights
            heads_BSHD = heads_BSHD * weights_BSH.unsqueeze(-1).to(heads_BSHD.dtype)
        return self.o_proj(heads_BSHD.flatten(-2)), seen

    def takes_few(self, x_BSH: Tensor, norm: nn.Module) -> bool:
        """Whether `step` does what the norm, this module and the residual sum do."""
        own = type(self) is GrmoeAttention and type(norm) is GrmoeRMSNorm and self.router is None
        plain = own and self.config._attn_implementation == "sdpa"  # which gives no attention weights
        return plain and takes_few(x_BSH, self, norm, self.q_proj, self.k_proj, self.v_proj, self.o_proj)

    def step(
        self,
        x_BSH: Tensor,
        norm: GrmoeRMSNorm,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """x + attention of norm(x), for few tokens."""
        weights = [p.weight for p in (self.q_proj, self.k_proj, self.v_proj)]
        projected = project_few(x_BSH, weights, norm.weight, norm.variance_epsilon)
        q_BHSD, k_BGSD, v_BGSD = self._placed(projected, position_embeddings, past_key_values)
        heads_BSHD = self._attend_by_kernel(q_BHSD, k_BGSD, v_BGSD, attention_mask)
        if heads_BSHD is None:
            attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
            heads_BSHD, _ = attend(
                self, q_BHSD, k_BGSD, v_BGSD, attention_mask, scaling=self.scaling, **kwargs
            )
        return add_product(x_BSH, heads_BSHD.flatten(-2), self.o_proj.weight)

    def _placed(
        self, projected: list[Tensor], position_embeddings: tuple[Tensor, Tensor], past_key_values: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries at their positions, and keys and values of all positions so far."""
        q_BHSD, k_BGSD, v_BGSD = (t.view(*t.shape[:-1], -1, self.head_dim).transpose(1, 2) for t in projected)
        cos_BSD, sin_BSD = position_embeddings
        # Kernels round differently, and activation checkpointing needs the same bits with and without gradients.
        turn = rotate_reference if self.training else rotate
        q_BHSD, k_BGSD = turn(q_BHSD, k_BGSD, cos_BSD, sin_BSD)
        if past_key_values is not None:
            k_BGSD, v_BGSD = past_key_values.update(k_BGSD, v_BGSD, self.layer_idx)
        return q_BHSD, k_BGSD, v_BGSD

    def _attend_by_kernel(
        self, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask: Tensor | None
    ) -> Tensor | None:
        """Output of each head (B, S, H, D), where a kernel does better than PyTorch's choice."""
        if self.config._attn_implementation != "sdpa":
            return None
        if not self.training and can_attend_one(q_BHSD, k_BGSD, v_BGSD, mask):
            assert mask is not None
            return attend_one(q_BHSD, k_BGSD, v_BGSD, mask, self.scaling).transpose(1, 2)
        dropout = self.attention_dropout if self.training else 0.0
        if not dropout and can_attend_causally(q_BHSD, k_BGSD, mask):
            return attend_causally(q_BHSD, k_BGSD, v_BGSD, self.scaling).transpose(1, 2)
        return None


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
