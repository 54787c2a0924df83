"""A micro model with its tokenizer and a little text, as `open_model` would return it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.runs.open import LoadedModel

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "router_rank": 6,
    "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip
PROSE = "The old sailor met Anna in Lisbon, and 3 of them paid $12.50; she didn't ask why. "
CODE = "def add(a, b):\n    return a + b\n\nx_1 = add(2, 3)\n"

Make = Callable[..., LoadedModel]


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "prose.txt").write_text(PROSE * 20)
    (folder / "code.txt").write_text(CODE * 20)
    return [folder / "prose.txt", folder / "code.txt"]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PROSE, CODE] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


@pytest.fixture
def make(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Make:
    def build(**changes: Any) -> LoadedModel:
        torch.manual_seed(0)
        config = GrmoeConfig(**(SIZES | {"vocab_size": len(tokenizer)} | changes))
        model = GrmoeForCausalLM(config).eval()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name.endswith(("log_prior", "log_kappa")):
                tensor.data += 0.3 * torch.randn_like(tensor)
        return LoadedModel(
            path=tmp_path, model=model, tokenizer=tokenizer, tokenizer_folder=tmp_path, length=32
        )

    return build
