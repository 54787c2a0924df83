"""GrMoE language models for transformers: importing this registers them with AutoConfig and AutoModel*."""

from __future__ import annotations

from transformers.models.auto import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.model.count import Cost, count
from grmoe.model.modeling_grmoe import GrmoeForCausalLM, GrmoeForSequenceClassification, GrmoeModel
from grmoe.model.presets import PRESETS, preset
from grmoe.model.pretrained_grmoe import GrmoePreTrainedModel
from grmoe.model.remote import export_remote_code

AutoConfig.register("grmoe", GrmoeConfig, exist_ok=True)
AutoModel.register(GrmoeConfig, GrmoeModel, exist_ok=True)
AutoModelForCausalLM.register(GrmoeConfig, GrmoeForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(GrmoeConfig, GrmoeForSequenceClassification, exist_ok=True)

__all__ = [
    "PRESETS",
    "Cost",
    "GrmoeConfig",
    "GrmoeForCausalLM",
    "GrmoeForSequenceClassification",
    "GrmoeModel",
    "GrmoePreTrainedModel",
    "count",
    "export_remote_code",
    "preset",
]
