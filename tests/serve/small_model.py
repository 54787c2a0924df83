"""A small model with random weights, a tokenizer of bytes, and what `generate` makes of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grmoe.model import GrmoeConfig, GrmoeForCausalLM
from grmoe.serve import Options
from grmoe.serve.sampling import Sampling

EOS = 256
CHAT = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FIELDS: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_experts": 4, "router_rank": 4, "max_position_embeddings": 128, "eos_token_id": EOS, "bos_token_id": EOS,
    "selection": "mass", "selection_tau": 0.6, "router_kappa": 4.0,
}  # fmt: skip
# About what this model computes on random text.
CURVE: list[dict[str, Any]] = [
    {"experts_per_token": 1.0, "tau": 0.2, "alpha": 1.0, "cap": 3},
    {"experts_per_token": 1.25, "tau": 0.6, "alpha": 1.0, "cap": 3},
    {"experts_per_token": 2.0, "tau": [0.92, 0.97], "alpha": [1.0, 1.5], "cap": 3},
    {"experts_per_token": 3.0, "tau": 1.0, "alpha": 1.0, "cap": 3},
]


def make_model(**changes: Any) -> GrmoeForCausalLM:
    torch.manual_seed(0)
    model = GrmoeForCausalLM(GrmoeConfig(**(FIELDS | changes)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and "router" not in name:
                weight.mul_(6)  # answers then depend on the prompt, and on α
    return model.eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters | {"<end>": EOS}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    tokenizer.chat_template = CHAT
    return tokenizer


def offline(
    model: GrmoeForCausalLM,
    prompt: list[int],
    alpha: float,
    tokens: int,
    sampling: Sampling | None = None,
    budget: float | None = None,
) -> list[int]:
    """The specification: this prompt alone through `model.generate`, without the end token."""
    fresh = copy.deepcopy(model)
    if budget is None:
        fresh.set_alpha(alpha)
    else:
        fresh.set_budget(budget)
    drawn: dict[str, Any] = {"do_sample": False}
    if sampling is not None and sampling.temperature:
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        torch.manual_seed(sampling.seed)
    ids = torch.tensor([prompt])
    out = fresh.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, pad_token_id=EOS, **drawn
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer[: answer.index(EOS)] if EOS in answer else answer


def options(folder: Path, **changes: Any) -> Options:
    plain = Options(folder=folder, alpha=1.5, max_body=20_000, concurrency=8, timeout=60, grace=5)
    return replace(plain, **changes)
