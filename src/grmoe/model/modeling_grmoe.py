"""A decoder language model with GrMoE layers for Hugging Face transformers.

Attention, RoPE, norms, masks, caches, generation and checkpointing are transformers' own. The router, the experts'
backends and the dial are ours. One file, because it is copied beside every exported model.

Legend: B batch, S sequence, T = B·S tokens, H model width, N experts, K most experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.integrations.moe import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_grmoe import GrmoeAttention, head_router
from .choices_grmoe import NOT_CAUSAL, SLOT_ROUTERS
from .configuration_grmoe import GrmoeConfig
from .parts_grmoe import (
    BACKENDS,
    IGNORED,
    AtLeast,
    Dense,
    Dispatch,
    ExpertWeights,
    FrameRouter,
    HashRouter,
    HeadRouter,
    Mass,
    MoE,
    Router,
    RoutingMetrics,
    Selection,
    SlotRouter,
    Threshold,
    TopK,
    all_routers,
    as_autocast,
    build_router,
    checks,
    divergence,
    next_token_loss,
    overlap_penalty,
    read_metrics_of,
    realize,
    routers,
)
from .parts_grmoe import set_alpha as set_router_alpha
from .parts_grmoe import set_layer_numbers as set_router_numbers
from .parts_grmoe import update_priors as update_router_priors

OWN_EXPERTS = ("auto", *BACKENDS)


# -- the feed-forward halves of a block ------------------------------------------------------------------------


@use_experts_implementation
class GrmoeExperts(ExpertWeights):
    """`ExpertWeights` that Hugging Face's experts implementations ("eager", "grouped_mm", …) can also run."""

    def __init__(self, config: GrmoeConfig) -> None:
        assert config.moe_intermediate_size is not None
        super().__init__(
            config.hidden_size, config.moe_intermediate_size, config.num_experts, config.activation
        )
        self.num_experts = config.num_experts
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The implementation "eager": a loop over experts, from Hugging Face's (T, K) format."""
        T, K = top_k_index.shape
        weights_TN = top_k_weights.new_zeros(T, self.num_experts).scatter_add(1, top_k_index, top_k_weights)
        return BACKENDS["reference"](hidden_states, Dispatch.build(weights_TN, weights_TN != 0, K), self)


@use_experts_implementation(has_gate=False)
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


def config_router(config: GrmoeConfig, number: int) -> Router:
    """The router of MoE layer `number`, counted from zero; in fp32 whatever the default dtype is."""
    options = dict(config.router_options or {})
    _check_options(config, options)
    if config.router == "hash":
        options["seed"] = _layer_seed(options.get("seed", 0), number, len(config.moe_layers))
    if config.router in SLOT_ROUTERS and "slots" not in options:
        options.setdefault("max_tokens", config.max_position_embeddings)
    if config.router == "grassmann":
        options["rank"] = config.router_rank
    if config.router_kappa is not None:
        options["kappa"] = config.router_kappa
    if config.identity_experts:
        options["identity"] = config.identity_experts
    selection, numbers = config_policy(config), config.numbers[number]
    if selection is not None:
        options["selection"] = selection
    try:
        router = build_router(
            config.router, config.hidden_size, config.gate_experts, alpha=numbers.alpha, **options
        )
    except TypeError as error:
        raise ValueError(f"router_options must fit the router {config.router!r}: {error}") from error
    # α is stored in the configuration alone, because `from_pretrained(dir, alpha=2)` must have one answer.
    router.register_buffer("alpha_value", router.alpha_value, persistent=False)
    router.budget.layer = number
    router.budget.biased = config.biased
    if selection is not None:
        router.budget.set_numbers(numbers.tau, numbers.cap, numbers.bias)
    router.budget.set_weight_alpha(config.weight_alphas[number])
    # A router's constructor fills it, except on the meta device.
    for module in router.modules():
        module._is_hf_initialized = not router.log_prior.is_meta  # type: ignore[assignment]
    return router


