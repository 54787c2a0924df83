"""One block of the model: attention, then a MoE layer or a dense feed-forward.

Attention and norms are transformers', with kernels for decoding. The router and the experts' backends are ours. This
file is copied beside every exported model.

Legend: B batch, S sequence, T = B·S tokens, H model width (D in `grmoe.MoE`), N experts, K most experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_grmoe import GrmoeAttention, GrmoeRMSNorm
from .configuration_grmoe import GrmoeConfig
from .parts_grmoe import (
    BACKENDS,
    Dispatch,
    ExpertWeights,
    MoE,
    add_product,
    all_routers,
    feed_forward_few,
    pick_backend,
    takes_few,
)
from .router_grmoe import config_router

OWN_EXPERTS = ("auto", *BACKENDS)


class _Implementations(ExpertsInterface):
    """Hugging Face's experts implementations and ours. All of ours are `GrmoeExperts.forward`."""

    def get_interface(self, experts_implementation: str, default: Any) -> Any:
        if experts_implementation in OWN_EXPERTS:
            return default
        return super().get_interface(experts_implementation, default)


_IMPLEMENTATIONS = _Implementations()


@use_experts_implementation(experts_interface=_IMPLEMENTATIONS)
class GrmoeExperts(ExpertWeights):
    """`ExpertWeights` that Hugging Face's experts implementations ("eager", "grouped_mm", …) can also run."""

    config: GrmoeConfig  # set by the decorator

    def __init__(self, config: GrmoeConfig) -> None:
        assert config.moe_intermediate_size is not None
        super().__init__(
            config.hidden_size, config.moe_intermediate_size, config.num_experts, config.activation
        )
        self.num_experts = config.num_experts
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """From Hugging Face's (T, K) format: "eager", a loop over experts, and our backends if an adapter wraps this
        module, such as LoRA of PEFT."""
        T, K = top_k_index.shape
        name = self.config._experts_implementation
        backend = pick_backend(name if name in OWN_EXPERTS else "reference", hidden_states)
        weights_TN = top_k_weights.new_zeros(T, self.num_experts).scatter_add(1, top_k_index, top_k_weights)
        dispatch = Dispatch.build(weights_TN, weights_TN != 0, K, kernels=backend == "triton")
        return BACKENDS[backend](hidden_states, dispatch, self)


@use_experts_implementation(experts_interface=_IMPLEMENTATIONS, has_gate=False)
class GrmoePlainExperts(GrmoeExperts):
    """The same without a gate: `up_proj` in place of `gate_up_proj`."""


