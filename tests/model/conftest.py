"""A model small enough to run in milliseconds, and weights large enough that its logits are not all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grmoe.model import GrmoeConfig, GrmoeForCausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "router_rank": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}

Build = Callable[..., GrmoeForCausalLM]


@pytest.fixture
def config() -> Callable[..., GrmoeConfig]:
    return lambda **changes: GrmoeConfig(**(SIZES | changes))


@pytest.fixture
def build(config: Callable[..., GrmoeConfig]) -> Build:
    """A seeded model in eval mode, in layers that differ: priors and concentrations are not at their start."""

    def make(**changes: Any) -> GrmoeForCausalLM:
        torch.manual_seed(0)
        model = GrmoeForCausalLM(config(**changes)).eval()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name.endswith(("log_prior", "log_kappa")):
                tensor.data += 0.3 * torch.randn_like(tensor)
        return model

    return make


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (3, 9), generator=torch.Generator().manual_seed(1))


def write_tokenizer(folder: Path, vocab_size: int = 300) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def main(): return the sum of the parts"] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)
    return fast


def save(build: Build, folder: Path, **changes: Any) -> tuple[Path, GrmoeForCausalLM]:
    """A folder with a model and its tokenizer."""
    tokenizer = write_tokenizer(folder)
    model = build(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **changes)
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def saved(build: Build, tmp_path: Path) -> tuple[Path, GrmoeForCausalLM]:
    return save(build, tmp_path)


@pytest.fixture
def unusual(build: Build, tmp_path: Path) -> tuple[Path, GrmoeForCausalLM]:
    """With the parts that few models have."""
    return save(build, tmp_path, identity_experts=1, attention_heads_per_token=3)