def config_policy(config: GrmoeConfig) -> Selection | None:
    """The routers' selection policy, of the classes that this file knows: transformers loads the code beside a model
    twice, once for the configuration, so that its classes are not ours."""
    policy = config.router_policy(config.budget)
    if policy is None:
        return None
    own = next(
        kind for kind in (TopK, Mass, AtLeast, Threshold, Dense) if kind.__name__ == type(policy).__name__
    )
    return own(**vars(policy))


def _check_options(config: GrmoeConfig, options: Mapping[str, Any]) -> None:
    """Raise for options that the configuration sets under another name: they would have no effect."""
    named = {
        "alpha": "alpha", "identity": "identity_experts", "rank": "router_rank", "selection": "selection",
        "top_k": "num_experts_per_tok",
    }  # fmt: skip
    if config.router_kappa is not None:
        named["kappa"] = "router_kappa"
    for option in options:
        if option in named and options[option] != getattr(config, named[option]):
            raise ValueError(f"router_options.{option} has no effect: set {named[option]}")


def _layer_seed(seed: Any, number: int, layers: int) -> Any:
    """Hash routing: one seed per MoE layer. With a common seed every layer would group the tokens in the same way."""
    if not isinstance(seed, list | tuple):
        return seed + number if isinstance(seed, int) else seed  # the router refuses what is not a number
    if len(seed) != layers:
        wanted = f"one number or {layers}, one per MoE layer"
        raise ValueError(f"router_options.seed must be {wanted}, got {seed!r}")
    return seed[number]


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

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        inner = self.act_fn(up) if self.gate_proj is None else self.act_fn(self.gate_proj(x)) * up
        y: Tensor = self.down_proj(inner)
        return y


class GrmoeDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: GrmoeConfig, layer_idx: int) -> None:
        super().__init__()
        attention: Any = LlamaAttention if config.attention_heads_per_token is None else GrmoeAttention
        self.self_attn = attention(config=config, layer_idx=layer_idx)
        moe_layers = config.moe_layers
        self.mlp: GrmoeMoE | GrmoeMLP = (
            GrmoeMoE(config, moe_layers.index(layer_idx)) if layer_idx in moe_layers else GrmoeMLP(config)
        )
        self.residual_loss_coef = config.residual_loss_coef
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # `_init_weights` gets a module without its name.
        self.self_attn.o_proj.writes_residual = True
        if isinstance(self.mlp, GrmoeMLP):
            self.mlp.down_proj.writes_residual = True  # type: ignore[assignment]

    def forward(
        self, hidden_states: Tensor, *, token_ids: Tensor | None = None, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The residual stream, and from a MoE layer also its router's loss. Checkpointing passes gradients to both.

        token_ids: (B, S), for routers that hash them. All other arguments go to the attention.
        """
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        x = self.post_attention_layernorm(hidden_states)
        if isinstance(self.mlp, GrmoeMLP):
            y: Tensor = self.mlp(x)
            return hidden_states + y
        y, _, loss = self.mlp(x, token_ids)
        if self.residual_loss_coef and self.training:
            loss = loss + self.residual_loss_coef * residual_loss(hidden_states)
        return hidden_states + y, loss


def residual_loss(x_BSH: Tensor) -> Tensor:
    """Mean over tokens of (log mean square)²: zero for tokens of RMS one, equal for RMS c and 1/c.

    An RMS below 1e-3 counts as that, and has no gradient: a padding token at the start of a text is all zero.
    """
    return x_BSH.float().square().mean(-1).clamp(min=1e-6).log().square().mean()


# -- the models ------------------------------------------------------------------------------------------------


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


class GrmoePreTrainedModel(PreTrainedModel):
    config: GrmoeConfig
    config_class = GrmoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GrmoeDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # Frames in bf16 lose orthonormality, and near ties route differently.
    _keep_in_fp32_modules_strict = ["router"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(GrmoeMoE, index=1),
        "hidden_states": GrmoeDecoderLayer,
        "attentions": LlamaAttention,
    }

    def __init__(self, config: GrmoeConfig, *args: Any, **kwargs: Any) -> None:
        config.check()
        super().__init__(config, *args, **kwargs)

    # -- dial, metrics, priors, overlap ------------------------------------------------------------------------

    @property
    def alpha(self) -> list[float]:
        """The dial of each MoE layer. Reading it waits for the device."""
        return [router.alpha for router in routers(self)]

    def set_alpha(self, alpha: Any) -> None:
        """Set the dial: one α for all MoE layers, or one per layer. Above 1 routing is sharper, at 0 uniform.

        Takes Python, NumPy and PyTorch numbers, and lists, arrays or 1-d tensors of them. Ends a budget: the selection
        is the trained one again.
        """
        value = checks.alphas("alpha", alpha)
        set_router_alpha(self, value)
        had_budget = self.config.budget is not None
        self.config.alpha, self.config.budget = value, None
        if had_budget:
            self._use_config_numbers()

    @property
    def budget(self) -> float | None:
        """Experts per token in use; None: the trained setting."""
        return self.config.budget

    def set_budget(self, budget: Any | None) -> None:
        """Set the experts per token: a number within the curve that `grmoe dial` calibrated, or None as trained.

        Sets τ, cap and α of every layer on the device. Nothing is compiled again, except when a model that was trained
        with a threshold or a dense gate gets its first budget.
        """
        before, self.config.budget = self.config.budget, budget
        try:
            self.config.check()
        except ValueError:
            self.config.budget = before
            raise
        self._use_config_numbers()

    def _use_config_numbers(self) -> None:
        """τ, α, cap and bias of every router as the configuration has them."""
        for router in routers(self):
            router.budget.biased = self.config.biased
        set_router_numbers(routers(self), config_policy(self.config), self.config.numbers)

    def routing_metrics(self) -> list[RoutingMetrics]:
        """Metrics of each MoE layer's router since the last reset. Waits for the device."""
        return read_metrics_of(list(routers(self)))

    def head_metrics(self) -> list[RoutingMetrics]:
        """The same of each block's heads, with heads for experts; empty without `attention_heads_per_token`."""
        return read_metrics_of([router for router in all_routers(self) if isinstance(router, HeadRouter)])

    def reset_routing_metrics(self) -> None:
        for router in all_routers(self):
            router.reset_metrics()

    def update_priors(self, rate: float, skip: Tensor | None = None) -> None:
        """One step of every balanced prior (`Router.update_prior`); call it once per optimiser step.

        skip: a 0-d tensor. Where it is nonzero, priors stay as they are.
        """
        update_router_priors(all_routers(self), rate, skip)

    def overlap_penalty(
        self, rho: float, *, relative: bool = True, num_pairs: int | Literal["auto"] | None = None
    ) -> Tensor:
        """Σ over MoE layers of `grmoe.overlap_penalty`; zero for routers without frames of experts.

        Slots have frames too, but as many slots as tokens do not fit apart into `hidden_size` dimensions.
        """
        experts = (router for router in routers(self) if not isinstance(router, SlotRouter))
        named = (getattr(router, "frames", None) for router in experts)
        frames = [f for f in named if isinstance(f, Tensor)]
        if not frames:
            return torch.zeros((), device=self.device)
        if len({f.device for f in frames}) > 1:
            parts = [overlap_penalty(f, rho, relative=relative, num_pairs=num_pairs) for f in frames]
            return torch.stack([part.to(frames[0].device) for part in parts]).sum()
        # All layers at once, because launching the small products layer by layer takes longer than computing them.
        return overlap_penalty(torch.stack(frames), rho, relative=relative, num_pairs=num_pairs).sum()

    # -- hooks of transformers ---------------------------------------------------------------------------------

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Our own backends, unless one of Hugging Face's is requested."""
        if requested_experts is None or requested_experts in OWN_EXPERTS:
            return requested_experts or "auto"
        name: str = super().get_correct_experts_implementation(requested_experts)
        return name

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, initializer_range²); matrices that write into the residual stream get a √(2·blocks) smaller deviation.

        Routers start as their constructors leave them.
        """
        std = self.config.initializer_range
        narrow = std / math.sqrt(2 * self.config.num_hidden_layers)
        if isinstance(module, Router):
            self._init_router(module)
        elif isinstance(module, ExpertWeights):
            init.normal_(module.up, std=std)
            init.normal_(module.down_proj, std=narrow)
        else:
            super()._init_weights(module)
            if isinstance(module, nn.Linear) and getattr(module, "writes_residual", False):
                init.normal_(module.weight, std=narrow)

    def _init_router(self, router: Router) -> None:
        """Fill a router that was made on the meta device and not loaded. Its sums are always reset."""
        tensors = dict(router.state_dict(keep_vars=True))
        if not all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors.values()):
            with torch.device("cpu"):
                if isinstance(router, HeadRouter):
                    fresh = head_router(self.config).state_dict()
                else:
                    number = next(i for i, found in enumerate(routers(self)) if found is router)
                    fresh = config_router(self.config, number).state_dict()
            for name, tensor in tensors.items():
                init.copy_(tensor, fresh[name])
        router.prior_sums.zero_()
        router.reset_metrics()

    def initialize_weights(self) -> None:
        super().initialize_weights()
        for router, weight_alpha in zip(routers(self), self.config.weight_alphas, strict=True):
            router.budget.set_weight_alpha(weight_alpha)
            if isinstance(router, HashRouter):
                router.check_seed()
        for router in all_routers(self):
            if isinstance(router, HeadRouter):
                router.alpha = 1.0
        self._use_config_numbers()

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers. Frames are orthonormal when they are written, whatever trained them."""
        for router in all_routers(self):
            if isinstance(router, FrameRouter):
                router.retract()
        # `router.alpha` may have been set directly. Its fp32 value is rounded; the configuration keeps all digits.
        now = self.alpha
        if now != torch.tensor([n.alpha for n in self.config.numbers], dtype=torch.float32).tolist():
            had_budget = self.config.budget is not None
            self.config.alpha = now[0] if len(set(now)) == 1 else now  # ends a budget
            if had_budget:
                self._use_config_numbers()
        super().save_pretrained(save_directory, *args, **kwargs)


