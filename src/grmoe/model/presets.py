"""Named model sizes: two small ones of our own, three from the paper, and three with narrow experts.

The paper's names are not parameter counts. `grmoe info 1.3b` prints the real count; docs/reference/presets.md
explains it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from grmoe import checks
from grmoe.config import unknown
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.model.saved import read_config

_GPT2 = {"vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256, "max_position_embeddings": 1024}


def _stream(width: int) -> dict[str, Any]:
    """The residual stream starts at the scale of what the blocks add to it, and stays near it. Measured for our own
    sizes (docs/results/budgets.md)."""
    return {"embedding_multiplier": round(width**0.5, 1), "residual_loss_coef": 0.01}


PRESETS: dict[str, dict[str, Any]] = {
    # For a laptop: trains visibly in a minute on two cores.
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "router_rank": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        **_stream(128),
    },
    # For minutes on one GPU: large enough to show differences between routers.
    "small": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_experts": 8,
        "router_rank": 64,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        **_stream(512),
    },
    # The paper, appendix "Extended Experimental Details". It states two-layer feed-forwards. It does not say whether
    # embeddings are tied; they are in GPT-2, which has this tokenizer and shape.
    "350m": {
        **_GPT2,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_experts": 8,
        "router_rank": 48,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    # "Approximately 1.3B" active parameters and "the Mistral architecture": SwiGLU and untied embeddings give 1.29 B,
    # two-layer feed-forwards 1.02 B. 4 key-value heads for 16 heads is Mistral's ratio; the paper states none.
    "1.3b": {
        **_GPT2,
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "moe_intermediate_size": 2752,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_experts": 16,
        "router_rank": 64,
    },
    # The paper states only N = 32 and k_r = 64. Our choice for the rest: width and blocks of GPT-3's 2.7B, heads of
    # 128, and the feed-forward and key-value ratios of the 1.3b.
    "2.7b": {
        **_GPT2,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "moe_intermediate_size": 3456,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "num_key_value_heads": 5,
        "num_experts": 32,
        "router_rank": 64,
    },
}


def _fine(name: str, experts: int, width: int, rank: int) -> dict[str, Any]:
    sizes = {"num_experts": experts, "moe_intermediate_size": width, "router_rank": rank}
    return PRESETS[name] | sizes | {"num_experts_per_tok": 8}


# Narrow experts: a quarter of the width and eight per token in place of two, so the active parameters are the same.
# Budgets from one to eight experts per token mean something here.
PRESETS |= {
    "small-fine": _fine("small", experts=32, width=256, rank=16),
    "350m-fine": _fine("350m", experts=32, width=384, rank=24),
    "1.3b-fine": _fine("1.3b", experts=64, width=688, rank=32),
}


def preset(name: str, **changes: Any) -> GrmoeConfig:
    """The configuration of a preset, with fields replaced: `preset("tiny", router="softmax", vocab_size=8192)`."""
    checks.one_of("preset", name, tuple(PRESETS))
    fields = [field.name for field in dataclasses.fields(GrmoeConfig)]
    for change in changes:  # transformers would keep a misspelt field, and nothing would read it
        known = change in fields or hasattr(GrmoeConfig, f"_{change}")  # such as attn_implementation
        checks.require(known, unknown(change, change, fields))
    return GrmoeConfig(**(PRESETS[name] | changes))


def find_config(name: str | Path) -> GrmoeConfig:
    """The configuration of a preset, by its name, or of a saved model, by its folder."""
    if str(name) in PRESETS:
        return preset(str(name))
    checks.require(
        (Path(name) / "config.json").is_file(),
        f"model must be one of {', '.join(PRESETS)} or the folder of a run or a saved model, got {name}",
    )
    return read_config(Path(name))
