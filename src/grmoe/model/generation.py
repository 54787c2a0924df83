"""Generating text from a saved model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, TextStreamer

from grmoe.model import GrmoeForCausalLM
from grmoe.model.presets import find_config


def load(folder: str | Path, alpha: float | Sequence[float] | None = None) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder, on the GPU if there is one. `alpha` replaces the saved dial."""
    folder = Path(folder)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ValueError(
                f"folder must hold a saved model with its tokenizer, got {folder} without {name}"
            )
    find_config(folder)
    dial: dict[str, Any] = {} if alpha is None else {"alpha": alpha}
    model: Any = GrmoeForCausalLM.from_pretrained(folder, dtype="auto", **dial)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device), PreTrainedTokenizerFast.from_pretrained(folder)


def stream(model: Any, tokenizer: Any, prompt: str, *, max_new_tokens: int, temperature: float) -> None:
    """Print the continuation of a prompt. Temperature 0 takes the most probable token each time.

    Text stops at the end of the model's context, with a message, because the model has no later positions.
    """
    ids = tokenizer(prompt, return_tensors="pt", verbose=False).input_ids.to(model.device)
    given, longest = ids.shape[1], model.config.max_position_embeddings
    if given == 0:
        raise ValueError(f"prompt must hold at least one token, got {prompt!r}")
    if given >= longest:
        raise ValueError(
            f"prompt must leave room in the model's context of {longest} tokens, got {given} tokens"
        )
    if given + max_new_tokens > longest:
        room = longest - given
        print(
            f"at most {room} new tokens: the model's context ends at {longest}", file=sys.stderr, flush=True
        )
        max_new_tokens = room
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        **sampling,
    )
