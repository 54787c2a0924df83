"""A decoder with GrMoE layers for Hugging Face transformers: a language model, and a classifier of texts.

RoPE, masks, caches, generation and checkpointing are transformers' own. This file is copied beside every exported
model.

Legend: T tokens, those of all sequences in a batch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_grmoe import GrmoeRMSNorm

# Models that an earlier version pickled whole look for all classes of a block here.
from .block_grmoe import GrmoeDecoderLayer, GrmoeExperts, GrmoeMLP, GrmoeMoE, GrmoePlainExperts  # noqa: F401
from .choices_grmoe import NOT_CAUSAL
from .configuration_grmoe import GrmoeConfig
from .outputs_grmoe import (
    GrmoeCausalLMOutput,
    GrmoeModelOutput,
    GrmoeSequenceClassifierOutput,
    last_tokens,
)
from .parts_grmoe import IGNORED, as_autocast, divergence, next_token_loss, realize
from .pretrained_grmoe import GrmoePreTrainedModel


class GrmoeModel(GrmoePreTrainedModel):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: GrmoeConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(GrmoeDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = GrmoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
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
        config = copy.deepcopy(config)  # the dial writes to it, and several models may be made from one
        super().__init__(config)
        if config.router in NOT_CAUSAL and not config.allow_noncausal_router:
            raise ValueError(
                f"router must be causal in a language model, got {config.router!r}, which looks at later tokens; "
                "set allow_noncausal_router=True to compare losses anyway (grmoe train: "
                "model.allow_noncausal_router=true)"
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
            aux_loss = _sum_of_losses(outputs)
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


class GrmoeForSequenceClassification(GrmoePreTrainedModel):
    """`GrmoeModel` with a linear head on the last token of each sequence, as Llama has it in transformers.

    Not by `GenericForSequenceClassification`: it makes its body by `AutoModel`, which asks whether to trust the code of
    an exported folder a second time, and it leaves out the routers' losses.
    """

    # Trainer then takes the mean over the micro-batches of a step. The loss is a mean over sequences, and not over
    # the tokens that Trainer would count.
    accepts_loss_kwargs = False

    def __init__(self, config: GrmoeConfig) -> None:
        config = copy.deepcopy(config)  # the dial writes to it, and several models may be made from one
        super().__init__(config)
        assert config.num_labels is not None  # transformers' default is 2
        self.num_labels = config.num_labels
        self.model = GrmoeModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
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
        **kwargs: Any,
    ) -> GrmoeSequenceClassifierOutput:
        """Logits (B, labels), and with labels the loss of config.problem_type, as in transformers."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        last_B = last_tokens(hidden, input_ids, attention_mask, self.config.pad_token_id)
        logits = self.score(hidden[torch.arange(hidden.shape[0], device=hidden.device), last_B])
        loss = aux_loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
            if self.training:
                aux_loss = _sum_of_losses(outputs).to(loss.device)
                loss = loss + self.config.router_aux_loss_coef * aux_loss
        return GrmoeSequenceClassifierOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            aux_loss=aux_loss,
            router_logits=outputs.router_logits,
        )


def _sum_of_losses(outputs: GrmoeModelOutput) -> Tensor:
    """Of all MoE layers, on the device of the last state."""
    assert outputs.router_losses is not None
    assert outputs.last_hidden_state is not None
    return torch.stack([loss.to(outputs.last_hidden_state.device) for loss in outputs.router_losses]).sum()


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


# Of other models transformers' Trainer does not know that the label of a token is the next one. With label smoothing it
# would train them to repeat their input.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(GrmoeConfig.model_type, GrmoeForCausalLM.__name__)