class GrmoeModel(GrmoePreTrainedModel):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: GrmoeConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(GrmoeDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> GrmoeModelOutput:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if input_ids is None and self.config.router == "hash":
            raise ValueError("router 'hash' needs input_ids: it sends a token to an expert by its id")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = x * self.config.embedding_multiplier
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        plain = attention_mask is None and past_key_values is None and position_ids is None
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(x.shape[1], device=x.device) + seen).unsqueeze(0)
        # SDPA is causal without a mask and has no flash kernel with one. When traced, transformers would build it.
        mask = None
        if not plain or self.config._attn_implementation != "sdpa":
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=x,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
        cos, sin = self.rotary_emb(x, position_ids=position_ids)
        rotary = realize(cos), realize(sin)
        # The residual stream too, as with bf16 weights under FSDP: fp32 would double the bytes of every norm and cast
        # its gradient in every half of a block.
        x = as_autocast(x)
        losses = []
        for layer in self.layers:
            out = layer(
                x,
                token_ids=input_ids,
                attention_mask=mask,
                position_embeddings=rotary,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
            x = out[0] if isinstance(out, tuple) else out
            if isinstance(out, tuple):
                losses.append(out[1])
        return GrmoeModelOutput(
            last_hidden_state=self.norm(x), past_key_values=past_key_values, router_losses=tuple(losses)
        )


class GrmoeForCausalLM(GrmoePreTrainedModel, GenerationMixin):
    """`GrmoeModel` with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: GrmoeConfig) -> None:
        super().__init__(config)
        if config.router in NOT_CAUSAL and not config.allow_noncausal_router:
            raise ValueError(
                f"router must be causal in a language model, got {config.router!r}, which looks at later tokens; "
                "set allow_noncausal_router=True to compare losses anyway"
            )
        self.model = GrmoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool = False,
        return_hidden: bool = False,
        teacher: Tensor | None = None,
        **kwargs: Any,
    ) -> GrmoeCausalLMOutput:
        """Logits, and with labels the loss. The loss includes the routers' own while training or with
        output_router_logits.

        skip_logits: return the loss alone, which takes less memory and, on a GPU, less time.
        return_hidden: return `last_hidden_state` too.
        teacher: `last_hidden_state` of another pass over the same tokens. The output then has the divergence from its
            predictions, of labels the mean over those that count.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = outputs.last_hidden_state[:, keep, :]
        aux_loss = None
        if output_router_logits or (self.training and labels is not None):
            aux_loss = torch.stack([loss.to(hidden.device) for loss in outputs.router_losses]).sum()
        loss = logits = None
        if skip_logits:
            loss = self._loss_alone(hidden, labels, **kwargs)
        else:
            logits = self.lm_head(hidden)
            if labels is not None:
                loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        cross_entropy = router_loss = None
        if loss is not None and aux_loss is not None:
            cross_entropy, router_loss = loss, self.config.router_aux_loss_coef * aux_loss
            if labels is not None and kwargs.get("num_items_in_batch") is not None:
                router_loss = router_loss * _share_of_batch(labels, **kwargs)
            loss = cross_entropy + router_loss
        apart = None
        if teacher is not None:
            x, y = (as_autocast(h).flatten(0, -2) for h in (hidden, teacher))
            counts_T = torch.ones(len(x), dtype=torch.bool, device=x.device)
            if labels is not None:  # of conversations, the context counts for nothing
                counts_T = (_targets(labels, **kwargs) != IGNORED).to(x.device)
            apart = divergence(x, y, self.lm_head.weight, counts_T)
        return GrmoeCausalLMOutput(
            loss=loss,  # type: ignore[arg-type]
            divergence=apart,
            last_hidden_state=hidden.detach() if return_hidden else None,
            aux_loss=aux_loss,  # type: ignore[arg-type]
            cross_entropy=None if cross_entropy is None else cross_entropy.detach(),
            router_loss=None if router_loss is None else router_loss.detach(),
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )

    def _loss_alone(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **_: Any,
    ) -> Tensor:
        """The same number as `loss_function`, without the logits."""
        if labels is None:
            raise ValueError("skip_logits needs labels")
        target_T = _targets(labels, shift_labels).to(hidden.device)
        # At least one, because all tokens of a short batch may be context: its loss is 0, and not 0/0.
        count = (target_T != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        count = torch.as_tensor(count, device=hidden.device)
        x = as_autocast(hidden)
        return next_token_loss(x.reshape(-1, x.shape[-1]), self.lm_head.weight, target_T, count)


def _targets(labels: Tensor, shift_labels: Tensor | None = None, **_: Any) -> Tensor:
    """The label of the token after each one, (T,); IGNORED where none counts."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    return shift_labels.reshape(-1)


def _share_of_batch(
    labels: Tensor, num_items_in_batch: Tensor | int, shift_labels: Tensor | None = None, **_: Any
) -> Tensor:
    """The targets here, as a share of those of the whole batch. Trainer adds up the losses of a step's micro-batches,
    so that each of them must have its share of the routers' losses too."""
    targets = labels[..., 1:] if shift_labels is None else shift_labels
    return (targets != IGNORED).sum() / torch.as_tensor(num_items_in_batch, device=labels.device)
