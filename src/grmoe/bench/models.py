"""Whole models to compare: ours, and an equal Hugging Face Olmoe.

The peer is `OlmoeForCausalLM`, made equal to ours block by block, in its favour where there was a choice:
- It has dense feed-forwards where ours has them, and no norms of queries and keys, because ours has none.
- Its experts use the preset's activation. Hugging Face's `grouped_mm` also computes experts without a gate.
- Autocast does not know `grouped_mm`: with fp32 weights the experts would run in fp32, on a GPU one after the other.
  Here they are cast as autocast casts a linear layer.
- It has no balancing loss, which is its default.
A compiled transformers model builds a mask, and SDPA has no flash kernel for masks. "no mask" is the same Olmoe
without the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.olmoe import OlmoeConfig, OlmoeForCausalLM

from grmoe import checks
from grmoe.bench.shapes import Shape
from grmoe.experts import ExpertWeights
from grmoe.model import GrmoeConfig, GrmoeForCausalLM, preset
from grmoe.model.block_grmoe import GrmoeMLP

# How a model runs: the ending of its name, and torch.compile's mode.
FORMS: dict[str, tuple[str, str | None]] = {
    "eager": ("", None),
    "compiled": (", compiled", "default"),
    "graphs": (", CUDA graphs", "reduce-overhead"),
}

# Fields of the same name and meaning in both configurations.
SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "max_position_embeddings", "initializer_range", "tie_word_embeddings", "num_experts", "num_experts_per_tok",
    "norm_topk_prob", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip

# Transformers builds no mask for a name it does not know. The function then tells SDPA to be causal.
ALL_ATTENTION_FUNCTIONS.register("sdpa_no_mask", sdpa_attention_forward)


@dataclass(frozen=True)
class ModelShape(Shape):
    preset: str
    batch: int
    length: int
    hidden_act: str

    def __post_init__(self) -> None:
        checks.positive_int("batch", self.batch)
        longest = self.config().max_position_embeddings
        checks.require(2 <= self.length <= longest, f"length must be in [2, {longest}], got {self.length}")

    def config(self, router: str = "softmax") -> GrmoeConfig:
        return preset(self.preset, router=router, hidden_act=self.hidden_act)

    @classmethod
    def on(
        cls,
        device: torch.device,
        name: str | None,
        batch: int | None,
        length: int | None,
        hidden_act: str | None = None,
        usual_length: int | None = None,
    ) -> ModelShape:
        """Fill in defaults: sizes that are larger on a GPU, and the preset's activation.

        usual_length: the default of `length` in place of 1024 or 128. A preset with less context gets all of that.
        """
        cuda = device.type == "cuda"
        name = name or ("350m" if cuda else "tiny")
        config = preset(name)
        usual = min(usual_length or (1024 if cuda else 128), config.max_position_embeddings)
        return cls(name, batch or (16 if cuda else 2), length or usual, hidden_act or config.hidden_act)


class CastExperts(nn.Module):
    """Hugging Face's `grouped_mm` or `batched_mm` experts in the precision of autocast."""

    has_bias = is_transposed = False

    def __init__(self, config: GrmoeConfig, implementation: str = "grouped_mm") -> None:
        super().__init__()
        assert config.moe_intermediate_size is not None
        self.implementation = implementation
        self.num_experts = config.num_experts
        self.has_gate = config.activation == "swiglu"
        self.weights = ExpertWeights(
            config.hidden_size, config.moe_intermediate_size, config.num_experts, config.activation
        )

    @property
    def up_proj(self) -> Tensor:
        return _cast(self.weights.up)

    gate_up_proj = up_proj

    @property
    def down_proj(self) -> Tensor:
        return _cast(self.weights.down_proj)

    def act_fn(self, inner: Tensor) -> Tensor:
        return self.weights.activate(inner)

    _apply_gate = act_fn

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        compute = ALL_EXPERTS_FUNCTIONS[self.implementation]
        y: Tensor = compute(self, _cast(x), top_k_index, _cast(top_k_weights))
        return y


def _cast(tensor: Tensor) -> Tensor:
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def olmoe(config: GrmoeConfig, attention: str, experts: str = "grouped_mm") -> OlmoeForCausalLM:
    """An Olmoe with the blocks of our configuration."""
    olmoe_config = OlmoeConfig(
        **{name: getattr(config, name) for name in SHARED},
        intermediate_size=config.moe_intermediate_size,  # type: ignore[arg-type]  # resolved
    )
    model = OlmoeForCausalLM._from_config(
        olmoe_config, attn_implementation=attention, experts_implementation="grouped_mm"
    )
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
        new: nn.Module = CastExperts(config, experts) if i in config.moe_layers else GrmoeMLP(config)
        for weight in new.parameters():
            nn.init.normal_(weight, std=olmoe_config.initializer_range)
        if isinstance(new, CastExperts):
            layer.mlp.experts = new
        else:
            layer.mlp = new
    return model


def ours(config: GrmoeConfig) -> GrmoeForCausalLM:
    model: GrmoeForCausalLM = GrmoeForCausalLM._from_config(config, attn_implementation="sdpa")
    return model