class GrmoeMoE(MoE):
    """`grmoe.MoE` as the feed-forward of a block: (output, router logits (T, N), the router's loss).

    `config._experts_implementation` names the backend: "auto", "reference", "grouped" or "triton" of `grmoe.experts`,
    or one of Hugging Face's.
    """

    def __init__(self, config: GrmoeConfig, number: int) -> None:
        """number: counts the model's MoE layers from zero."""
        assert config.moe_intermediate_size is not None
        super().__init__(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config_router(config, number),
            activation=config.activation,
            shared_experts=config.shared_experts,
            experts=(GrmoeExperts if config.activation == "swiglu" else GrmoePlainExperts)(config),
        )
        self.config = config
        self.use_backend(config._experts_implementation)

    def forward(  # type: ignore[override]
        self, x: Tensor, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.backend != self.config._experts_implementation:
            self.use_backend(self.config._experts_implementation)
        y, routing = self.run(x, token_ids)
        return y, routing.logits.flatten(0, -2), routing.aux_loss

    def _run_experts(self, x_TD: Tensor, weights_TN: Tensor, selected_TN: Tensor, max_experts: int) -> Tensor:
        # Serving engines replace `experts` with their own module.
        if self.backend in OWN_EXPERTS and isinstance(self.experts, ExpertWeights):
            return super()._run_experts(x_TD, weights_TN, selected_TN, max_experts)
        # Their format has K experts for every token: a token with fewer gets others with weight zero.
        weights_TK, index_TK = weights_TN.topk(max_experts, dim=-1)
        y_TD: Tensor = self.experts(x_TD, index_TK, weights_TK)
        return y_TD


class GrmoeMLP(nn.Module):
    """The feed-forward of a dense block, SwiGLU or GELU."""

    def __init__(self, config: GrmoeConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        H, width = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(H, width, bias=False) if config.activation == "swiglu" else None
        self.up_proj = nn.Linear(H, width, bias=False)
        self.down_proj = nn.Linear(width, H, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """token_ids: not used, so that a block calls this as it calls a MoE layer."""
        up = self.up_proj(x)
        inner = self.act_fn(up) if self.gate_proj is None else self.act_fn(self.gate_proj(x)) * up
        y: Tensor = self.down_proj(inner)
        return y

    def takes_few(self, x_BSH: Tensor, norm: nn.Module) -> bool:
        """Whether `step` does what the norm, this module and the residual sum do."""
        gate = () if self.gate_proj is None else (self.gate_proj,)
        own = type(self) is GrmoeMLP and type(norm) is GrmoeRMSNorm
        return own and takes_few(x_BSH, self, norm, *gate, self.up_proj, self.down_proj)

    def step(self, x_BSH: Tensor, norm: GrmoeRMSNorm) -> Tensor:
        """x + feed-forward of norm(x), for few tokens."""
        gate = None if self.gate_proj is None else self.gate_proj.weight
        inner = feed_forward_few(x_BSH, gate, self.up_proj.weight, norm.weight, norm.variance_epsilon)
        return add_product(x_BSH, inner, self.down_proj.weight)


class GrmoeDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: GrmoeConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = GrmoeAttention(config, layer_idx)
        moe_layers = config.moe_layers
        self.mlp: GrmoeMoE | GrmoeMLP = (
            GrmoeMoE(config, moe_layers.index(layer_idx)) if layer_idx in moe_layers else GrmoeMLP(config)
        )
        self.residual_loss_coef = config.residual_loss_coef
        self.input_layernorm = GrmoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = GrmoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # `_init_weights` gets a module without its name.
        self.self_attn.o_proj.writes_residual = True  # type: ignore[assignment]
        if isinstance(self.mlp, GrmoeMLP):
            self.mlp.down_proj.writes_residual = True  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' layer, which checkpoints. The backward then checks that routers hold the same numbers."""
        if self.gradient_checkpointing and self.training and not torch.compiler.is_compiling():
            kwargs["numbers"] = self._numbers()
        return super().__call__(*args, **kwargs)

    def _numbers(self) -> tuple[tuple[int, int], ...]:
        """Where the routers' numbers lie and how often they were written. Nothing is read from the device."""
        return tuple(
            (buffer.data_ptr(), buffer._version)
            for router in all_routers(self)
            for name, buffer in router.named_buffers()
            if not name.startswith("counter.")  # a forward pass counts
        )

    def forward(
        self,
        hidden_states: Tensor,
        *,
        token_ids: Tensor | None = None,
        numbers: tuple[tuple[int, int], ...] | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The residual stream, and from a MoE layer also its router's loss. Checkpointing passes gradients to both.

        token_ids: (B, S), for routers that hash them. numbers: those that routers held when the pass began. All other
        arguments go to the attention.
        """
        if numbers is not None and numbers != self._numbers():
            raise RuntimeError(
                "α, a budget, a prior or the draw of budgets changed between a forward pass and its backward. With "
                "gradient checkpointing the backward computes the forward again, and would not get the same: run it "
                "before you change them"
            )
        # An adapter may wrap the attention or a dense feed-forward.
        attention, norm = self.self_attn, self.input_layernorm
        if isinstance(attention, GrmoeAttention) and attention.takes_few(hidden_states, norm):
            hidden_states = attention.step(hidden_states, norm, **kwargs)
        else:
            attended, _ = attention(norm(hidden_states), **kwargs)
            hidden_states = hidden_states + attended
        mlp, norm = self.mlp, self.post_attention_layernorm
        if isinstance(mlp, GrmoeMLP) and mlp.takes_few(hidden_states, norm):
            return mlp.step(hidden_states, norm)
        out = mlp(norm(hidden_states), token_ids)
        if isinstance(out, Tensor):
            return hidden_states + out
        y, _, loss = out
        if self.residual_loss_coef and self.training:
            loss = loss + self.residual_loss_coef * residual_loss(hidden_states)
        return hidden_states + y, loss


def residual_loss(x_BSH: Tensor) -> Tensor:
    """Mean over tokens of (log mean square)²: zero for tokens of RMS one, equal for RMS c and 1/c.

    An RMS below 1e-3 counts as that, and has no gradient: a padding token at the start of a text is all zero.
    """
    return x_BSH.float().square().mean(-1).clamp(min=1e-6).log().square().mean()
